"""`rankwise.testing`: functions and tests on several ranks, their failures and their limits of time."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rankwise.errors import (
    InvalidArgumentError,
    InvalidTypeError,
    WorkerError,
    WorkerKilledError,
    WorkerRaisedError,
    WorkerTimedOutError,
)
from rankwise.strategies import DDPStrategy, Strategy
from rankwise.testing import run_distributed
from tests.helpers.scripts import ScriptRunner
from tests.process.helpers import PYTEST

QUICK, SOAK = pytest.mark.quick, pytest.mark.soak
TESTS = Path(__file__).with_name("distributed_cases.py")


def place_and_sum(strategy: Strategy, number: int) -> tuple[int, int]:
    return strategy.global_rank, int(strategy.all_reduce(torch.tensor(number), reduce_op="sum"))


@pytest.mark.parametrize(
    "start_method", [pytest.param("fork", marks=QUICK), "forkserver", pytest.param("spawn", marks=SOAK)]
)
def test_values(start_method: str) -> None:
    """The values of all ranks are returned in rank order."""
    found = run_distributed(place_and_sum, 5, world_size=3, start_method=start_method)
    assert found == [(rank, 15) for rank in range(3)]


def fail(strategy: Strategy, how: str) -> None:
    strategy.barrier()
    if strategy.global_rank == 1:
        time.sleep(1)  # until rank 0 sleeps
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("the loss is nan")
    time.sleep(60)


@pytest.mark.parametrize(("how", "error"), [("raise", WorkerRaisedError), ("kill", WorkerKilledError)])
def test_failure(how: str, error: type[WorkerError]) -> None:
    """The first failure is raised, with the tracebacks of all ranks that have one."""
    with pytest.raises(error) as caught:
        run_distributed(fail, how)
    text = str(caught.value)
    assert caught.value.global_rank == 1
    assert text.count("--- traceback of global_rank=") == (2 if how == "raise" else 1)
    assert "time.sleep(60)" in text  # where rank 0 was


@pytest.mark.quick
def test_hang(capfd: pytest.CaptureFixture[str]) -> None:
    """A job that takes too long is ended at its limit, with the stacks of all ranks."""
    began_s = time.monotonic()
    text = r"had not ended 1\.5 s after the job had begun, its time limit"
    with pytest.raises(WorkerTimedOutError, match=text):
        run_distributed(hang, timeout=1.5)
    assert time.monotonic() - began_s < 20
    stacks = capfd.readouterr().err.split("stacks of global_rank=")[1:]
    assert [text[0] for text in stacks] == ["0", "1"]
    assert all("in hang" in text for text in stacks)


def hang(strategy: Strategy) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    if strategy.global_rank == 1:
        time.sleep(60)
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"timeout": 0}, InvalidArgumentError, "timeout=0 is not possible"),
        ({"timeout": "1"}, InvalidTypeError, "timeout"),
        ({"world_size": 0}, InvalidArgumentError, "world_size=0"),
        ({"world_size": True}, InvalidTypeError, "world_size"),
        ({"start_method": "popen"}, InvalidArgumentError, "popen"),
        ({"world_sise": 2}, TypeError, "world_sise"),
    ],
    ids=str,
)
def test_arguments(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    """Impossible arguments are refused before any process starts, and named as they were given."""
    with pytest.raises(error, match=text):
        run_distributed(lambda _: pytest.fail("was started"), **arguments)


def test_the_limit_of_a_rerun_script(run_script: ScriptRunner) -> None:
    """The limit holds for each job of a script, and not for the time between them."""
    result = run_script(
        """
        import time
        from rankwise.errors import WorkerTimedOutError
        from rankwise.strategies import DDPStrategy

        def work(strategy, seconds):
            time.sleep(seconds if strategy.global_rank == 1 else 0)
            return "done"

        for seconds in (0, 0, 60):
            strategy = DDPStrategy(accelerator="cpu", devices=2, grace_period_s=0.2).with_(time_limit=2)
            print(strategy.launch(work, seconds), flush=True)
            time.sleep(1.5)
        """,
        siblings=1,
    )
    assert result.stdout.count("done") >= 2, result
    assert "WorkerTimedOutError" in result.stderr, result
    assert "its time limit" in result.stderr, result


@pytest.mark.distributed
def test_marked(rank_strategy: DDPStrategy, tmp_path: Path) -> None:
    """A test with the marker runs on every rank, with the values of its fixtures."""
    assert dist.get_world_size() == rank_strategy.world_size == 2
    assert rank_strategy.all_gather_object(str(tmp_path)) == [str(tmp_path)] * 2


@pytest.mark.quick
def test_reports(run_script: ScriptRunner) -> None:
    """A failure on a rank is reported as any other, with the tracebacks of the other ranks."""
    result = run_script(PYTEST, str(TESTS)).check_returncode(1)
    for text in (
        "3 failed, 2 passed, 1 skipped, 1 xfailed, 1 warning, 1 error",
        "{'numbers': [1, 2]} != {'numbers': [1, 3]}",  # by pytest's own assertion
        "distributed_cases.py:47: not here",
        "world_size=0 is not possible",
        "rank_strategy needs the marker",
        "printed by rank 0",
        "printed by rank 1",
        "raised AssertionError",
        " traceback of global_rank=0 -",
        "was killed by SIGKILL",
    ):
        assert text in result.stdout, result


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("@mark(world_sise=2)\ndef test_it(): pass", "unexpected keyword argument 'world_sise'"),
        ("@mark\nasync def test_it(): pass", "is a coroutine or generator"),
        (
            "import unittest\n\nclass TestIt(unittest.TestCase):\n    @mark\n    def test_it(self): pass",
            "is no test function but a TestCaseFunction",
        ),
    ],
)
def test_markers_without_effect(source: str, reason: str, run_script: ScriptRunner) -> None:
    """The marker is refused where it cannot have its effect."""
    path = run_script.write(f"import pytest\nmark = pytest.mark.distributed\n\n{source}", "test_it.py")
    result = run_script(PYTEST, str(path))
    assert result.returncode != 0, result
    assert reason in result.stdout + result.stderr, result
