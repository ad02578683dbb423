"""A rank that the others wait for is reported meanwhile, and named with its stacks at the timeout."""

import os
import re
import signal
import time
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from rankwise.callbacks import Callback
from rankwise.errors import WorkerTimedOutError
from rankwise.strategies import DDPStrategy
from tests.helpers.scripts import ScriptRunner
from tests.process.helpers import ddp
from tests.process.training_tasks import Regression, dataset, quiet_trainer


class Slow(TensorDataset):
    """Hangs in the rank that gets sample 9 (with two ranks, rank 1), by `how`."""

    def __init__(self, how: str) -> None:
        super().__init__(*dataset(64).tensors)
        self.how = how

    def __getitem__(self, index: int) -> Any:
        if index == 9 and self.how == "sleep":
            time.sleep(60)
        if index == 9 and self.how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        return tuple(column[index] for column in self.tensors)


@pytest.mark.parametrize("how", ["sleep", pytest.param("stop", marks=pytest.mark.soak)])
def test_a_rank_that_hangs_in_its_data(how: str, capfd: pytest.CaptureFixture[str]) -> None:
    """It is reported with step and phase while it hangs; at the timeout the error and the stacks name it.

    A rank that hears nothing, as it is suspended, is killed at once.
    """
    strategy = ddp("fork", timeout=3.0, stall_warning=0.8, grace_period_s=20 if how == "stop" else 1)
    trainer = quiet_trainer(strategy, 2, max_epochs=1)
    began = time.monotonic()
    with pytest.raises(WorkerTimedOutError) as caught:
        trainer.fit(Regression(), DataLoader(Slow(how), batch_size=2))
    assert time.monotonic() - began < 40
    error, stderr = caught.value, capfd.readouterr().err
    assert (error.global_rank, error.missing) == (0, (1,))
    [line] = error.last_seen
    assert line.startswith("global_rank=1 was last in step 2, data loading, ")
    assert line in str(error)
    assert "waited too long for global_rank=1" in str(error)
    assert "rankwise: global_rank=1 was last in step 2, data loading, " in stderr
    assert "The others wait: global_rank=0 was last in step 2, forward" in stderr
    after_title = stderr.partition("stacks of global_rank=0")[2]
    assert re.search(r"^(Thread|Current thread|  \(it has left\))", after_title, re.MULTILINE)
    if how == "sleep":
        assert "in __getitem__" in stderr.partition("stacks of global_rank=1")[2]


def three_wait(strategy: Any) -> None:
    """Rank 3 hangs; the others wait in a collective, rank 2 in torch's own."""
    strategy.barrier()
    if strategy.global_rank == 3:
        time.sleep(60)
    if strategy.global_rank == 2:
        dist.all_reduce(torch.ones(4))
    strategy.all_reduce(torch.ones(4))


class HangsInRankThree(Callback):
    """Rank 3 hangs before its third step."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 3 and batch_idx == 2:
            time.sleep(60)


@pytest.mark.parametrize("is_fit", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["launch", "fit"])
def test_who_waits_too_is_not_missing(is_fit: bool) -> None:
    """Of four ranks only the one that hangs is missing; the others are shown where they waited."""
    strategy = ddp("fork", devices=4, timeout=10 if is_fit else 4)
    with pytest.raises(WorkerTimedOutError) as caught:
        if is_fit:
            trainer = quiet_trainer(strategy, 4, max_epochs=1, callbacks=[HangsInRankThree()])
            trainer.fit(Regression(), DataLoader(dataset(64), batch_size=2))
        else:
            strategy.launch(three_wait)
    error = caught.value
    assert error.missing == (3,), str(error)
    assert error.global_rank != 3
    assert len(error.last_seen) == 3
    assert not re.search("teardown|finished", str(error.last_seen))


class LogsNothing(Regression):
    """Its steps end without a collective, but for the first, which compares what the ranks log."""

    def log(self, *args: Any, **kwargs: Any) -> None:
        pass


class StopsWithoutTheOther(Callback):
    """Suspends rank 1 after the second step, and lets rank 0 ask to stop."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            return
        if trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        while not _a_rank_is_suspended():  # before, it would say when
            time.sleep(0.02)
        trainer.should_stop = True


def _a_rank_is_suspended() -> bool:
    return any(rank.status() == psutil.STATUS_STOPPED for rank in psutil.Process(os.getppid()).children())


def test_a_rank_that_does_not_say_when_to_stop() -> None:
    """A rank that does not answer the request to stop is named at the timeout, with its last step."""
    trainer = quiet_trainer(ddp("fork", timeout=3.0), 2, max_epochs=1, callbacks=[StopsWithoutTheOther()])
    with pytest.raises(WorkerTimedOutError, match="global_rank 1 did not say when") as caught:
        trainer.fit(LogsNothing(), DataLoader(dataset(64), batch_size=2))
    assert caught.value.exception_type == "StopAgreementError"
    assert (caught.value.global_rank, caught.value.missing) == (0, (1,))
    assert caught.value.last_seen[0].startswith("global_rank=1 was last in step 1, ")


class Late(DDPStrategy):
    """Rank 1 does not take part in the rendezvous."""

    def setup_environment(self) -> None:
        time.sleep(60 * self.global_rank)
        super().setup_environment()


def test_a_rank_that_does_not_come(capfd: pytest.CaptureFixture[str]) -> None:
    """A rank that misses the rendezvous within init_timeout is named, with its stack."""
    strategy = Late(start_method="fork", accelerator="cpu", devices=2, init_timeout=3.0)
    with pytest.raises(WorkerTimedOutError) as caught:
        strategy.launch(print)
    assert caught.value.missing == (1,)
    assert caught.value.last_seen[0].startswith("global_rank=1 was last in starting, ")
    assert "in setup_environment" in capfd.readouterr().err


STACKS = """
    import sys, time
    from pathlib import Path
    from rankwise import DDPStrategy

    def job(strategy):
        strategy.barrier()
        print("busy", flush=True)
        while strategy.global_rank == 1 and not Path("seen").exists():
            wait_in_rank_one()
        strategy.barrier()

    def wait_in_rank_one():
        time.sleep(0.05)

    if __name__ == "__main__":
        DDPStrategy(start_method=sys.argv[1], accelerator="cpu", devices=2).launch(job)
        print("done")
"""


@pytest.mark.parametrize("start_method", ["popen", pytest.param("spawn", marks=pytest.mark.soak)])
def test_stacks_on_request(start_method: str, run_script: ScriptRunner) -> None:
    """SIGUSR2 to the main process prints every rank's stacks, and the job continues."""
    running = run_script.start(STACKS, start_method, siblings=1)
    running.wait_for("busy", count=2)
    running.wait_until_blocked()  # in the barrier
    running.send_signal(signal.SIGUSR2)
    deadline = time.monotonic() + 20  # then the assertions say what is missing
    shown = ("in wait_in_rank_one", "in barrier")
    while not all(each in running.stderr for each in shown) and time.monotonic() < deadline:
        time.sleep(0.02)
    (run_script.folder / "seen").touch()
    result = running.finish(timeout=60).check_returncode()
    assert "done" in result.stdout
    for rank in range(2):
        assert result.stderr.count(f"stacks of global_rank={rank}") == 1
    assert "in wait_in_rank_one" in result.stderr.partition("stacks of global_rank=1")[2]
    assert "in barrier" in result.stderr.partition("stacks of global_rank=0")[2]
