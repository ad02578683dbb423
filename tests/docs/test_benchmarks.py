"""The pages about benchmarks have what was measured; their arithmetic and simulations are right."""

import os
import runpy
import signal
import subprocess
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks import launched, simulated
from benchmarks.__main__ import QUESTIONS, _parser
from benchmarks.job import Job
from benchmarks.launched import Observed
from benchmarks.paired import Ratio, interleaved
from benchmarks.programs import ProgramError
from benchmarks.results import Result, read_json, rows_of, write_json
from benchmarks.sampling import QUICK, Sampling
from rankwise.failures import exchange
from tests.docs.pages import DOCS
from tests.helpers.scripts import ScriptRunner

SCRIPT = runpy.run_path(str(DOCS / "draw_benchmarks.py"))


def test_pages_and_pictures_are_up_to_date() -> None:
    """They are what the script writes from the results; if not, run `python docs/draw_benchmarks.py`."""
    written: dict[Path, str] = SCRIPT["pages"]()
    assert [path.name for path, text in written.items() if path.read_text() != text] == []


def test_each_question_has_its_place() -> None:
    """Every question of `python -m benchmarks` has a section in one of the pages."""
    text = "".join(page.read_text() for page in SCRIPT["PAGES"])
    assert [name for name in QUESTIONS if f"<!-- {name} -->\n" not in text] == []


def test_questions(capsys: pytest.CaptureFixture[str]) -> None:
    """Without any, all are asked; an unknown one is named, with those that there are."""
    for questions in ([], ["step", "scale"]):
        assert _parser().parse_args(questions).questions == questions
    with pytest.raises(SystemExit):
        _parser().parse_args(["stpe"])
    assert "'stpe' is not one of step, import" in capsys.readouterr().err


def test_contenders_take_turns_in_alternating_order() -> None:
    """Each round calls each contender once; the round that warms up is not counted."""
    calls: list[str] = []

    def call(name: str) -> int:
        calls.append(name)
        return len(calls)

    found = interleaved({name: partial(call, name) for name in "ab"}, 2)
    assert "".join(calls) == "baabba"
    assert found == {"a": [3, 6], "b": [4, 5]}


def test_the_others_take_part_in_the_first_rounds() -> None:
    """Contenders after the first two have fewer rounds; their ratios are to the first one's of these."""
    calls = {name: partial(next, iter(range(number, 100))) for number, name in enumerate("abc", start=1)}
    rounds_of = Sampling(1, programs=3, others=1).rounds_of("abc")
    found = interleaved(calls, 3, warms_up=False, rounds_of=rounds_of)
    assert found == {"a": [1, 2, 3], "b": [2, 3, 4], "c": [3]}
    assert [row.ratio and row.ratio.median for row in rows_of("a case", "s", found)] == [1.0, 1.5, 3.0]


def test_a_run_that_fails_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row says how often; a contender that fails three times in a row has no rows."""
    monkeypatch.chdir(tmp_path)
    twice = "import sys, pathlib as p; f = p.Path('runs'); n = len(f.read_text()) if f.exists() else 0; "
    twice += "f.write_text('x' * (n + 1)); sys.exit(n < 2)"
    programs = {"raw torch": "", "b": twice, "c": "import sys; sys.exit('no')"}

    def run(job: Job) -> Observed:
        try:
            subprocess.run(
                [sys.executable, "-c", programs[job.contender]], check=True, stderr=subprocess.PIPE
            )
        except subprocess.CalledProcessError as error:
            raise ProgramError(error.stderr.decode()) from None
        return Observed(1.0, 2.0)

    monkeypatch.setattr(launched, "observe", run)
    jobs = [Job(name, start="ddp", ranks=2) for name in programs]
    result = launched.compare("launch", {"a title": (jobs, [("a case", "s", lambda job: job.exit_s)])}, QUICK)
    assert [(row.contender, row.note) for row in result.rows] == [
        ("raw torch", ""),
        ("b", "runs that failed and were repeated: 2"),
    ]
    assert result.failed == {"c, a title": "no\n"}


def test_ratios_are_of_the_same_round() -> None:
    """A machine that is slow in one round changes no ratio; the median is that of the ratios."""
    ratio = Ratio.of([2.0, 20.0, 3.0], [1.0, 10.0, 1.0])
    assert (ratio.median, ratio.low, ratio.high) == (2.0, 2.0, 2.5)
    assert Ratio.of([3.0], [2.0]) == Ratio(1.5, 1.5, 1.5)


def test_results_of_other_questions_stay(tmp_path: Path) -> None:
    """A file gets the questions that were measured; those that were not stay as they were."""
    path = tmp_path / "results.json"
    for question in ("one", "other"):
        rows = rows_of("a case", "s", {"raw torch": [1.0, 2.0], question: [2.0, 4.0]})
        write_json(path, {"machine": {}}, [Result(question, rows)])
    found = read_json(path)
    assert list(found) == ["one", "other"]
    assert found["one"]["rows"][1]["ratio"] == {"median": 2.0, "low": 2.0, "high": 2.0}


@pytest.mark.parametrize(
    "simulate",
    [
        simulated.rendezvous,
        lambda world_size: simulated.stop_agreement(world_size, [1]),
        lambda world_size: simulated.stop_agreement(world_size, range(world_size)),
        simulated.failure_exchange,
        simulated.status_report,
    ],
    ids=["rendezvous", "one asks to stop", "all ask to stop", "failure", "report"],
)
def test_requests_of_a_rank_do_not_grow_with_the_world(
    simulate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks but one send the store as many requests in a job of 64 ranks as in one of 32."""
    monkeypatch.setattr(exchange, "_PUBLISH_TIMEOUT", timedelta(0))
    monkeypatch.setattr(exchange, "_REQUESTS_S", 60.0)
    small, large = (sorted(each.requests for each in simulate(size).traffic)[:-1] for size in (32, 64))
    assert max(small) == max(large)
    assert max(large) < 10


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_all_questions() -> None:
    """Each is answered; `.ci/run` asks one."""
    subprocess.run([sys.executable, "-m", "benchmarks", "--quick"], cwd=DOCS.parent, check=True)


KILLED = """
    import os, signal, subprocess, sys, tempfile
    from benchmarks.cleanup import end_programs_with_this_process
    from benchmarks.programs import variables

    end_programs_with_this_process()
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    subprocess.Popen(sleep, env=variables(), start_new_session=True)
    print(tempfile.mkdtemp(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.soak
def test_a_killed_measurement_leaves_nothing(run_script: ScriptRunner) -> None:
    """What it has started ends, in whatever session it is; its temporary files are removed."""
    path = os.pathsep.join([str(DOCS.parent), os.environ["PYTHONPATH"]])
    result = run_script(KILLED, env={"PYTHONPATH": path})  # which sees that no process is left
    assert result.returncode == -signal.SIGKILL, result
    assert not Path(result.stdout.strip()).exists()
