"""Checkpoints that a thread writes: their content, order and errors."""

import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from rankwise.checkpoint import AsyncCheckpointIO, TorchCheckpointIO
from rankwise.errors import CheckpointError, InvalidArgumentError, InvalidTypeError
from rankwise.strategies import SingleDeviceStrategy, Strategy
from tests.helpers.own_process import wait_until
from tests.helpers.raising import raises


class Held(TorchCheckpointIO):  # type: ignore[misc]  # one that differs from the real one in this alone
    """Writes once for each release, and records its calls."""

    def __init__(self) -> None:
        self.may_go = threading.Semaphore(0)
        self.begun = 0
        self.done: list[str] = []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> None:
        self.begun += 1
        self.may_go.acquire(timeout=10)
        self.done.append(f"save {path}")
        super().save_checkpoint(checkpoint, path)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        self.done.append(f"remove {path}")


def wait_for(io: AsyncCheckpointIO) -> None:
    """Wait until its thread has finished, without taking its error."""
    if io._thread is not None:
        io._thread.join()


def test_written_as_it_was(tmp_path: Path) -> None:
    """The file contains the tensors' values at the time of the call."""
    held, weights = Held(), torch.ones(3)
    io = AsyncCheckpointIO(held)
    checkpoint: dict[str, Any] = {"a": weights, "nested": [{"same": weights}], "step": 1}
    io.save_checkpoint(checkpoint, tmp_path / "x.ckpt")
    weights.zero_()
    checkpoint["nested"].append("later")
    held.may_go.release()
    loaded = io.load_checkpoint(tmp_path / "x.ckpt")
    assert loaded["a"].tolist() == [1.0, 1.0, 1.0]
    assert len(loaded["nested"]) == 1
    assert loaded["nested"][0]["same"].data_ptr() == loaded["a"].data_ptr()


def test_what_cannot_be_copied(tmp_path: Path) -> None:
    """It is an error at once, with path and reason; the next save works."""
    saving, path = AsyncCheckpointIO(), tmp_path / "here.ckpt"
    itself: dict[str, Any] = {"epoch": 1}
    itself["callbacks"] = {"mine": [itself]}
    lock = {"lock": threading.Lock()}
    for value, reason in ((itself, "it contains itself"), (lock, "TypeError: cannot pickle '_thread.lock'")):
        with pytest.raises(CheckpointError, match=rf"here\.ckpt.*could not be written: {reason}"):
            saving.save_checkpoint(value, path)
        saving.save_checkpoint({"epoch": 2}, path)
        assert saving.load_checkpoint(path) == {"epoch": 2}
        saving.remove_checkpoint(path)


def test_in_order(tmp_path: Path) -> None:
    """A checkpoint is removed only after the one that replaces it is written."""
    held = Held()
    io = AsyncCheckpointIO(held)
    io.save_checkpoint({}, tmp_path / "new")
    io.remove_checkpoint("old")
    assert held.done == []
    held.may_go.release()
    io.teardown()
    assert held.done == [f"save {tmp_path / 'new'}", "remove old"]


def test_bounded(tmp_path: Path) -> None:
    """A save waits if the queue is full."""
    held = Held()
    io = AsyncCheckpointIO(held, max_pending=1)
    io.save_checkpoint({}, tmp_path / "0")  # the thread has this one in hand

    def save_two_more() -> None:
        for number in (1, 2):
            io.save_checkpoint({}, tmp_path / str(number))

    other = threading.Thread(target=save_two_more)
    other.start()
    other.join(0.2)
    assert other.is_alive()
    held.may_go.release(3)
    other.join(10)
    io.teardown()
    assert len(held.done) == 3


