"""Find, wait for and end the processes that a test has started."""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

MARKER = "RANKWISE_TEST_ID"
"""The variable that marks every process that a test starts with that test's own value."""

SERVICES = (
    "from multiprocessing.resource_tracker import main",  # Python starts one per process, for its whole life
    "from multiprocessing.forkserver import main",  # likewise: the next forkserver launch uses it again
)
"""What the command lines of multiprocessing's own helpers hold. They may outlive a test."""


def is_service(process: psutil.Process, of: int | None = None) -> bool:
    """Tell whether it is a helper of multiprocessing's own, of process `of` or of this one; no fork of it."""
    try:
        is_helper = any(code in argument for argument in process.cmdline() for code in SERVICES)
        return is_helper and bool(process.ppid() == (os.getpid() if of is None else of))
    except psutil.Error:
        return False


def is_gone(process: psutil.Process) -> bool:
    """Tell whether the process has ended (one that its own, other parent did not wait for has ended too)."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE and process.ppid() != os.getpid())
    except psutil.NoSuchProcess:
        return True


def describe(process: psutil.Process) -> str:
    """Return a line that tells a reader which process this is."""
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return f"pid {process.pid}, which has ended, but nobody has waited for it"
        return f"pid {process.pid}: {' '.join(process.cmdline())[:200]}"
    except psutil.Error:
        return f"pid {process.pid}, which has just ended"


def with_marker(value: str) -> set[psutil.Process]:
    """Return the processes that were started with `RANKWISE_TEST_ID=value` or `value/...`."""
    return {
        process
        for process in psutil.process_iter()
        if f"{_environment(process).get(MARKER, '')}/".startswith(f"{value}/")
    }


def in_session(session_id: int) -> set[psutil.Process]:
    """Return the processes of a session (`setsid`), which a process leaves only by asking for it."""
    return {process for process in psutil.process_iter() if _session_id(process.pid) == session_id}


def forked_from_here() -> set[psutil.Process]:
    """Return the processes that were forked from this one, however far, and run no other program since.

    One whose parent has died is found in this way: it has no marker of its own and is nobody's child.
    """
    name = f"/memfd:{_fork_marker().name}"
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(OSError):
            if process.pid != os.getpid() and name in Path(f"/proc/{process.pid}/maps").read_text():
                found.add(process)
    return found


def wait_until_gone(find: Callable[[], Iterable[psutil.Process]], timeout_s: float) -> list[psutil.Process]:
    """Wait until `find` finds nothing that lives; return what is left then, lowest pid first."""
    deadline = time.monotonic() + timeout_s
    while True:
        left = sorted(
            (process for process in find() if not is_gone(process)), key=lambda process: process.pid
        )
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.02)


def kill(processes: Iterable[psutil.Process]) -> None:
    """Kill exactly these processes, and wait until they have ended."""
    processes = list(processes)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    for process in processes:
        with contextlib.suppress(ChildProcessError):  # not a child of ours: who adopted it waits for it
            os.waitpid(process.pid, 0)
    wait_until_gone(lambda: processes, timeout_s=5)


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        environment: dict[str, str] = process.environ()
    except (psutil.Error, OSError):
        return {}
    return environment


def _session_id(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


@dataclass(frozen=True)
class _ForkMarker:
    name: str
    page: mmap.mmap


@functools.cache
def _fork_marker() -> _ForkMarker:
    """Map a page that children inherit over a fork, and lose when they run another program."""
    name = f"rankwise-tests-{os.getpid()}-{secrets.token_hex(4)}"
    descriptor = os.memfd_create(name)
    os.ftruncate(descriptor, mmap.PAGESIZE)
    page = mmap.mmap(descriptor, mmap.PAGESIZE)
    os.close(descriptor)
    return _ForkMarker(name, page)
