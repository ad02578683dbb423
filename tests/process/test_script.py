"""Strategy `ddp` runs the script again for each other rank, with its command line, or refuses at once."""

import errno
import gc
import json
import os
import re
import signal
import socket
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from rankwise.errors import LaunchRefusedError, ProcessGroupError
from rankwise.launchers.script import ScriptLauncher
from rankwise.launchers.script_place import script_place
from rankwise.launchers.supervisor import SupervisionOptions
from rankwise.ranks import RankInfo
from rankwise.start import CONTEXT_VARIABLE
from rankwise.stores.tcp import RendezvousEndpoint
from rankwise.strategies import DDPStrategy
from rankwise.strategies.placement import ranks_on_node
from tests.helpers.scripts import ScriptResult, ScriptRunner
from tests.process.helpers import ddp

SOAK = pytest.mark.soak

SAY = """
import atexit, functools, json, os, sys, time
import rankwise
from rankwise import DDPStrategy, StrategyRegistry
from rankwise.errors import LaunchRefusedError, WorkerError

say = functools.partial(print, flush=True)  # one write, which no other rank's can cut
"""

# Every rank tells what it is; rank 0's launch gives the facts of both to the main process.
MAIN = f"""{SAY}
def facts(strategy):
    return {{
        "argv": sys.argv,
        "orig_argv": sys.orig_argv[1:],
        "utf8": sys.flags.utf8_mode,
        "bytes_warning": sys.flags.bytes_warning,
        "warnings": sys.warnoptions,
        "cwd": os.getcwd(),
        "pid": os.getpid(),
        "rank": strategy.global_rank,
        "name": __name__,
        "package": __package__,
        "total": float(strategy.all_reduce(__import__("torch").tensor(1.0), reduce_op="sum")),
    }}

def main():
    strategy = DDPStrategy(accelerator="cpu", devices=2)
    strategy.launch(facts)
    if strategy.is_global_zero:
        print(json.dumps(strategy.results))

if __name__ == "__main__":
    main()
"""


def facts_of_ranks(result: ScriptResult) -> tuple[dict[str, object], dict[str, object]]:
    """Return rank 0's and rank 1's facts; check that the job succeeded."""
    first, second = json.loads(result.check_returncode().stdout).values()
    assert (first["rank"], second["rank"], first["total"], second["total"]) == (0, 1, 2.0, 2.0)
    assert first["pid"] != second["pid"]
    return first, second


def lines_of(result: ScriptResult, start: str) -> list[str]:
    """Return the lines that begin so, sorted."""
    return sorted(line for line in result.stdout.splitlines() if line.startswith(start))


WARNINGS = ["ignore::UserWarning", "default::BytesWarning"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["-X", "utf8", "-b", "-W", "ignore::UserWarning", "script.py", "--flag", "a b"],
            {"argv": ["script.py", "--flag", "a b"], "utf8": 1, "bytes_warning": 1, "warnings": WARNINGS},
        ),
        pytest.param(
            ["-m", "package.train", "--lr", "0.1"],
            {"orig_argv": ["-m", "package.train", "--lr", "0.1"], "name": "__main__", "package": "package"},
            marks=SOAK,  # tests/unit/launchers/test_command_line.py has such commands, too
        ),
        pytest.param(
            ["-bc", MAIN, "one", "two"], {"bytes_warning": 1, "argv": ["-c", "one", "two"]}, marks=SOAK
        ),
        pytest.param(
            ["changed.py", "--kept"],
            {"argv": ["other", "--gone"], "orig_argv": ["changed.py", "--kept"]},
            marks=SOAK,
        ),
    ],
    ids=["script", "module", "code", "changed"],
)
def test_the_command_line_is_run_again(
    words: list[str], expected: dict[str, object], run_script: ScriptRunner
) -> None:
    """With flags and arguments; also where the script then changes its directory and `sys.argv`."""
    (run_script.folder / "elsewhere").mkdir()
    run_script.write(MAIN)
    run_script.write("", "package/__init__.py")
    run_script.write(MAIN.replace("    main()", "    os.chdir('elsewhere')\n    main()"), "package/train.py")
    change = "import os, sys\nos.chdir('elsewhere')\nsys.argv[:] = ['other', '--gone']\n"
    run_script.write(change + MAIN, "changed.py")
    result = run_script.command([sys.executable, *words], fresh=words[0] == "changed.py")
    first, other = facts_of_ranks(result)
    assert {name: other[name] for name in expected} == expected
    folder = run_script.folder / ("elsewhere" if words[0] in ("-m", "changed.py") else "")
    assert first["cwd"] == other["cwd"] == str(folder)