def test_a_failed_save_removes_nothing(tmp_path: Path) -> None:
    """A checkpoint that a failed save should have replaced is not removed, also if its removal was queued."""
    held = Held()
    io = AsyncCheckpointIO(held)
    (tmp_path / "file").touch()
    io.save_checkpoint({}, tmp_path / "file" / "below.ckpt")
    io.remove_checkpoint("old")
    held.may_go.release()
    wait_for(io)
    io.remove_checkpoint("older")  # nobody has been told of the failure yet
    raises(CheckpointError, None, io.teardown)
    io.remove_checkpoint("oldest")
    io.teardown()
    assert held.done == [f"save {tmp_path / 'file' / 'below.ckpt'}", "remove oldest"]


def test_a_raised_failure_removes_nothing(tmp_path: Path) -> None:
    """A removal that is queued when an earlier failure is raised is skipped, too."""
    held = Held()
    io = AsyncCheckpointIO(held, max_pending=9)
    (tmp_path / "1").touch()
    paths = [tmp_path / "1" / "below.ckpt", tmp_path / "2", tmp_path / "3"]
    io.save_checkpoint({"step": 1}, paths[0])
    io.save_checkpoint({"step": 2}, paths[1])
    io.remove_checkpoint("old")
    held.may_go.release()
    wait_until(lambda: held.begun == 2)  # so the first one has failed
    raises(CheckpointError, None, io.save_checkpoint, {"step": 3}, paths[2])
    held.may_go.release(2)
    io.teardown()
    assert held.done == [f"save {path}" for path in paths]


@pytest.mark.parametrize("call", ["save", "load", "teardown"])
def test_error_is_raised_by_the_next_call(call: str, tmp_path: Path) -> None:
    """The next call raises an error once; the one after it works. A save, perhaps the last, is written."""
    io = AsyncCheckpointIO()
    (tmp_path / "file").touch()
    io.save_checkpoint({}, tmp_path / "file" / "below.ckpt")
    wait_for(io)
    calls = {
        "save": lambda: io.save_checkpoint({"step": 1}, tmp_path / "x.ckpt"),
        "load": lambda: io.load_checkpoint(tmp_path / "x.ckpt"),
        "teardown": io.teardown,
    }
    raises(CheckpointError, r"below\.ckpt.*could not be written", calls[call])
    assert call != "save" or io.load_checkpoint(tmp_path / "x.ckpt") == {"step": 1}
    io.save_checkpoint({"step": 2}, tmp_path / "x.ckpt")
    assert io.load_checkpoint(tmp_path / "x.ckpt") == {"step": 2}


def save_and(strategy: Strategy, path: Path, error: Exception | None = None) -> None:
    """Save as a rank does, and return or raise."""
    strategy.save_checkpoint({"step": 3}, path)
    if error is not None:
        raise error


def test_job_ends_when_all_is_written(tmp_path: Path) -> None:
    """Then the last checkpoint exists, whether the function returned or raised, or the job has failed."""
    strategy = SingleDeviceStrategy(accelerator="cpu", checkpoint_io=AsyncCheckpointIO())
    strategy.launch(save_and, tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match="after saving"):
        strategy.launch(save_and, tmp_path / "y.ckpt", ValueError("after saving"))
    for name in ("x.ckpt", "y.ckpt"):
        assert TorchCheckpointIO().load_checkpoint(tmp_path / name) == {"step": 3}
    raises(CheckpointError, "could not be written", strategy.launch, save_and, tmp_path / "x.ckpt" / "below")


def test_arguments(tmp_path: Path) -> None:
    """Invalid ones are errors; it is pickled without its thread."""
    with pytest.raises(InvalidTypeError, match="wrapped"):
        AsyncCheckpointIO(TorchCheckpointIO)  # type: ignore[arg-type]  # a class
    raises(InvalidArgumentError, "max_pending", AsyncCheckpointIO, max_pending=0)
    copied = pickle.loads(pickle.dumps(AsyncCheckpointIO(max_pending=3)))
    copied.save_checkpoint({"step": 1}, tmp_path / "x.ckpt")
    assert (copied.max_pending, copied.load_checkpoint(tmp_path / "x.ckpt")) == (3, {"step": 1})
