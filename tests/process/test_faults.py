"""Failures: which rank, how, while its peer does what. `test_fault_matrix.py` has the whole table."""

import itertools
import json
import os
import re
import signal
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from rankwise.errors import WorkerError, WorkerExitedError, WorkerKilledError, WorkerRaisedError
from rankwise.strategies import Strategy
from tests.helpers.scripts import ScriptRunner
from tests.process.faults import HOW, LIMIT_S, WHEN, Fault, job, problems, strategy_with
from tests.process.helpers import METHODS, Calls, combinations, ddp, with_tests

SOAK = pytest.mark.soak
Cell = tuple[int, str, str, str]
CELLS: list[Cell] = list(itertools.product((0, 1), HOW, WHEN, ("private", "tcp")))


def _cells(*start_method: str, quick: set[Cell], but: set[Cell] | None = None) -> list[Any]:
    """Return all cells; those that are not `quick` are run by hand (`-m soak`)."""
    ids = {cell: "-".join(map(str, (*start_method, *cell))) for cell in CELLS if cell not in (but or ())}
    soak = {cell: () if cell in quick else SOAK for cell in CELLS}
    return [pytest.param(*start_method, cell, id=name, marks=soak[cell]) for cell, name in ids.items()]


# Before the group and in a step, without a port: `test_fault_matrix.py` has these.
ELSEWHERE = {cell for cell in CELLS if cell[3] == "private" and cell[2] in ("before", "step")}
PRIVATE = {cell for cell in CELLS if cell[3] == "private"} - ELSEWHERE
OVER_TCP = {cell for cell in CELLS if cell[1] in ("raise", "kill") and cell[2] in ("before", "step", "store")}


@pytest.mark.parametrize(
    ("start_method", "cell"),
    [
        *_cells("fork", quick=PRIVATE | OVER_TCP, but=ELSEWHERE),
        *_cells("forkserver", quick={cell for cell in PRIVATE if cell[0] == 1}, but=ELSEWHERE),
        *_cells("spawn", quick=set()),
    ],
)
def test_functions(start_method: str, cell: Cell, tmp_path: Path) -> None:
    """A failure of a rank raises one exception in time, with the right rank and class."""
    who, how, when, rendezvous = cell
    fault = Fault(who, how, when, str(tmp_path / "stamp"))
    with pytest.raises(WorkerError) as caught:
        strategy_with(fault, start_method, rendezvous).launch(job, fault)
    assert problems(fault, caught.value) == []


# Under "ddp" rank 0 is the main process: when it is killed there is no caller left to get an exception.
LETHAL = {cell for cell in CELLS if cell[0] == 0 and cell[1] in ("kill", "_exit")}
RERUN: set[Cell] = {
    (1, "raise", "before", "private"),
    (1, "kill", "step", "tcp"),
    (1, "_exit", "step", "private"),
    (0, "exit", "step", "tcp"),
}
PROGRAM = """
    import json, sys
    import rankwise
    from rankwise.errors import RankwiseError
    from tests.process.faults import LIMIT_S, STALL_S, Fault, job, problems, strategy_with

    who, how, when, rendezvous, stamp = json.loads(sys.argv[1])
    fault = Fault(who, how, when, stamp)
    strategy = strategy_with(fault, "popen", rendezvous)
"""
CAUGHT = """
    try:
        strategy.launch(job, fault)
    except RankwiseError as error:
        connects = (when, rendezvous) == ("before", "tcp")
        print(json.dumps(problems(fault, error, LIMIT_S + STALL_S * connects)))
"""
UNCAUGHT = """
    strategy.launch(job, fault)
    print("went on")
"""


@pytest.mark.parametrize("cell", _cells(quick=RERUN, but=LETHAL))
def test_ddp(cell: Cell, run_script: ScriptRunner, tmp_path: Path) -> None:
    """A failure of a re-run script raises one exception in the main script in time, with the right rank."""
    arguments = json.dumps([*cell, str(tmp_path / "stamp")])
    result = run_script(PROGRAM + CAUGHT, arguments, env=with_tests(), siblings=1)
    assert (result.returncode, result.stdout) == (0, "[]\n"), result


@pytest.mark.parametrize("who", [1, pytest.param(0, marks=SOAK)])
def test_an_uncaught_failure_is_on_stderr_once(who: int, run_script: ScriptRunner, tmp_path: Path) -> None:
    """With no `except`, the script ends with 1, and stderr holds the failing rank's traceback once."""
    cell = json.dumps([who, "raise", "step", "private", str(tmp_path / "stamp")])
    result = run_script(PROGRAM + UNCAUGHT, cell, env=with_tests(), siblings=1)
    assert result.returncode == 1
    assert "went on" not in result.stdout
    assert result.stderr.count("in happen") == 1, result
    assert result.stderr.count("WorkerRaisedError") == 1
    assert f"Worker global_rank={who} " in result.stderr


