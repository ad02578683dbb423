"""What a rank still does at the end of its job: threads, exit hooks, checkpoints."""

import os
import re
import signal
import threading
import time
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from rankwise.checkpoint import AsyncCheckpointIO, TorchCheckpointIO
from rankwise.errors import WorkerKilledError, WorkerRaisedError, WorkerTimedOutError
from rankwise.monitoring import stragglers
from rankwise.strategies import Strategy
from tests.helpers.scripts import ScriptRunner
from tests.process.helpers import ddp, with_tests
from tests.process.resume_tasks import ThroughTorch


def leave_a_thread(strategy: Strategy, seconds: float, path: str) -> None:
    def upload() -> None:
        time.sleep(seconds)
        Path(path).touch()

    if strategy.global_rank == 1:
        threading.Thread(target=upload, name="upload").start()


def leave_pools_and_a_thread(strategy: Strategy, folder: str, pools: list[Executor]) -> torch.Tensor:
    pools += [ThreadPoolExecutor(1), ProcessPoolExecutor(1)]
    for number, pool in enumerate(pools[-2:]):
        pool.submit(time.sleep, 0)
        pool.submit(Path(folder, f"done_{number}_{strategy.global_rank}").touch)
    leave_a_thread(strategy, 0.5, f"{folder}/done_uploading")
    return strategy.all_reduce(torch.ones(1), reduce_op="sum")


def test_pools_that_are_left_open_end_with_their_rank(tmp_path: Path) -> None:
    """They finish their work, as a thread that is no daemon does; the caller's own pool stays."""
    with ThreadPoolExecutor(1) as callers:
        job = ddp("fork", timeout=20)
        assert callers.submit(job.launch, leave_pools_and_a_thread, str(tmp_path), []).result() == 2
        assert callers.submit(int, "7").result() == 7
    assert len(list(tmp_path.glob("done_*"))) == 5


IN_A_CYCLE = """
    import atexit, gc, sys

    class Log:
        def __init__(self, name):
            self.itself, self.file = self, open(name, "w")

    atexit.register(lambda: Log(f"{sys.argv[2]}-frozen-{gc.get_freeze_count() > 0}").file.close())
    from rankwise import Trainer

    def leave(strategy):
        global log
        log = Log(f"{sys.argv[2]}-{strategy.global_rank}")
        log.file.write("written")

    if __name__ == "__main__":
        Trainer(strategy=sys.argv[1], accelerator="cpu", devices=2).strategy.launch(leave)
"""


@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn"])
def test_a_file_in_a_reference_cycle_is_flushed(
    strategy: str, run_script: ScriptRunner, tmp_path: Path
) -> None:
    """Only a collection would close it, and a worker ends without its last ones, unlike the main process."""
    result = run_script(IN_A_CYCLE, strategy, str(tmp_path / "log"), fresh=True)  # a fork has frozen objects
    assert (result.returncode, result.stderr) == (0, ""), result
    expected = {"log-0": "written", "log-1": "written", "log-frozen-True": "", "log-frozen-False": ""}
    assert {path.name: path.read_text() for path in tmp_path.glob("log*")} == expected


