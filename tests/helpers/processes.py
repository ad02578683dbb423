"""Find, wait for and end the processes that a test has started."""

import contextlib
import functools
import mmap
import os
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import filterfalse

import psutil

MARKER = "RANKWISE_TEST_ID"
"""The variable that marks every process that a test starts with that test's own value."""

SERVICES = (
    "from multiprocessing.resource_tracker import main",  # Python starts one per process, for its whole life
    "from multiprocessing.forkserver import main",  # likewise: the next forkserver launch uses it again
)
"""What the command lines of multiprocessing's own helpers hold. They may outlive a test."""


shared_pids: set[int] = set()
"""Processes that serve several tests. The fixture that starts one adds its pid, and removes it at the end."""


def is_service(process: psutil.Process, of: int | None = None) -> bool:
    """Tell whether it is shared, or a helper of multiprocessing's own, of process `of` or of this one."""
    if process.pid in shared_pids:
        return True
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
    return _processes(entry.pid for entry in _younger_processes() if _has_marker(entry.pid, value))


def in_session(session_id: int) -> set[psutil.Process]:
    """Return the processes of a session (`setsid`), which a process leaves only by asking for it."""
    return _processes(entry.pid for entry in _younger_processes() if entry.session_id == session_id)


def started_here(marker: str) -> set[psutil.Process]:
    """Return the processes that this process has started, directly or not.

    These are its descendants, the processes with `marker`, and the direct and indirect forks of this process
    that run no other program. The last two are found also when their parent has died.
    """
    entries = _younger_processes()
    found = _descendants(os.getpid(), entries)
    for entry in entries:
        if entry.pid not in found and (_has_marker(entry.pid, marker) or _is_forked_from_here(entry)):
            found.add(entry.pid)
    return _processes(found - {os.getpid()})


def wait_until_gone(find: Callable[[], Iterable[psutil.Process]], timeout_s: float) -> list[psutil.Process]:
    """Wait until `find` finds nothing that lives; return what is left then, lowest pid first."""
    deadline = time.monotonic() + timeout_s
    while True:
        left = sorted(filterfalse(is_gone, find()), key=lambda process: process.pid)
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


@dataclass(frozen=True)
class _Entry:
    """One process in /proc. `started` counts clock ticks from the boot."""

    pid: int
    parent_pid: int
    session_id: int
    started: int


def _younger_processes() -> list[_Entry]:
    """Return the processes that started after this one: only these can have been started by it."""
    earliest = _entry("self").started
    found = []
    for name in os.listdir("/proc"):  # noqa: PTH208 -- after every test: a Path for each process takes longer
        if name.isdigit():
            with contextlib.suppress(OSError):  # it has ended
                entry = _entry(name)
                if entry.started >= earliest:
                    found.append(entry)
    return found


def _entry(name: str) -> _Entry:
    status = _read(f"/proc/{name}/stat")
    if not status:
        raise ProcessLookupError(name)
    fields = status[status.rindex(b")") + 2 :].split()  # behind the program's name, in parentheses
    return _Entry(int(status.split(b" ", 1)[0]), int(fields[1]), int(fields[3]), int(fields[19]))


def _descendants(pid: int, entries: Iterable[_Entry]) -> set[int]:
    children: dict[int, list[int]] = {}
    for entry in entries:
        children.setdefault(entry.parent_pid, []).append(entry.pid)
    found: set[int] = set()
    pending = children.get(pid, [])
    while pending:
        child = pending.pop()
        found.add(child)
        pending.extend(children.get(child, []))
    return found


def _processes(pids: Iterable[int]) -> set[psutil.Process]:
    found = set()
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.add(psutil.Process(pid))
    return found


def _has_marker(pid: int, value: str) -> bool:
    try:
        environment = _read(f"/proc/{pid}/environ")
    except OSError:
        return False
    wanted = f"\0{MARKER}={value}".encode()
    environment = b"\0" + environment
    return wanted + b"\0" in environment or wanted + b"/" in environment


_not_forked_from_here: set[_Entry] = set()


def _is_forked_from_here(entry: _Entry) -> bool:
    """Look for the page that children inherit over a fork. A process without it never gets it."""
    if entry.pid == os.getpid() or entry in _not_forked_from_here:
        return False
    try:
        maps = _read(f"/proc/{entry.pid}/maps")
    except OSError:
        return False
    marker, _ = _fork_marker()
    is_forked = f"/memfd:{marker}".encode() in maps
    if maps and not is_forked:  # empty: it has ended, or is about to run another program
        _not_forked_from_here.add(entry)
    return is_forked


def _read(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        parts = []
        while part := os.read(descriptor, 1 << 16):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(descriptor)


@functools.cache
def _fork_marker() -> tuple[str, mmap.mmap]:
    """Map a page that children inherit over a fork, and lose with another program; return its name."""
    name = f"rankwise-tests-{os.getpid()}-{secrets.token_hex(4)}"
    descriptor = os.memfd_create(name)
    os.ftruncate(descriptor, mmap.PAGESIZE)
    page = mmap.mmap(descriptor, mmap.PAGESIZE)
    os.close(descriptor)
    return name, page
