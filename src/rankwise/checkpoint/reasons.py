"""Why a checkpoint could not be written or read, in a line."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from rankwise.errors import CheckpointError

__all__ = ["reason_for", "as_checkpoint_error"]


@contextlib.contextmanager
def as_checkpoint_error(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raise what goes wrong in the block, which prepares or writes a file, as a `CheckpointError`."""
    handled = sys.exc_info()[1]
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            path=os.fspath(path),
            problem=f"could not be written: {reason_for(error, handled)}",
            remedy="remove the cause; a file that was at this path before is untouched.",
        ) from error


def reason_for(error: BaseException, handled: BaseException | None) -> str:
    """Return the deepest cause's first line: torch's writer reports a full disk as something else.

    Args:
        error: what was raised.
        handled: what the caller was handling when it began, which is no cause of it.
    """
    while error.__context__ not in (None, handled):
        error = error.__context__
    if isinstance(error, RecursionError):
        return "it contains itself, or is nested too deeply"
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__