def test_a_rank_that_does_not_leave(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that does not exit within `timeout` is an error with the rank and its stacks."""
    monkeypatch.setattr(stragglers, "LEAST_TO_LEAVE_S", 1.0)
    with pytest.raises(WorkerTimedOutError, match="the end of the job") as caught:
        ddp("fork", timeout=3.0, stall_warning=0.8).launch(leave_a_thread, 60, str(tmp_path / "uploaded"))
    assert (caught.value.global_rank, caught.value.missing) == (0, (1,))
    assert caught.value.last_seen[0].startswith("global_rank=1 was last in leaving")
    stderr = capfd.readouterr().err
    assert re.search(r"global_rank=1 was last in leaving, . s ago\. The main process waits for it", stderr)
    assert "in upload" in stderr.partition("stacks of global_rank=1")[2]


class Slow(ThroughTorch):
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> None:
        time.sleep(self.seconds)
        super().save_checkpoint(checkpoint, path)


def save_and_fail(strategy: Strategy, who: int, path: str) -> None:
    strategy.save_checkpoint({"step": 7}, path)
    strategy.barrier()
    if strategy.global_rank == who:
        raise ValueError("the cause")
    try:
        time.sleep(60)
    finally:
        time.sleep(60)  # it hears nothing any more


@pytest.mark.parametrize("who", [0, 1])
def test_failures_cut_no_checkpoint(who: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """When a rank fails, a thread of rank 0 may finish its checkpoint after the grace period."""
    strategy = ddp("fork", checkpoint_io=AsyncCheckpointIO(Slow(2.5)), grace_period_s=0.2)
    began = time.monotonic()
    with pytest.raises(WorkerRaisedError, match="the cause"):
        strategy.launch(save_and_fail, who, str(tmp_path / "x.ckpt"))
    assert time.monotonic() - began < 40
    assert TorchCheckpointIO().load_checkpoint(tmp_path / "x.ckpt") == {"step": 7}
    assert "the job ends when global_rank=0 has written its checkpoint" in capfd.readouterr().err


ALONE = """
    import sys, time
    from rankwise.checkpoint import AsyncCheckpointIO
    from rankwise.strategies import SingleDeviceStrategy
    from tests.process.test_leaving import Slow

    def job(strategy):
        strategy.save_checkpoint({"step": 7}, sys.argv[2])
        print("busy", flush=True)
        time.sleep(60)

    slow = AsyncCheckpointIO(Slow(float(sys.argv[1])))
    SingleDeviceStrategy(accelerator="cpu", checkpoint_io=slow).launch(job)
"""


@pytest.mark.parametrize("signals", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_sigterm_waits_for_a_checkpoint_once(signals: int, run_script: ScriptRunner) -> None:
    """A rank without a supervisor ends when its thread has written, and at once for a second signal."""
    path = run_script.folder / "x.ckpt"
    running = run_script.start(ALONE, "1" if signals == 1 else "50", str(path), env=with_tests())
    running.wait_for("busy")
    for _ in range(signals):
        running.send_signal(signal.SIGTERM)
        time.sleep(2.1 * (signals - 1))
    assert running.finish(timeout=20).returncode == -signal.SIGTERM
    assert path.exists() is (signals == 1)


def signalled_in_a_wait(strategy: Strategy, path: str, seconds: float, at: list[float]) -> None:
    strategy.barrier()
    if strategy.global_rank == 1:
        time.sleep(30)
    if seconds:
        strategy.checkpoint_io.save_checkpoint({"step": 7}, path)
    for second in at:
        threading.Timer(second, os.kill, [os.getpid(), signal.SIGTERM]).start()
    torch.distributed.all_reduce(torch.ones(1))  # in C++, where no handler of Python's runs


@pytest.mark.parametrize(
    ("seconds", "at", "is_saved"),
    [
        (0, [1.0], False),  # nothing is written
        (2, [1.0], True),  # it ends once that is written
        pytest.param(60, [1.0, 3.5], False, marks=pytest.mark.soak),  # it insists
    ],
)
def test_sigterm_in_a_collective(seconds: float, at: list[float], is_saved: bool, tmp_path: Path) -> None:
    """A rank that waits in a collective in C++ ends at once too."""
    path = tmp_path / "x.ckpt"
    strategy = ddp("fork", checkpoint_io=AsyncCheckpointIO(Slow(seconds)), timeout=60.0)
    began = time.monotonic()
    with pytest.raises(WorkerKilledError) as caught:
        strategy.launch(signalled_in_a_wait, str(path), seconds, at)
    assert time.monotonic() - began < 25
    assert (caught.value.global_rank, caught.value.signal_number) == (0, signal.SIGTERM)
    assert path.exists() is is_saved


FITS = """
    import sys
    from tests.process.training_tasks import Regression, loader, quiet_trainer

    if __name__ == "__main__":
        for strategy in sys.argv[1:]:
            devices = 1 if strategy == "single_device" else 2
            quiet_trainer(strategy, devices, max_epochs=1).fit(Regression(), loader(8, 2))
"""


@pytest.mark.parametrize(
    "strategies",
    [["single_device", "ddp_fork"], ["ddp"], pytest.param(["ddp_spawn"], marks=pytest.mark.soak)],
)
def test_no_temporary_files_are_left(strategies: list[str], run_script: ScriptRunner, tmp_path: Path) -> None:
    """A job leaves no file there, nor the folder that torch makes for what it would compile."""
    (folder := tmp_path / "temporary").mkdir()
    variables = with_tests({"TMPDIR": str(folder), "TORCHINDUCTOR_CACHE_DIR": None})
    result = run_script(FITS, *strategies, env=variables, siblings=1)
    assert result.returncode == 0, result.stderr
    assert list(folder.iterdir()) == []
