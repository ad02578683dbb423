"""Checkpoints that a thread writes: as they were when asked for, all of them, in order, errors included."""

from __future__ import annotations

import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from rankwise.checkpoint import AsyncCheckpointIO, CheckpointIO, TorchCheckpointIO
from rankwise.errors import CheckpointError, InvalidArgumentError, InvalidTypeError
from rankwise.strategies import SingleDeviceStrategy, Strategy


class Held(CheckpointIO):
    """Writes when it is let go, and notes what it does."""

    def __init__(self) -> None:
        self.may_go = threading.Event()
        self.done: list[str] = []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> None:
        self.may_go.wait(10)
        self.done.append(f"save {path}")
        TorchCheckpointIO().save_checkpoint(checkpoint, path)

    def load_checkpoint(self, path: str | os.PathLike[str], map_location: Any = "cpu") -> dict[str, Any]:
        return TorchCheckpointIO().load_checkpoint(path, map_location)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        self.done.append(f"remove {path}")


def test_written_as_it_was(tmp_path: Path) -> None:
    """Training changes tensors while the thread writes: the file holds what they were before."""
    held, weights = Held(), torch.ones(3)
    io = AsyncCheckpointIO(held)
    checkpoint: dict[str, Any] = {"a": weights, "nested": [{"same": weights}], "step": 1}
    io.save_checkpoint(checkpoint, tmp_path / "x.ckpt")
    weights.zero_()
    checkpoint["nested"].append("later")
    held.may_go.set()
    loaded = io.load_checkpoint(tmp_path / "x.ckpt")
    assert loaded["a"].tolist() == [1.0, 1.0, 1.0]
    assert len(loaded["nested"]) == 1
    assert loaded["nested"][0]["same"].data_ptr() == loaded["a"].data_ptr()


def test_in_order(tmp_path: Path) -> None:
    """A checkpoint is removed only after the one that takes its place is written."""
    held = Held()
    io = AsyncCheckpointIO(held)
    io.save_checkpoint({}, tmp_path / "new")
    io.remove_checkpoint("old")
    assert held.done == []
    held.may_go.set()
    io.teardown()
    assert held.done == [f"save {tmp_path / 'new'}", "remove old"]


def test_bounded(tmp_path: Path) -> None:
    """One more save than may wait waits for the first."""
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
    held.may_go.set()
    other.join(10)
    io.teardown()
    assert len(held.done) == 3


@pytest.mark.parametrize("call", ["save", "load", "teardown"])
def test_error_is_raised_by_the_next_call(call: str, tmp_path: Path) -> None:
    """What could not be written is told once, by whatever comes next; the one after that works again."""
    io = AsyncCheckpointIO()
    (tmp_path / "file").touch()
    io.save_checkpoint({}, tmp_path / "file" / "below.ckpt")
    if io._thread is not None:
        io._thread.join()
    calls = {
        "save": lambda: io.save_checkpoint({}, tmp_path / "x.ckpt"),
        "load": lambda: io.load_checkpoint(tmp_path / "x.ckpt"),
        "teardown": io.teardown,
    }
    with pytest.raises(CheckpointError, match=r"below\.ckpt.*could not be written"):
        calls[call]()
    io.save_checkpoint({"step": 2}, tmp_path / "x.ckpt")
    assert io.load_checkpoint(tmp_path / "x.ckpt") == {"step": 2}


def save_and(outcome: str, strategy: Strategy, path: Path) -> None:
    """Save as a rank does, and end well or badly."""
    strategy.save_checkpoint({"step": 3}, path)
    if outcome == "raises":
        raise ValueError("after saving")


@pytest.mark.parametrize("outcome", ["returns", "raises"])
def test_job_ends_when_all_is_written(outcome: str, tmp_path: Path) -> None:
    """However a rank's function ends, its last checkpoint is there afterwards."""
    strategy = SingleDeviceStrategy(accelerator="cpu", checkpoint_io=AsyncCheckpointIO())
    if outcome == "raises":
        with pytest.raises(ValueError, match="after saving"):
            strategy.launch(lambda strategy: save_and(outcome, strategy, tmp_path / "x.ckpt"))
    else:
        strategy.launch(lambda strategy: save_and(outcome, strategy, tmp_path / "x.ckpt"))
    assert TorchCheckpointIO().load_checkpoint(tmp_path / "x.ckpt") == {"step": 3}


def test_error_ends_the_job(tmp_path: Path) -> None:
    """A last checkpoint that could not be written is the job's failure."""
    (tmp_path / "file").touch()
    strategy = SingleDeviceStrategy(accelerator="cpu", checkpoint_io=AsyncCheckpointIO())
    with pytest.raises(CheckpointError, match="could not be written"):
        strategy.launch(lambda strategy: save_and("returns", strategy, tmp_path / "file" / "x"))


def test_travels(tmp_path: Path) -> None:
    """It goes to other processes without its thread."""
    copied = pickle.loads(pickle.dumps(AsyncCheckpointIO(max_pending=3)))
    copied.save_checkpoint({"step": 1}, tmp_path / "x.ckpt")
    assert (copied.max_pending, copied.load_checkpoint(tmp_path / "x.ckpt")) == (3, {"step": 1})


def test_arguments() -> None:
    """What cannot work is refused."""
    with pytest.raises(InvalidTypeError, match="wrapped"):
        AsyncCheckpointIO(TorchCheckpointIO)  # type: ignore[arg-type]  # a class
    with pytest.raises(InvalidArgumentError, match="max_pending"):
        AsyncCheckpointIO(max_pending=0)