BUSY = """
    import os, resource, sys

    method, what = sys.argv[1:]
    if what == "import" and (os.environ.get("LOCAL_RANK") == "1" or __name__ == "__mp_main__"):
        print("busy", flush=True)
        sum(range(10**12))  # in one call of C code, with the interpreter's lock, before rankwise is there

    from tests.process.faults import be_busy
    from tests.process.host_cases import strategy_of

    def job(strategy):
        strategy.barrier()
        print("busy", flush=True)
        be_busy(what if strategy.global_rank == 1 else "sleep")

    if __name__ == "__main__":
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        if method.startswith("elastic") and hard > 2048:  # what ends them does not take only the first 1,024
            resource.setrlimit(resource.RLIMIT_NOFILE, (2048, hard))
            kept = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
        strategy_of(method).launch(job)
"""
KILLED = [("popen", "step"), ("fork", "step"), ("popen", "import")]


@pytest.mark.parametrize(
    ("method", "what"),
    [
        *combinations(("popen", "fork", "spawn"), ("step", "sleep"), quick=KILLED),
        *combinations(("popen", "spawn"), ("import",), quick=KILLED),
        *combinations((f"elastic-{each}" for each in METHODS), ("computation", "write"), quick=KILLED),
    ],
)
def test_workers_leave_with_the_main_process(method: str, what: str, run_script: ScriptRunner) -> None:
    """After SIGKILL of the main process all workers end soon, whatever they do, also before they begin.

    So they do after that of an elastic agent: while C code holds the interpreter's lock, and in a write.
    """
    is_elastic, is_early = method.startswith("elastic"), what == "import"
    siblings = int(not (is_elastic or is_early))  # which have imported rankwise
    running = run_script.start(BUSY, method, what, env=with_tests(), fresh=is_elastic, siblings=siblings)
    running.wait_for("busy", count=1 if (method, what) == ("popen", "import") else 2)
    running.send_signal(signal.SIGKILL)
    grace_s = 20 if is_elastic else LIMIT_S
    assert running.finish(leftover_grace_s=grace_s).returncode == -signal.SIGKILL


def finish_then_fail(strategy: Strategy, fault: Fault) -> str:
    if strategy.global_rank == fault.who:
        time.sleep(0.3)
        fault.happen()
    return "finished"


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("how", HOW)
def test_one_that_finished_is_no_success(who: int, how: str, tmp_path: Path) -> None:
    """A rank that has returned already does not make the run a success when the other fails."""
    fault, strategy = Fault(who, how, "", str(tmp_path / "stamp")), ddp("fork")
    with pytest.raises(WorkerError) as caught:
        strategy.launch(finish_then_fail, fault)
    assert problems(fault, caught.value) == []
    assert strategy.results == {}


def both_fail(strategy: Strategy) -> NoReturn:
    strategy.barrier()
    time.sleep(2 * strategy.global_rank)
    raise ValueError(f"failure of {strategy.global_rank}")


def two_are_killed(strategy: Strategy) -> None:
    pids = [int(pid) for pid in strategy.all_gather(torch.tensor([os.getpid()])).flatten()]
    if strategy.global_rank == 0:  # it has left the collective; the stopped ranks cannot fail in theirs
        for number in (signal.SIGSTOP, signal.SIGKILL):
            os.kill(pids[2], number)
            os.kill(pids[1], number)
    time.sleep(60)


def test_two_that_are_killed_at_once_are_both_named() -> None:
    """As by the out-of-memory killer: one is the cause, the other one is listed."""
    with pytest.raises(WorkerKilledError, match="was killed by SIGKILL") as caught:
        ddp("fork", devices=3).launch(two_are_killed)
    error = caught.value
    other = {1: 2, 2: 1}[error.global_rank]
    assert error.consequences == (f"global_rank {other} was killed by SIGKILL",)
    assert error.stopped == (0,)


def fail_beside_collective(strategy: Strategy) -> None:
    strategy.barrier()
    if strategy.global_rank == 2:
        time.sleep(0.1)
        try:
            raise KeyError("the cause")
        finally:
            dist.destroy_process_group()  # the peers' error comes before the report of this one
            time.sleep(0.1)
    dist.all_reduce(torch.ones(1))


def test_a_consequence_is_not_taken_for_the_cause() -> None:
    """Peers that fail because a rank has left are consequences, even when they report first."""
    with pytest.raises(WorkerRaisedError) as caught:
        ddp("fork", devices=3).launch(fail_beside_collective)
    assert (caught.value.global_rank, caught.value.exception_type) == (2, "KeyError")
    assert caught.value.traceback_text.count("Traceback (most recent call last)") == 1


