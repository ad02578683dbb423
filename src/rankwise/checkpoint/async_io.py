"""`AsyncCheckpointIO`: checkpoints that a thread writes while training goes on."""

from __future__ import annotations

import copy
import os
import queue
import threading
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

from rankwise.checkpoint.base import CheckpointIO
from rankwise.checkpoint.reasons import as_checkpoint_error
from rankwise.checkpoint.torch_io import TorchCheckpointIO
from rankwise.errors import InvalidArgumentError, InvalidTypeError

__all__ = ["AsyncCheckpointIO"]


@final
class AsyncCheckpointIO(CheckpointIO):
    """Let a thread do what another `CheckpointIO` would do while training waits.

    A save copies the tensors, to the CPU, and returns; the copy is what is written. Saves and removals happen
    in the order in which they were asked for. What was asked for is done before a job's processes leave, and
    before the interpreter ends, be it by a failure; a rank that is stopped has the strategy's `timeout` for
    it. An error is raised by the next save or load, or by `teardown`. Until then nothing is removed: what a
    failed save was to take the place of is the newest that there is.

    Args:
        wrapped: what writes; `TorchCheckpointIO` by default.
        max_pending: how many saves may wait; one more waits for the first of them.

    Raises:
        InvalidTypeError: when `wrapped` is no `CheckpointIO`.
        InvalidArgumentError: when `max_pending` is less than 1.

    Example:
        >>> from rankwise.checkpoint import AsyncCheckpointIO, TorchCheckpointIO
        >>> AsyncCheckpointIO(TorchCheckpointIO())
        AsyncCheckpointIO(TorchCheckpointIO, 0 pending)
    """

    def __init__(self, wrapped: CheckpointIO | None = None, *, max_pending: int = 2) -> None:
        self.wrapped: CheckpointIO = TorchCheckpointIO() if wrapped is None else wrapped
        if not isinstance(self.wrapped, CheckpointIO):
            raise InvalidTypeError(argument="wrapped", value=wrapped, expected="an instance of CheckpointIO")
        if max_pending < 1:
            raise InvalidArgumentError(argument="max_pending", value=max_pending, expected="1 or more")
        self.max_pending = max_pending
        self._tell: Callable[[bool], None] = _nothing
        self._forget()

    def _forget(self) -> None:
        self._owner = os.getpid()
        self._tasks: queue.Queue[Callable[[], None]] = queue.Queue(self.max_pending)
        self._error: BaseException | None = None
        self._failures = 0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> None:
        """Copy `checkpoint` and let the thread write it to `path`.

        Raises:
            CheckpointError: when it cannot be copied; or one before it could not be written: this one, the
                newest state, is written nevertheless.
        """
        with as_checkpoint_error(path):
            kept = _Snapshot().of(checkpoint)
        self._leave_to_parent()
        earlier = self._take_error()  # before this save is asked for: its own error is for the next call
        self._do_later(lambda: self.wrapped.save_checkpoint(kept, path))
        if earlier is not None:
            raise earlier

    def load_checkpoint(self, path: str | os.PathLike[str], map_location: Any = "cpu") -> dict[str, Any]:
        """Return the checkpoint at `path`, once everything is written.

        Raises:
            CheckpointError: when it cannot be read, or one before it could not be written.
        """
        self.teardown()
        return self.wrapped.load_checkpoint(path, map_location)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Let the thread remove the checkpoint at `path`, once what it has to write before is written."""
        self._leave_to_parent()
        with self._lock:
            error, failures = self._error, self._failures
        if error is None:
            self._do_later(lambda: self._remove_unless_failed(path, failures))

    def check_checkpoint(self, part: dict[str, Any], path: str | os.PathLike[str]) -> None:
        """Let what writes look at `part`, now."""
        self.wrapped.check_checkpoint(part, path)

    def on_saving_changed(self, tell: Callable[[bool], None]) -> None:
        """Call `tell` with True when the thread begins to write, and with False when nothing is left."""
        self._tell = tell

    def teardown(self) -> None:
        """Wait until everything is written.

        Raises:
            CheckpointError: when something could not be written.
        """
        self._leave_to_parent()
        thread = self._thread
        if thread is not None:
            thread.join()
        error = self._take_error()
        if error is not None:
            raise error
        self.wrapped.teardown()

    # ------------------------------------------------------------------ the thread

    def _do_later(self, task: Callable[[], None]) -> None:
        self._leave_to_parent()
        self._tell(True)  # first: what is asked for must not be cut before the thread gets to it
        self._tasks.put(task)
        with self._lock:
            if self._thread is None:
                # No daemon: the interpreter waits for it. It ends when nothing is left to do.
                self._thread = threading.Thread(target=self._work, name="rankwise-checkpoints")
                self._thread.start()

    def _work(self) -> None:
        self._tell(True)  # another thread may just have said that nothing was left
        while True:
            with self._lock:
                try:
                    task = self._tasks.get_nowait()
                except queue.Empty:
                    self._thread = None
                    self._tell(False)
                    return
            try:
                task()
            except BaseException as error:  # noqa: BLE001  raised by the next call
                with self._lock:
                    self._error = self._error or error
                    self._failures += 1

    def _remove_unless_failed(self, path: str | os.PathLike[str], failures: int) -> None:
        """Remove, if none has failed since there were `failures`: not even one that was raised meanwhile."""
        if self._failures == failures:
            self.wrapped.remove_checkpoint(path)

    def _take_error(self) -> BaseException | None:
        """Return the first error since the last call of this."""
        with self._lock:
            error, self._error = self._error, None
        return error

    def _leave_to_parent(self) -> None:
        """In a forked process, where the thread does not exist, begin with nothing to do."""
        if self._owner != os.getpid():
            self._forget()

    def __getstate__(self) -> dict[str, Any]:
        return {"wrapped": self.wrapped, "max_pending": self.max_pending}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._tell = _nothing
        self._forget()

    def __repr__(self) -> str:
        return f"AsyncCheckpointIO({type(self.wrapped).__name__}, {self._tasks.qsize()} pending)"


def _nothing(is_saving: bool) -> None:
    pass


class _Snapshot:
    """A copy of nested values whose tensors are on the CPU; what was one tensor in two places still is."""

    def __init__(self) -> None:
        self._copies: dict[tuple[Any, ...], Tensor] = {}

    def of(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, dict):
            copied = copy.copy(value)  # an OrderedDict stays one
            copied.update((key, self.of(item)) for key, item in value.items())
            return copied
        if type(value) in (list, tuple):
            return type(value)(self.of(item) for item in value)
        return copy.deepcopy(value)

    def _tensor(self, tensor: Tensor) -> Tensor:
        if tensor.layout is not torch.strided or tensor.numel() == 0:
            return tensor.detach().cpu().clone()
        place = tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
        if place not in self._copies:
            self._copies[place] = tensor.detach().to("cpu", copy=True)
        return self._copies[place]