@pytest.mark.soak
def test_a_command_of_ones_own_is_run(run_script: ScriptRunner) -> None:
    """`command=` is run instead of the process's own, also below a shell script or another program."""
    command = "['sh', '-c', f'{sys.executable!r} -X utf8 {sys.argv[0]!r} --sibling; exit $?']"
    source = MAIN.replace("devices=2", f"devices=2, command={command}")
    first, other = facts_of_ranks(run_script(source))
    assert (len(first["argv"]), other["argv"][1:], other["utf8"]) == (1, ["--sibling"], 1)  # type: ignore[arg-type,index]  # lists


# ---------------------------------------------------------------------- refused at once


def test_stdin_is_refused(run_script: ScriptRunner) -> None:
    """A script from stdin cannot be run again: the error names the alternative, before anything starts."""
    nothing_starts = "sys.modules['subprocess'].Popen = None\ndef job"
    source = ONE_AFTER_ANOTHER.replace("def job", nothing_starts)
    result = run_script.command([sys.executable, "-", "ddp"], stdin=source)
    for text in ("refused 0", "through stdin", 'strategy="ddp_notebook"'):
        assert text in result.stdout, result


def never(strategy: object) -> None:
    """Must not be run."""
    raise AssertionError


# ---------------------------------------------------------------------- several launches

THRICE = f"""{SAY}
def job(strategy, number):
    strategy.barrier()
    return number, os.getpid()

before = dict(os.environ)
for number, kind in enumerate(sys.argv[1:]):
    strategy = DDPStrategy(accelerator="cpu", devices=2, rendezvous=kind)
    value = strategy.launch(job, number)
    say(strategy.global_rank, number, value[0], value[1] == os.getpid(), sorted(strategy.results))
    if strategy.is_global_zero:
        say("pids", [pid for _, pid in strategy.results.values()])
assert dict(os.environ) == before
atexit.register(say, "end", strategy.global_rank)
time.sleep(strategy.global_rank)  # the main script waits for its sibling
"""


@pytest.mark.parametrize(
    "kinds", [["tcp"] * 3, pytest.param(["auto", "auto", "private"], marks=SOAK)], ids=["tcp", "private"]
)
def test_later_launches_use_the_same_processes(kinds: list[str], run_script: ScriptRunner) -> None:
    """Three jobs use one pair of processes; every rank runs to the end of the script, with exit code 0."""
    result = run_script(THRICE, *kinds, siblings=1).check_returncode()
    assert result.stderr == "", result
    assert len(set(lines_of(result, "pids"))) == 1
    assert lines_of(result, "0 ") == [f"0 {n} {n} True [0, 1]" for n in range(3)]
    assert lines_of(result, "1 ") == [f"1 {n} {n} True [1]" for n in range(3)]
    assert lines_of(result, "end") == ["end 0", "end 1"]


ONE_AFTER_ANOTHER = f"""{SAY}
def job(strategy, number, has_to_fail):
    strategy.barrier()
    say("launch", number, "on", strategy.global_rank)
    if has_to_fail and strategy.global_rank == 1:
        raise ValueError("as it was told")

for number, name in enumerate(sys.argv[1:]):
    strategy = StrategyRegistry.create(name, accelerator="cpu", devices=2)
    try:
        strategy.launch(job, number, number == 0 and name == "ddp")
    except WorkerError:
        say("failed", number)
    except LaunchRefusedError as error:
        say("refused", number, error)
"""


@pytest.mark.parametrize(
    "names",
    [("ddp", "ddp", "auto"), pytest.param(("ddp_fork", "ddp"), marks=SOAK)],
    ids=["after a failure", "after a fork"],
)
def test_a_launch_that_no_rerun_comes_to_is_refused(names: tuple[str, ...], run_script: ScriptRunner) -> None:
    """A launch that a re-run script would not reach is refused beforehand; "auto" forks then."""
    result = run_script(ONE_AFTER_ANOTHER, *names, siblings=1).check_returncode()
    numbers = (0, 2) if "auto" in names else (0,)
    assert lines_of(result, "launch") == [
        f"launch {number} on {rank}" for number in numbers for rank in (0, 1)
    ], result
    assert "refused 1" in result.stdout
    assert "it would come to an earlier one first" in result.stdout


