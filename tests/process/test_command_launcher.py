"""Ranks that a function starts by a command: supervised as those that rankwise starts by itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from rankwise import CommandLauncher, DDPStrategy
from rankwise.errors import (
    InvalidTypeError,
    LaunchRefusedError,
    WorkerExitedError,
    WorkerKilledError,
    WorkerRaisedError,
    WorkerTimedOutError,
)
from rankwise.launchers.commands import CommandProcess
from rankwise.start import JOB_KEY
from rankwise.strategies import Strategy
from tests.helpers.scripts import ScriptRunner
from tests.process.helpers import with_tests

Start = Callable[[list[str], dict[str, str], int], CommandProcess]


def start_here(command: list[str], environment: dict[str, str], global_rank: int) -> subprocess.Popen[bytes]:
    """Start a rank on this machine."""
    assert environment[JOB_KEY] not in " ".join(command)
    return subprocess.Popen(command, env={**os.environ, **environment}, start_new_session=True)


def by_command(start: Start = start_here, **arguments: Any) -> DDPStrategy:
    """Return a strategy on two CPU processes."""
    arguments = {"accelerator": "cpu", "devices": 2, **arguments}
    return DDPStrategy(launcher=CommandLauncher(start), **arguments)


TRAIN = """
import torch
from tests.process.test_command_launcher import by_command
from tests.process.test_parameters_in_shared_memory import trained

if __name__ == "__main__":
    found = trained(by_command(), 2, is_shared=True)
    expected = trained("single_device", 1, is_shared=False)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    print("equal")
"""


def test_training(run_script: ScriptRunner) -> None:
    """The result is that of one process, and it comes back into the caller's shared memory."""
    result = run_script(TRAIN, env=with_tests(), siblings=2)
    assert result.stdout == "equal\n", result


def fail(strategy: Strategy, how: str) -> None:
    """Fail on rank 1; the other rank waits for it in a collective."""
    if strategy.global_rank == 1:
        if how == "raise":
            raise ValueError("boom on purpose")
        if how == "exit":
            os._exit(3)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    strategy.barrier()


FAILURES = {
    "raise": (WorkerRaisedError, "raised ValueError: boom on purpose"),
    "exit": (WorkerExitedError, "exited with code 3 before it had finished"),
    "kill": (WorkerKilledError, "was killed by SIGKILL"),
    "hang": (WorkerTimedOutError, "global_rank=1 was last in running"),
}
FAIL = """
import os
from tests.process.test_command_launcher import FAILURES, by_command, fail, pytest

if __name__ == "__main__":
    for how, (error, text) in FAILURES.items():
        with pytest.raises(error, match=text) as caught:
            by_command(timeout=3).launch(fail, how)
        assert "global_rank=1" in str(caught.value)
        assert f"pid {os.getpid()}" not in str(caught.value)
        print(how)
"""


@pytest.mark.soak
def test_a_failure_is_that_of_the_rank(run_script: ScriptRunner) -> None:
    """The caller's exception names the rank that failed, and what it did; no process is left."""
    result = run_script(FAIL, env=with_tests(), siblings=2 * len(FAILURES))
    assert result.stdout.split() == [*FAILURES], result


class Unkillable:
    """The process of a rank on a host where nobody can send a signal."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self.popen = popen

    def wait(self) -> int:
        return self.popen.wait()

    def kill(self) -> None:
        raise RuntimeError("no connection")


def hold_the_interpreter(strategy: Strategy) -> None:
    """Fail on rank 1, while rank 0 is in C code that runs no other thread."""
    strategy.barrier()
    if strategy.global_rank == 1:
        time.sleep(0.5)
        raise ValueError("boom on purpose")
    import ctypes

    ctypes.PyDLL(None).sleep(60)


@pytest.mark.soak
def test_a_rank_that_cannot_be_killed_from_here(capfd: pytest.CaptureFixture[str]) -> None:
    """The kernel kills it when its connection is closed, in whatever state it is."""
    began = time.monotonic()
    strategy = by_command(lambda *arguments: Unkillable(start_here(*arguments)))
    with pytest.raises(WorkerRaisedError, match=r"global_rank=1 .* raised ValueError"):
        strategy.launch(hold_the_interpreter)
    assert time.monotonic() - began < 50
    assert "kill() raised RuntimeError: no connection" in capfd.readouterr().err


class Started(list[subprocess.Popen[bytes]]):
    """Starts one command in place of each rank's; an exception is raised."""

    def __init__(self, *commands: Any) -> None:
        super().__init__()
        self.commands = commands

    def __call__(self, command: list[str], environment: dict[str, str], global_rank: int) -> Any:
        given = self.commands[global_rank]
        if isinstance(given, Exception):
            raise given
        if given is None:
            return given
        self.append(subprocess.Popen(given, start_new_session=True))
        return self[-1]


SLEEP = ["sleep", "60"]
WORKER = [sys.executable, "-m", "rankwise.launchers.commands.worker", "127.0.0.1", "1", "1"]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("start", "error", "text"),
    [
        (Started(SLEEP, OSError("no route")), LaunchRefusedError, r"start\(\) of global_rank=1 .* no route"),
        (Started(SLEEP, None), InvalidTypeError, r"wait\(\) and kill\(\)"),
        (Started(SLEEP, SLEEP), WorkerRaisedError, "has not connected to the launching process within 1 s"),
        (Started(SLEEP, ["sh", "-c", "exit 7"]), WorkerExitedError, "global_rank=1.*exited with code 7"),
        (Started(SLEEP, WORKER), WorkerExitedError, "global_rank=1.*exited with code 1"),
    ],
    ids=["start raises", "no process", "never connects", "ends early", "without the variables"],
)
def test_a_rank_that_does_not_come(start: Started, error: type[Exception], text: str) -> None:
    """It is named; what has been started has ended when the caller gets the exception."""
    # The time limit has to be longer where an interpreter starts.
    limit_s = 1 if "connected" in text else 60
    with pytest.raises(error, match=text):
        by_command(start, init_timeout=limit_s).launch(fail, "raise")
    assert [popen.poll() is not None for popen in start] == [True] * len(start)


PROGRAM = """
import time
from tests.process.test_command_launcher import by_command

def work(strategy):
    strategy.barrier()
    print("all are here" * (strategy.global_rank == 0), flush=True)
    time.sleep(100)

if __name__ == "__main__":
    by_command().launch(work)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_end_of_the_caller(run_script: ScriptRunner, number: signal.Signals) -> None:
    """It ends the ranks too, which are in sessions of their own."""
    running = run_script.start(PROGRAM, env=with_tests(), siblings=2)
    running.wait_for("all are here")
    ranks = psutil.Process(running.pid).children(recursive=True)
    assert len(ranks) == 2
    running.send_signal(number)
    result = running.finish(timeout=30)
    assert result.returncode in (-signal.SIGKILL, 128 + signal.SIGTERM), result
