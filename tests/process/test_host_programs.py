"""Programs around a job that have changed what a process has of the operating system, or what it may have."""

import re
import signal
import sys
from typing import Any

import pytest

from tests.helpers.parameters import first
from tests.helpers.scripts import ScriptRunner
from tests.process import host_cases
from tests.process.helpers import METHODS as START_METHODS
from tests.process.helpers import Cases, cases_of, combinations, with_tests
from tests.process.host_cases import FORK_ENDS

SOAK = pytest.mark.soak
METHODS = first(2, ["fork", "popen", "spawn", "forkserver"])
EVERY = [*METHODS, "elastic-fork", pytest.param("elastic-spawn", marks=SOAK)]

UNKNOWN = ("ignored", "reaped")  # how exit codes can be unknown
ALL_METHODS = ("fork", "elastic-fork", "spawn", "forkserver", "elastic-spawn", "popen")

cases = cases_of(host_cases)


@pytest.mark.parametrize(
    ("situation", "method"),
    combinations(("timeout", *UNKNOWN), ALL_METHODS, quick=[("ignored", "fork"), ("reaped", "elastic-fork")]),
)
def test_a_good_job_and_a_killed_rank(situation: str, method: str, cases: Cases) -> None:
    """A default timeout for sockets ends no channel; a rank whose exit code is unknown is good when done.

    A killed rank is named, and why its exit code is not known; where it is known all the same, the signal.
    """
    result = cases("in_situation", situation, method, "good", "bad", siblings=int(method == "popen"))
    assert result.returncode == 0, result
    assert result.stdout.count("fine") == (2 if method == "popen" else 1), result
    how = "exited with an unknown code before it had finished", "was killed by SIGKILL"
    assert any(each in result.stdout for each in how), result
    assert "Error 1 " in result.stdout, result
    assert ("SIGCHLD" in result.stdout) == ("unknown code" in result.stdout), result


def for_each(words: str, command: str, stdout: str, soak: str = "") -> list[Any]:
    """Return a command and what it prints, with each word in place of `?`; with those of `soak` by hand."""
    marks = dict.fromkeys(words.split(), ()) | dict.fromkeys(soak.split(), SOAK)
    return [
        pytest.param(command.replace("?", word), stdout.replace("?", word), marks=mark)
        for word, mark in marks.items()
    ]


KILLED, UNBLOCKED = ".*WorkerKilledError 1 .*", r"{<Signals.SIGUSR1: 10>}\n"
PRINTED = [
    # A forkserver gets the exit status of a killed rank by SIGCHLD, and begins with the signals blocked.
    *for_each("forkserver", "in_situation blocked ? bad", KILLED, soak="fork spawn popen"),
    # Elastic ranks receive SIGTERM, by which torch's agent ends them, and no other signal that was blocked.
    *for_each("fork", "in_situation blocked elastic-? blocked_signals", UNBLOCKED, soak="spawn forkserver"),
    # Signals of ranks that an asyncio program forks wake no event loop of the main process.
    ("asyncio_handler", "own\nown\n"),
    # An event loop whose wake-up descriptor is full reads none of the signals that its timer goes on to send.
    *for_each("fork", "full_wake_up ?", ".*fine.*", soak="popen spawn forkserver"),
    # Ranks go on without a forkserver that is killed during a job; the next launch has another one.
    pytest.param("forkserver_killed good .", "fine\nfine\n", marks=SOAK),
    pytest.param("forkserver_killed bad .", f"fine\n{KILLED}", marks=SOAK),
    # The supervisor reads what /proc says of a rank, whatever bytes that are: a title cut within a character.
    *for_each("1", "cut_title ? fork", ".*Error ? Worker global_rank=? .*", soak="0"),
]


@pytest.mark.parametrize(("command", "stdout"), PRINTED)
def test_a_host(command: str, stdout: str, cases: Cases) -> None:
    """A job has its result, whatever the program has done to its signals, its servers or its title."""
    result = cases(*command.split(), siblings=int("full_wake_up popen" in command))
    assert result.returncode == 0, result
    assert re.fullmatch(stdout, result.stdout, re.DOTALL), result


# Python exits only when the threads of the group have ended, whichever thread has launched.
IN_A_THREAD = (["launch_in_a_thread"], 0, ".*", r"\A\Z")


