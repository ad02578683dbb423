"""`AsyncCheckpointIO`: writes checkpoints in a thread while training continues."""

from __future__ import annotations

import copy
import os
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from rankwise.checkpoint.base import CheckpointIO, as_checkpoint_error
from rankwise.checkpoint.torch_io import TorchCheckpointIO
from rankwise.checks import check_is_a, check_minimum, check_overrides
from rankwise.nested import map_nested


@final
class AsyncCheckpointIO(CheckpointIO):
    """Runs another `CheckpointIO` in a thread, so that training does not wait for it.

    A save copies the tensors to the CPU and returns; the thread writes the copy. Saves and removals run in
    the order of the calls. They finish before a job's processes exit and before the interpreter ends, also
    after a failure; a rank that is stopped has the strategy's `timeout` for them. The next save or load, or
    `teardown`, raises an error of the thread. Until then nothing is removed, because the previous checkpoint
    may be the newest intact one.

    Args:
        wrapped: writes the files; `TorchCheckpointIO` by default.
        max_pending: how many saves may be queued; a further one waits for the first of them.

    Raises:
        InvalidTypeError: when `wrapped` is not a `CheckpointIO`.
        InvalidArgumentError: when `max_pending` is less than 1.
        ConfigurationError: for a method of `wrapped` that cannot take the arguments of `CheckpointIO`'s.

    Example:
        >>> from rankwise.checkpoint import AsyncCheckpointIO, TorchCheckpointIO
        >>> AsyncCheckpointIO(TorchCheckpointIO())
        AsyncCheckpointIO(TorchCheckpointIO(), max_pending=2)
    """

    def __init__(self, wrapped: CheckpointIO | None = None, *, max_pending: int = 2) -> None:
        self.wrapped: CheckpointIO = TorchCheckpointIO() if wrapped is None else wrapped
        check_is_a("wrapped", self.wrapped, CheckpointIO)
        check_overrides(self.wrapped)
        check_minimum("max_pending", max_pending, 1)
        self.max_pending = max_pending
        self._notify: Callable[[bool], object] = lambda is_saving: None
        self._reset()

    def _reset(self) -> None:
        self._owner = os.getpid()
        self._tasks: queue.Queue[Callable[[], object]] = queue.Queue(self.max_pending)
        self._error: BaseException | None = None
        self._failures = 0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> None:
        """Copy `checkpoint`, and write it to `path` in the thread; then raise an earlier save's error."""
        with as_checkpoint_error(path):
            snapshot = _snapshot(checkpoint)
        self._reset_after_fork()
        earlier = self._take_error()  # before queueing this save; its own error is raised in the next call
        self._enqueue(lambda: self.wrapped.save_checkpoint(snapshot, path))
        if earlier is not None:
            raise earlier

    def load_checkpoint(self, path: str | os.PathLike[str], map_location: Any = "cpu") -> dict[str, Any]:
        """Wait until everything is written, and return the checkpoint at `path`."""
        self.teardown()
        return self.wrapped.load_checkpoint(path, map_location)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove the checkpoint at `path` in the thread, unless a queued save before it fails."""
        self._after_saves(lambda: self.wrapped.remove_checkpoint(path))

    def has_checkpoint(self, path: str | os.PathLike[str]) -> bool:
        """Return whether `wrapped` has something at `path`; the thread may be about to write it."""
        return self.wrapped.has_checkpoint(path)

    def list_checkpoints(self, folder: str | os.PathLike[str]) -> dict[str, float]:
        """Return what `wrapped` has in `folder`, without what the thread has yet to write."""
        return self.wrapped.list_checkpoints(folder)

    def link_checkpoint(self, path: str | os.PathLike[str], link: str | os.PathLike[str]) -> None:
        """Link the checkpoint in the thread, unless a queued save before it fails."""
        self._after_saves(lambda: self.wrapped.link_checkpoint(path, link))

    def _after_saves(self, task: Callable[[], object]) -> None:
        self._reset_after_fork()
        with self._lock:
            error, failures = self._error, self._failures
        if error is None:
            self._enqueue(lambda: self._failures == failures and task())

    def check_checkpoint(self, part: dict[str, Any], path: str | os.PathLike[str]) -> None:
        self.wrapped.check_checkpoint(part, path)

    def on_saving_changed(self, callback: Callable[[bool], None]) -> None:
        self._notify = callback

    def teardown(self) -> None:
        """Wait until everything is written."""
        self._reset_after_fork()
        if (thread := self._thread) is not None:
            thread.join()
        if (error := self._take_error()) is not None:
            raise error
        self.wrapped.teardown()

    def _enqueue(self, task: Callable[[], object]) -> None:
        self._notify(True)  # first: the process must not be killed before the thread gets the task
        self._tasks.put(task)
        with self._lock:
            if self._thread is None:
                # Not a daemon: the interpreter waits for it. It ends when the queue is empty.
                self._thread = threading.Thread(target=self._work, name="rankwise-checkpoints")
                self._thread.start()

    def _work(self) -> None:
        self._notify(True)  # the previous thread may have called it with False after `_enqueue` did with True
        while True:
            with self._lock:
                try:
                    task = self._tasks.get_nowait()
                except queue.Empty:
                    self._thread = None
                    self._notify(False)
                    return
            try:
                task()
            except BaseException as error:  # noqa: BLE001  raised by the next call
                with self._lock:
                    self._error = self._error or error
                    self._failures += 1

    def _take_error(self) -> BaseException | None:
        """Return the first error since the last call of this method."""
        with self._lock:
            error, self._error = self._error, None
        return error

    def _reset_after_fork(self) -> None:
        """Start with an empty queue in a forked process, which does not have the thread."""
        if self._owner != os.getpid():
            self._reset()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(AsyncCheckpointIO, self.wrapped, max_pending=self.max_pending), ()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.wrapped!r}, max_pending={self.max_pending})"


def _snapshot(value: Any) -> Any:
    """Copy nested values with their tensors to the CPU; a tensor that occurs twice is copied once."""
    copies: dict[tuple[Any, ...], Tensor] = {}

    def copied(tensor: Tensor) -> Tensor:
        if tensor.layout is not torch.strided or tensor.numel() == 0:
            return tensor.detach().cpu().clone()
        identity = tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
        if identity not in copies:
            copies[identity] = tensor.detach().to("cpu", copy=True)
        return copies[identity]

    return map_nested(value, Tensor, copied, copy.deepcopy)
