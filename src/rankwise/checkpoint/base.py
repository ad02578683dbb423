"""`CheckpointIO`: the interface for reading and writing checkpoints, and the texts of their errors."""

from __future__ import annotations

import contextlib
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

from rankwise.errors import CheckpointError, ConfigurationError, RankwiseError, text_of
from rankwise.paths import expanded_path
from rankwise.processes.signals import reraise_from_handler


class CheckpointIO(ABC):
    """Writes, reads, removes and finds checkpoints. Subclass it for another format or kind of storage.

    A storage that is not the local file system overrides `has_checkpoint` and `list_checkpoints` too. Paths
    with a scheme, such as `s3://bucket/run/last.ckpt`, reach these methods as the user has written them.
    """

    @abstractmethod
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> None:
        """Write `checkpoint` to `path`; called on global rank 0 only.

        Raises:
            CheckpointError: when it cannot be written; the previous file at `path` must then be intact.
        """

    @abstractmethod
    def load_checkpoint(self, path: str | os.PathLike[str], map_location: Any = "cpu") -> dict[str, Any]:
        """Return the checkpoint at `path`; called on every rank.

        Raises:
            CheckpointError: when it is missing, damaged or not safe to load.
        """

    @abstractmethod
    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove the checkpoint at `path`, if it exists; called on global rank 0 only."""

    def has_checkpoint(self, path: str | os.PathLike[str]) -> bool:
        """Return whether there is anything at `path`, which a save would replace; on global rank 0 only.

        This method looks at the local file system.

        Raises:
            ConfigurationError: when this storage cannot have such a path.
        """
        return os.path.lexists(expanded_path(path))

    def list_checkpoints(self, folder: str | os.PathLike[str]) -> dict[str, float]:
        """Return the names of the files in `folder`, with the time of each one's last change in seconds.

        Files that are no checkpoints may be among them. Without that folder there are none. This method
        looks at the local file system, for `*.ckpt` only.

        Raises:
            ConfigurationError: when this storage cannot have such a path.
        """
        found = {}
        for path in expanded_path(folder).glob("*.ckpt"):
            with contextlib.suppress(FileNotFoundError):  # another run may remove its files
                found[path.name] = path.stat().st_mtime
        return found

    def link_checkpoint(self, path: str | os.PathLike[str], link: str | os.PathLike[str]) -> None:
        """Make the checkpoint at `path` available at `link` too; called on global rank 0 only.

        It stays there when `path` is removed or replaced. This method writes a copy.

        Raises:
            CheckpointError: when it cannot be written; the previous file at `link` must then be intact.
        """
        self.save_checkpoint(self.load_checkpoint(path), link)

    def check_checkpoint(self, part: dict[str, Any], path: str | os.PathLike[str]) -> None:
        """Raise if a part of a checkpoint, which may be {}, cannot be stored at `path` or below it.

        Called before anything starts, with each path that the user has given, so that the error does not come
        with the first checkpoint only. This method calls `has_checkpoint`, which refuses a path.

        Raises:
            CheckpointError: naming what cannot be written or loaded.
            ConfigurationError: when this storage cannot have such a path.
        """
        self.has_checkpoint(path)

    def on_saving_changed(self, callback: Callable[[bool], None]) -> None:
        """Set a function to call with True when a thread starts to write, and with False at its end.

        It may be called from any thread. A rank that must exit is not killed between the two calls.
        """

    def teardown(self) -> None:
        """Finish pending work; called on every rank when a job ends, also after a failure.

        Raises:
            CheckpointError: when a checkpoint could not be written.
        """


@contextlib.contextmanager
def as_checkpoint_error(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raise errors of the block, which prepares or writes a file, as `CheckpointError`."""
    handled = sys.exc_info()[1]
    try:
        yield
    except (CheckpointError, ConfigurationError):
        raise
    except Exception as error:
        reraise_from_handler(error, handled)
        raise CheckpointError(
            path=os.fspath(path),
            problem=f"could not be written: {reason_for(error, handled)}",
            remedy="remove the cause; a file that was at this path before is untouched.",
        ) from error


@contextlib.contextmanager
def restored_from(path: str | os.PathLike[str], part: str) -> Iterator[None]:
    """Restore `part` in the block; raise exceptions that the file's contents cause as `CheckpointError`."""
    handled = sys.exc_info()[1]
    try:
        yield
    except RankwiseError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reraise_from_handler(error, handled)
        raise CheckpointError(
            path=os.fspath(path),
            problem=f"its {part} cannot be restored: {type(error).__name__}: {text_of(error)}",
            remedy="pass an intact file of a run with the same module, optimizers and callbacks.",
        ) from error


def reason_for(error: BaseException, handled: BaseException | None) -> str:
    """Return the first line of the deepest cause: torch's writer reports a full disk as another error.

    `handled`, the exception that the caller was handling before, is not a cause.
    """
    while error.__context__ not in (None, handled):
        error = error.__context__
    if isinstance(error, RecursionError):
        return "it contains itself, or is nested too deeply"
    lines = text_of(error).splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__