@pytest.mark.parametrize(
    ("command", "code", "stdout", "stderr"),
    [
        (["writes_to_channel"], 1, ".*", "global_rank=1.*what it sent is no message"),
        (["rest_of_a_script"], 3, "the rest\n", "Worker global_rank=1"),  # rank 0 comes to the end of its own
        (["interrupted"], 0, "saved\ninterrupted\n", ""),  # what stopped ranks raise does not end it
        (["busy", "popen", "swallow", "sigterm"], 128 + signal.SIGTERM, ".*", ""),  # after the grace period
        (["without_grace"], 0, ".*WorkerRaisedError 1 .*", ""),  # it can be interrupted without one
        *first(1, [IN_A_THREAD] * 10),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_script(command: list[str], code: int, stdout: str, stderr: str, cases: Cases) -> None:
    """The main process, which is rank 0, ends as it should, and names the rank that fails."""
    result = cases(*command, siblings=1)
    assert result.returncode == code, result
    assert re.fullmatch(stdout, result.stdout, re.DOTALL), result
    assert re.search(stderr, result.stderr, re.DOTALL), result


by_seccomp = pytest.mark.skipif(sys.platform != "linux", reason="system calls are forbidden by seccomp")


@by_seccomp
@pytest.mark.parametrize("method", [METHODS[0], *METHODS[2:]])
@pytest.mark.parametrize(
    "situation", first(2, ["pidfd missing", "sending refused", "pidfd refused", "memfd refused"])
)
def test_system_calls_that_are_missing(situation: str, method: str, cases: Cases) -> None:
    """Without pidfds or memory files a job ends as it does with them, well or badly.

    The end of the first rank is seen while the other, which was forked later, works on; that one is killed.
    """
    result = cases("in_situation", situation, method, "good", "bad", "stubborn")
    assert result.returncode == 0, result
    assert result.stdout.startswith("fine\n"), result
    assert re.findall("^WorkerKilledError (.) ", result.stdout, re.MULTILINE) == ["1", "0"], result
    assert result.elapsed < 70, result


@pytest.mark.parametrize("method", METHODS)
def test_a_process_that_a_rank_forks(method: str, cases: Cases) -> None:
    """It ends with its own exit code, and the job goes on."""
    result = cases("ranks_fork", method, siblings=int(method == "popen"))
    assert result.returncode == 0, result
    for how, code in FORK_ENDS.items():
        assert result.stdout.count(f"{how}: {code}\n") == 2, result
        assert result.stdout.count(f"{how} fine\n") == (2 if method == "popen" else 1), result
        errors = [part for part in result.stderr.split("--- ") if part.startswith(how)]
        assert ("RuntimeError: the child's own" in "".join(errors)) == (how == "raise"), result


MAIN_IS_A_RANK = first(1, ["popen", *START_METHODS])


@pytest.mark.parametrize("method", MAIN_IS_A_RANK)
@pytest.mark.parametrize("how", first(1, ["thread", "swallow", "except", "blocked", "print"]))
def test_a_rank_that_nothing_interrupts(how: str, method: str, cases: Cases) -> None:
    """It is killed; where it is rank 0 in the main process, that prints the cause and ends."""
    result = cases("busy", method, how, "raise", siblings=int(method == "popen"))
    assert result.returncode == 1, result
    assert "global_rank=1" in result.stderr, result
    assert "ValueError: the cause" in result.stderr, result


HELPER = """
    import subprocess, sys

    helper = subprocess.run([sys.executable, "-c", "import rankwise"], capture_output=True, text=True)
    if helper.returncode:
        sys.exit(helper.stderr)

    from rankwise.strategies import DDPStrategy
    print(DDPStrategy(accelerator="cpu", devices=2, start_method="popen").launch(lambda strategy: "fine"))
"""


def test_a_program_that_a_script_starts_before_it_imports_rankwise(run_script: ScriptRunner) -> None:
    """The program does not take itself for the rank that has started it."""
    result = run_script(HELPER, siblings=1)
    assert result.returncode == 0, result
    assert result.stdout.count("fine") == 2, result


@pytest.mark.parametrize("method", EVERY)
def test_patched_threads(method: str, cases: Cases) -> None:
    """What replaces Python's threads is refused by name."""
    result = cases("patched_threads", method)
    assert "LaunchRefusedError" in result.stdout, result
    assert "gevent has replaced Python's threads" in result.stdout, result
    assert "start_new_thread() is gevent.thread's" in result.stdout, result


@pytest.mark.parametrize("method", EVERY)
def test_too_few_files(method: str, cases: Cases) -> None:
    """The limit is named before anything is started, or the job works; nothing is left."""
    result = cases("few_files", method)
    assert result.returncode == 0, result
    *refused, last = [text for text in result.stdout.split("\n\n") if text.strip()]
    assert refused, result
    for text in refused:
        assert "LaunchRefusedError: The ranks cannot be started: this process may open no more files" in text
        assert "ulimit -n" in text, result
    assert last.split() == ["61", "fine"], result


@by_seccomp
@pytest.mark.parametrize(
    ("situation", "method"),
    combinations(
        ("processes", "memory", "threads"),
        ALL_METHODS,
        quick=[("processes", "fork"), ("memory", "popen"), ("threads", "elastic-fork")],
    ),
)
def test_too_few_processes(situation: str, method: str, cases: Cases) -> None:
    """The limit is named, and no process is left."""
    result = cases("few_processes", situation, method)
    assert result.returncode == 0, result
    memory, user = "there is not enough memory for another process", "this user may start no more processes"
    problem = memory if situation == "memory" else f"{user} or threads"
    assert f"The ranks cannot be started: {problem}" in result.stdout, result


# One program launches by several methods: where a launch is refused, nothing has been started.
REMOVED = """
    import os, sys
    import torch

    if sys.argv[1] == "before":
        os.rmdir(os.getcwd())

    from tests.process.host_cases import quick, report

    if __name__ == "__main__":
        if sys.argv[1] == "after":
            os.rmdir(os.getcwd())
            os.chdir(sys.path[0])
        for method in sys.argv[2:]:
            print("---", method, flush=True)
            report(method, quick, errors=Exception)
"""


@pytest.mark.parametrize(
    ("when", "methods"),
    [
        ("before", ALL_METHODS),
        ("after", ("fork", "elastic-fork", "popen")),
        pytest.param("after", ALL_METHODS, marks=pytest.mark.soak),
    ],
)
def test_a_working_directory_that_has_been_removed(
    when: str, methods: tuple[str, ...], run_script: ScriptRunner
) -> None:
    """The package can be imported; a launch is refused, by whichever method.

    Where the program has gone to another directory only a script is, which would be run again in the first.
    """
    (folder := run_script.folder / "started_in").mkdir()
    result = run_script(REMOVED, when, *methods, cwd=folder, env=with_tests())
    assert result.returncode == 0, result
    outcomes = dict(line.split(maxsplit=1) for line in result.stdout.split("--- ") if line)
    assert sorted(outcomes) == sorted(methods)
    refused = methods if when == "before" else ("popen",)
    assert {outcomes[method].strip() for method in methods if method not in refused} <= {"fine"}
    problem = {
        "before": "cannot be started where the working directory has been removed",
        "after": "the folder that it was started in has been removed",
    }[when]
    for method in refused:
        assert outcomes[method].startswith("LaunchRefusedError"), outcomes
        assert problem in outcomes[method], outcomes


@pytest.mark.parametrize(
    ("how", "method"),
    combinations(
        ("handler", "default", "before"),
        ("fork", "popen", "spawn", "forkserver"),
        quick=[("handler", "popen"), ("default", "fork"), ("before", "fork")],
    ),
)
def test_a_rank_that_handles_sigusr2(how: str, method: str, cases: Cases) -> None:
    """The supervisor asks for its stacks by another signal, and the signal reaches the user's handler."""
    result = cases("handles_sigusr2", method, how, siblings=int(method == "popen"))
    assert "WorkerTimedOutError (1,)" in result.stdout, result
    assert "time.sleep" in result.stderr or ", line" in result.stderr, result
    expected = 0 if how != "before" or method in ("spawn", "forkserver") else 1
    assert result.stdout.count("own handler") == expected, result


def test_a_script_that_forks_after_a_job(cases: Cases) -> None:
    """The child has no part in the script's processes: it may not launch with them, and exits by itself."""
    result = cases("forks_after_a_job", siblings=1)
    assert (result.returncode, result.stderr) == (0, ""), result
    for rank in range(2):
        launch = result.stdout.partition(f"launch of {rank}:\n")[2].splitlines()[0]
        assert launch.startswith("LaunchRefusedError"), result
        assert "No job can start in a process that a rank has forked" in launch, result
        assert f"child of {rank}: 0\n" in result.stdout, result
        assert f"child of {rank}: 3\n" in result.stdout, result
        assert result.stdout.count(f"after {rank}: fine\n") == 2, result


@pytest.mark.parametrize("method", METHODS)
def test_a_launch_leaves_no_descriptors(method: str, cases: Cases) -> None:
    """All are closed at its end, not when garbage is collected, nor kept for a status that nobody knows."""
    result = cases("descriptors", method)
    assert result.returncode == 0, result
    for situation in ("default", "ignored"):
        assert result.stdout.count(f"{situation} 0 0\n") == (2 if method == "popen" else 1), result