class Unruly(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


ODD = {
    "long": ValueError("x" * 3_000_000),
    "surrogate": ValueError("caf\udce9 \ud800"),
    "unruly": Unruly(),
    "interrupt": KeyboardInterrupt(),
    "empty": ValueError(),
}


def fail_oddly(strategy: Strategy, kind: str) -> None:
    print("before the failure", end="")
    if strategy.global_rank == 0:
        strategy.barrier()
    if kind in ODD:
        raise ODD[kind]
    if kind == "no folder":
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
        os.makedirs("checkpoints/last")  # noqa: PTH103  its frame is in "<frozen os>"
    if kind == "local":

        class Local(Exception):
            def __init__(self, one: int, two: int) -> None:
                super().__init__(one)

        raise Local(1, 2)
    try:
        raise KeyError("inner")
    except KeyError as error:
        raise ValueError("outer") from error


@pytest.mark.parametrize("kind", [*ODD, "no folder", "local", "chained"])
def test_any_exception_is_reported(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Any exception is reported, with rank and chain: long, not decodable, without text, local, chained.

    What the rank has printed before is written.
    """
    with pytest.raises(WorkerRaisedError) as caught:
        ddp("fork").launch(fail_oddly, kind)
    others = {"no folder": "FileNotFoundError", "local": "Local"}
    expected = others.get(kind, type(ODD.get(kind, ValueError())).__name__)
    assert (caught.value.global_rank, caught.value.exception_type) == (1, expected)
    chain = "KeyError: 'inner'.*direct cause.*ValueError: outer" if kind == "chained" else ""
    assert re.search(chain, caught.value.traceback_text, re.DOTALL)
    assert "before the failure" in capfd.readouterr().out


def become_another_program(strategy: Strategy, when: str) -> None:
    if strategy.global_rank == 1:
        os.execv("/bin/sleep", ["sleep", "60"])
    strategy.barrier() if when == "others wait" else time.sleep(60)


@pytest.mark.parametrize("when", ["others wait", "others work"])
def test_a_rank_that_becomes_another_program(when: str) -> None:
    """It is noticed at once that its process cannot report any more, and it is ended."""
    began = time.monotonic()
    with pytest.raises(WorkerRaisedError, match=r"has replaced itself by another program") as caught:
        ddp("fork", timeout=50.0).launch(become_another_program, when)
    assert caught.value.global_rank == 1
    assert time.monotonic() - began < LIMIT_S + 2


def take(strategy: Strategy, value: object) -> None:
    """Take an argument."""


def leave() -> None:
    os._exit(5)  # not given itself: coverage puts a function that does not pickle in its place


@pytest.mark.parametrize(
    ("call", "kind"), [((int, ("no number",)), WorkerRaisedError), ((leave, ()), WorkerExitedError)]
)
def test_arguments_that_do_not_arrive_are_reported(call: tuple[object], kind: type[WorkerError]) -> None:
    """A failure while a rank unpickles its arguments ends the job like any other."""
    ddp("forkserver").launch(take, None)  # which starts the forkserver, if it is not there yet
    start = time.monotonic()
    with pytest.raises(kind):
        ddp("forkserver").launch(take, Calls(*call))
    assert time.monotonic() - start < 20


def clean_up_slowly(strategy: Strategy, folder: str) -> None:
    strategy.barrier()
    if strategy.global_rank == 1:
        while not Path(folder, "waiting").exists():
            time.sleep(0.01)
        raise ValueError("the cause")
    try:
        Path(folder, "waiting").touch()
        time.sleep(60)
    finally:
        time.sleep(0.2)
        Path(folder, "cleaned").touch()


def test_finally_blocks_of_the_others_run(tmp_path: Path) -> None:
    """A rank that is stopped runs its `finally` blocks, within the grace."""
    with pytest.raises(WorkerRaisedError, match="the cause"):
        ddp("fork", grace_period_s=20).launch(clean_up_slowly, str(tmp_path))
    assert (tmp_path / "cleaned").exists()


def total(strategy: Strategy) -> float:
    return float(strategy.all_reduce(torch.ones(1), reduce_op="sum"))


@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
@pytest.mark.parametrize("rendezvous", ["private", "tcp"])
def test_the_next_launch_works(start_method: str, rendezvous: str) -> None:
    """After a failure, whose traceback starts in the user's code, the same strategy launches again.

    The error of a job that is retried in an `except` block does not contain the caught exception.
    """
    strategy = ddp(start_method, rendezvous)
    try:
        raise dist.DistStoreError("wait timeout after 100ms, keys: /config")
    except dist.DistStoreError:
        with pytest.raises(WorkerRaisedError, match="failure of 0") as caught:
            strategy.launch(both_fail)
    assert "in both_fail" in caught.value.traceback_text.splitlines()[1]
    assert "wait timeout" not in caught.value.traceback_text
    assert strategy.launch(total) == 2.0