@pytest.fixture
def sleeping() -> DDPStrategy:
    """Return a strategy whose other rank never connects."""
    return ddp("popen", command=["sleep", "60"], grace_period_s=0.1)


def test_a_start_that_fails_leaves_nothing(sleeping: DDPStrategy, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was started but cannot be supervised is ended; a failed start closes its descriptors."""

    def no_descriptor(pid: int) -> int:
        raise OSError(errno.EMFILE, "no descriptor is left")

    with monkeypatch.context() as patch, pytest.raises(LaunchRefusedError, match="no more files"):
        patch.setattr(os, "pidfd_open", no_descriptor)
        sleeping.launch(never)
    assert script_place() is None
    gc.collect()
    before = set(Path("/proc/self/fd").iterdir())
    with pytest.raises(FileNotFoundError):
        ddp("popen", command=["/no/such/command"]).launch(never)
    gc.collect()
    assert set(Path("/proc/self/fd").iterdir()) == before


def test_a_meeting_that_fails_is_forgotten() -> None:
    """If the nodes' address is in use, the next launch tries again, with the same error."""
    local_ranks = ranks_on_node(RankInfo(0, 0, 0, 2, 1, 2))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = RendezvousEndpoint(("127.0.0.1", taken.getsockname()[1]), hosts=True)
        options = SupervisionOptions(1.0, timedelta(seconds=5), endpoint=endpoint)
        launcher = ScriptLauncher(local_ranks, options, command=["false"])
        for _ in range(2):
            with pytest.raises(ProcessGroupError, match="in use"):
                launcher.launch(never, {}, "tcp")
            assert script_place() is None


def test_ctrl_c_before_rank_zero_begins(sleeping: DDPStrategy, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt between the start of the job and rank 0's first report ends the job too."""

    def interrupt(*args: object, **options: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(signal, "set_wakeup_fd", interrupt)
    with pytest.raises(KeyboardInterrupt):
        sleeping.launch(never)
    assert script_place() is None


VALUES = f"""{SAY}
import torch

def job(strategy, megabytes):
    return torch.full((megabytes << 18,), float(strategy.global_rank)), bytes(megabytes << 20)

strategy = DDPStrategy(accelerator="cpu", devices=2)
for megabytes in (50, 1):
    strategy.launch(job, megabytes)
    if strategy.is_global_zero:
        for rank, (tensor, raw) in strategy.results.items():
            say("big", rank, tensor.numel() >> 18, bool((tensor == rank).all()), len(raw) >> 20)
try:
    DDPStrategy(accelerator="cpu", devices=2, rendezvous="tcp").launch(job, 1)
except LaunchRefusedError as error:
    say("refused", error)
value = strategy.launch(lambda s: lambda: f"lambda of {{s.global_rank}}")
say("own", strategy.global_rank, value(), sorted(strategy.results))
try:
    DDPStrategy(accelerator="cpu", devices=3).launch(job)
except LaunchRefusedError as error:
    say("refused", error)
"""


def test_values_and_later_launches(run_script: ScriptRunner) -> None:
    """Big values come back; what a later launch cannot be is refused on both ranks, and others go on.

    Processes with a private rendezvous have no port, and two cannot continue as three. The next job's value
    replaces the last one's. Each rank has its own value; one that cannot be pickled stays in its process.
    """
    result = run_script(VALUES, siblings=1).check_returncode()
    assert lines_of(result, "big") == [f"big {n} {size} True {size}" for n in (0, 1) for size in (1, 50)]
    assert lines_of(result, "own") == ["own 0 lambda of 0 [0]", "own 1 lambda of 1 [1]"]
    assert result.stdout.count("this script's processes meet privately") == 2
    assert result.stdout.count("already runs as 2 processes; it cannot go on as 3") == 2


AFTER = """
    import os, sys, time
    from rankwise.strategies import DDPStrategy
    strategy = DDPStrategy(accelerator="cpu", devices=2)
    strategy.launch(lambda s: s.barrier())
    {code}
    sys.stdout.write(f"end {{strategy.global_rank}}\\n")
"""


@pytest.mark.parametrize(
    ("code", "expected", "text"),
    [
        ("1: raise ValueError('too late')", 1, "ValueError: too late"),
        pytest.param("1: sys.exit(4)", 4, "exited with code 4", marks=SOAK),
        pytest.param("1: os.kill(os.getpid(), 9)", 137, "was killed by SIGKILL", marks=SOAK),
        pytest.param("0: raise ValueError('in main')", 1, "ValueError: in main", marks=SOAK),
        ("0: sys.exit(4)", 4, ""),
    ],
    ids=["raise-1", "exit-1", "kill-1", "raise-0", "exit-0"],
)
def test_a_failure_after_the_last_job_is_one(
    code: str, expected: int, text: str, run_script: ScriptRunner
) -> None:
    """An error in the rest of the script, in any rank, determines the exit code."""
    result = run_script(AFTER.format(code=f"if strategy.global_rank == {code}"), siblings=1)
    assert result.returncode == expected, result
    assert text in result.stderr
    assert result.stderr.count("Traceback (most recent call last)") == ("raise" in code)


def test_ctrl_c_at_the_end_of_the_script_is_told(run_script: ScriptRunner) -> None:
    """A main script that is interrupted while it waits for a sibling at its end exits at once with 130."""
    code = "import atexit; atexit.register(print, 'ends', flush=True); time.sleep(60 * strategy.global_rank)"
    running = run_script.start(AFTER.format(code=code), siblings=1)
    running.wait_for("ends")
    running.wait_until_blocked()
    running.send_signal_to_group(signal.SIGINT)
    result = running.finish(timeout=30).check_returncode(130)
    assert "KeyboardInterrupt" in result.stderr


def test_what_the_script_forks_between_jobs_is_its_own(run_script: ScriptRunner) -> None:
    """A process that the main script forks after a job may outlive the script; those of a job may not."""
    code = """if strategy.global_rank == 0 and os.fork() == 0:
        main = os.getppid()
        while os.getppid() == main:
            time.sleep(0.05)
        time.sleep(0.2)
        open("outlived", "w").close()
        os._exit(0)
    """
    run_script.start(AFTER.format(code=code), siblings=1).finish(leftover_grace_s=20).check_returncode()
    assert (run_script.folder / "outlived").exists()


def test_a_script_without_a_launch_starts_nothing(run_script: ScriptRunner) -> None:
    """Creating and binding a strategy starts no process."""
    bind = "DDPStrategy(accelerator='cpu', devices=2).bind()"
    result = run_script(f"{SAY}{bind}\nprint([*open(f'/proc/self/task/{{os.getpid()}}/children')])")
    assert result.stdout == "[]\n", result


@SOAK  # tests/unit/launchers/test_multiprocess.py has the refusal
def test_spawn_without_the_main_guard_says_what_to_do(run_script: ScriptRunner) -> None:
    """A script that launches while a worker imports it: the end of the error names the main guard."""
    source = "import rankwise\nrankwise.DDPSpawnStrategy(accelerator='cpu', devices=2).launch(print)"
    result = run_script(source).check_returncode(1)
    assert "was used while the main module was still being imported" in result.stderr
    assert result.stderr.rstrip().endswith('under: if __name__ == "__main__":')


@pytest.mark.parametrize(
    ("plain", "changed", "text"),
    [
        ("devices=2", "devices=2, command=['false']", "WorkerExitedError.*code 1 before it had started"),
        ("    main()", "    rankwise.rank_zero_only.rank or main()", "code 0 before it had finished"),
    ],
    ids=["start", "way"],
)
def test_a_sibling_that_does_not_join_is_an_error(
    plain: str, changed: str, text: str, run_script: ScriptRunner
) -> None:
    """A command that ends before it joins the job, or goes another way, is named; the script fails."""
    result = run_script(MAIN.replace(plain, changed), siblings=int(plain != "devices=2")).check_returncode(1)
    assert re.search(f"(?s){text}", result.stderr)


def test_command_must_be_words() -> None:
    """`command=` that is a string, empty, or holds no strings is refused by the constructor."""
    for command in ("python train.py", [], [Path("python")], [1]):
        with pytest.raises((TypeError, ValueError), match="command"):
            DDPStrategy(command=command)  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.parametrize("text", ["", "x", "[1, 2]", pytest.param("{}", marks=pytest.mark.quick)])
def test_a_damaged_description_of_a_worker_is_refused(text: str, run_script: ScriptRunner) -> None:
    """The error names the variable: it is of nobody but rankwise."""
    result = run_script("import rankwise", env={CONTEXT_VARIABLE: text}).check_returncode(1)
    text = f"ProcessGroupError: What was read as the environment variable {CONTEXT_VARIABLE} is"
    assert text in result.stderr
