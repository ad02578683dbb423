"""Which of an elastic agent's workers this process belongs to: the one it started, or a child of it.

All of a worker's processes inherit the path of its error file. Torch's agent makes the folder anew, under the
same name or another, each time that it starts its ranks. A session would not tell: a worker's child may have
one of its own, and workers that run a function have none.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import final

__all__ = ["Worker", "current_worker"]

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


@final
@dataclass(frozen=True)
class Worker:
    """A worker of an elastic agent.

    Attributes:
        name: the same in all of its processes, and in those of no other worker and no other start.
        is_itself: whether the agent has started this process, and not another of the worker's.
    """

    name: str
    is_itself: bool


def current_worker() -> Worker | None:
    """Return the worker that this process belongs to; None where no agent has started it."""
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    if count is None:
        return None
    file = os.environ.get(_ERROR_FILE, "")
    # Without error files the agent's own count is left, which leaves out restarts where nodes come or go.
    made = _when_made(Path(file).parent.parent) if file else 0
    return Worker(f"{socket.gethostname()}/{count}/{file}/{made}", not _is_of_parent(file))


def _when_made(folder: Path) -> int:
    try:
        return folder.stat().st_mtime_ns
    except OSError:
        return 0


def _is_of_parent(file: str) -> bool:
    """Return whether the parent has that error file too; True where that is not known."""
    try:
        variables = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    except OSError:
        return True
    return os.fsencode(f"{_ERROR_FILE}={file}") in variables
