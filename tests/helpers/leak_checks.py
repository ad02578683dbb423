"""Checks for what a test leaves behind: each reports what has changed and restores it."""

import itertools
import operator
import os
import re
import signal
import stat
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from rankwise.ranks import rank_zero_only
from tests.helpers import processes
from tests.helpers.load import slowdown

REPOSITORY = Path(__file__).parents[2]
_WRAPPERS = "torch.nn.parallel.distributed"
_SIGNALS = tuple(signal.valid_signals() - {signal.SIGALRM})  # pytest-timeout uses SIGALRM
_numbers = itertools.count()

SET_BY_IMPORTS = (
    "KMP_DUPLICATE_LIB_OK",  # scikit-learn sets these two
    "KMP_INIT_AT_FORK",
    "PYTORCH_NVML_BASED_CUDA_CHECK",  # Lightning
    "TORCHINDUCTOR_CACHE_DIR",  # torch's compiler, which an optimizer imports
)
"""Variables that an import sets for the rest of the process, whichever test comes first to import it."""


class Check(ABC):
    """One kind of state that a test must not change. Recorded at construction."""

    @abstractmethod
    def problems(self) -> list[str]:
        """Return what has changed, one line each."""

    @abstractmethod
    def clean_up(self) -> None:
        """Restore the state for the next test."""


@contextmanager
def new_marker() -> Iterator[str]:
    """Give the processes that are started meanwhile a marker of their own, and return it."""
    os.environ[processes.MARKER] = marker = f"{os.getpid()}-{next(_numbers)}"
    try:
        yield marker
    finally:
        os.environ.pop(processes.MARKER, None)


def fail_if_changed(checks: Iterable[Check], who: str) -> None:
    """Clean up and fail the running test, or its teardown, if something is left behind."""
    import pytest  # not by the ranks that use these checks

    if problems := wait_until_clean(checks):
        pytest.fail(f"{who} did not leave things as they were:\n  " + "\n  ".join(problems), pytrace=False)


def wait_until_clean(checks: Iterable[Check], timeout_s: float = 2.0) -> list[str]:
    """Wait up to `timeout_s` (more on a busy machine) for problems to end; clean up and return the rest."""
    checks = list(checks)
    if not (found := _problems(checks)):
        return []
    deadline = time.monotonic() + timeout_s * slowdown()
    while found and time.monotonic() <= deadline:
        time.sleep(0.02)
        found = _problems(checks)
    if found:
        for check in checks:
            check.clean_up()
    return found


def _problems(checks: Iterable[Check]) -> list[str]:
    return [problem for check in checks for problem in check.problems()]


class Environment(Check):
    """`os.environ`, but for what pytest and imports set."""

    not_ours = ("PYTEST_CURRENT_TEST", *SET_BY_IMPORTS)

    def __init__(self) -> None:
        self._before = self._variables()

    def problems(self) -> list[str]:
        now = self._variables()
        names = sorted(self._before.keys() | now.keys())
        pairs = [(name, self._before.get(name), now.get(name)) for name in names]
        return [f"os.environ[{name!r}] was {old!r}, is {new!r}" for name, old, new in pairs if old != new]

    def clean_up(self) -> None:
        for name in self._variables().keys() - self._before.keys():
            del os.environ[name]
        os.environ.update(self._before)

    def _variables(self) -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if name not in self.not_ours}


class WorkingDirectory(Check):
    """The working directory."""

    def __init__(self) -> None:
        self._before = Path.cwd()

    def problems(self) -> list[str]:
        now = Path.cwd()
        return [] if now == self._before else [f"the working directory was {self._before}, is {now}"]

    def clean_up(self) -> None:
        os.chdir(self._before)


class SignalHandlers(Check):
    """The handlers of all signals, but for SIGALRM, which pytest-timeout uses."""

    def __init__(self) -> None:
        self._before = self._handlers()

    def problems(self) -> list[str]:
        now = self._handlers()
        return [
            f"the handler of signal {number} was {self._before[number]}, is {handler}"
            for number, handler in now.items()
            if handler != self._before[number]
        ]

    def clean_up(self) -> None:
        for number, handler in self._handlers().items():
            if handler != self._before[number] and self._before[number] is not None:
                signal.signal(number, self._before[number])

    def _handlers(self) -> dict[int, Callable[..., object] | int | None]:
        return {number: signal.getsignal(number) for number in _SIGNALS}


class ExceptHooks(Check):
    """`sys.excepthook` and `threading.excepthook`."""

    def __init__(self) -> None:
        self._before = (sys.excepthook, threading.excepthook)

    def problems(self) -> list[str]:
        pairs = zip(("sys", "threading"), self._before, (sys.excepthook, threading.excepthook), strict=True)
        return [
            f"{name}.excepthook was {before}, is {now}" for name, before, now in pairs if before is not now
        ]

    def clean_up(self) -> None:
        sys.excepthook, threading.excepthook = self._before


class Threads(Check):
    """Threads that are no daemons, which keep the interpreter from ending. They are only reported."""

    torchs_own: tuple[str, ...] = ()  # torch 2.13 starts no Python thread that is not a daemon

    def __init__(self) -> None:
        self._before = self._threads()

    def problems(self) -> list[str]:
        return [f"thread {thread.name!r} is still running" for thread in self._threads() - self._before]

    def clean_up(self) -> None:
        self._before = self._threads()

    def _threads(self) -> set[threading.Thread]:
        found = {thread for thread in threading.enumerate() if not thread.daemon}
        return {thread for thread in found if not thread.name.startswith(self.torchs_own)}


class Processes(Check):
    """Processes that the test has started, and their descendants, orphans included."""

    def __init__(self, marker: str) -> None:
        self._marker = marker
        self._before: set[psutil.Process] = set()
        self._before = set(self._left())

    def problems(self) -> list[str]:
        return [f"left behind: {processes.describe(process)}" for process in self._left()]

    def clean_up(self) -> None:
        processes.kill(self._left())
        self._before |= set(self._left())

    def _left(self) -> list[psutil.Process]:
        found = processes.started_here(self._marker)
        return sorted(
            (p for p in found - self._before if not processes.is_gone(p) and not processes.is_service(p)),
            key=lambda process: process.pid,
        )


class ProcessGroup(Check):
    """torch's default process group."""

    def problems(self) -> list[str]:
        return ["torch's default process group is still initialised"] if self._is_initialized() else []

    def clean_up(self) -> None:
        if self._is_initialized():
            sys.modules["torch.distributed"].destroy_process_group()

    def _is_initialized(self) -> bool:
        distributed = sys.modules.get("torch.distributed")
        return distributed is not None and distributed.is_available() and distributed.is_initialized()


class TorchSettings(Check):
    """Global settings of torch. The check imports nothing: without torch there are none."""

    def __init__(self) -> None:
        self._before = self._settings()

    def problems(self) -> list[str]:
        now = self._settings()
        pairs = [(name, before, now[name]) for name, before in self._before.items()]
        return [f"{name} of torch was {old!r}, is {new!r}" for name, old, new in pairs if new is not old]

    def clean_up(self) -> None:
        if not self._before:
            return
        torch = sys.modules["torch"]
        torch.set_default_dtype(self._before["default dtype"])
        torch.use_deterministic_algorithms(self._before["use of deterministic algorithms"])
        sys.modules[_WRAPPERS].DistributedDataParallel._active_ddp_module = self._before["active wrapper"]

    def _settings(self) -> dict[str, Any]:
        if _WRAPPERS not in sys.modules:
            return {}
        torch = sys.modules["torch"]
        return {
            "default dtype": torch.get_default_dtype(),
            "use of deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
            "active wrapper": sys.modules[_WRAPPERS].DistributedDataParallel._active_ddp_module,
        }


class TorchFunctions(Check):
    """The functions of `torch.distributed` and the methods of its groups, which a test may replace.

    Every rank that is forked later would have the replacement.
    """

    def __init__(self) -> None:
        self._before = {
            owner: {name: member for name, member in vars(owner).items() if callable(member)}
            for owner in self._owners()
        }

    def problems(self) -> list[str]:
        return [f"{owner.__name__}.{name} was replaced" for owner, name in self._replaced()]

    def clean_up(self) -> None:
        for owner, name in self._replaced():
            setattr(owner, name, self._before[owner][name])

    def _replaced(self) -> list[tuple[Any, str]]:
        found = []
        for owner, members in self._before.items():
            now = vars(owner)
            if not all(map(operator.is_, map(now.get, members), members.values())):
                found += [(owner, name) for name, member in members.items() if now.get(name) is not member]
        return found

    def _owners(self) -> list[Any]:
        distributed = sys.modules.get("torch.distributed")
        if distributed is None or not distributed.is_available():
            return []
        return [distributed, distributed.distributed_c10d, distributed.ProcessGroup]


class ListeningSockets(Check):
    """Listening sockets of this process. They are reported, not closed: C++ code may own one."""

    def __init__(self) -> None:
        self._before = self._listening()

    def problems(self) -> list[str]:
        new = sorted(self._listening() - self._before)
        return [f"this process still listens on {address} port {port}" for address, port in new]

    def clean_up(self) -> None:
        self._before = self._listening()

    def _listening(self) -> set[tuple[str, int]]:
        connections = psutil.Process().net_connections(kind="inet")
        return {(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN}


class Files(Check):
    """The names in a folder, without those in `but`."""

    def __init__(self, folder: Path, *, but: Sequence[str] = (), only_files: bool = False) -> None:
        self._folder = folder
        self._but = tuple(but)
        self._only_files = only_files
        self._before = self._names()

    def problems(self) -> list[str]:
        return [f"new file: {self._folder / name}" for name in sorted(self._names() - self._before)]

    def clean_up(self) -> None:
        self._before = self._names()  # the files stay, for the reader of the report

    def _names(self) -> set[str]:
        try:
            with os.scandir(self._folder) as entries:  # which knows without a further call what is a file
                return {
                    entry.name
                    for entry in entries
                    if not entry.name.startswith(self._but) and (not self._only_files or entry.is_file())
                }
        except OSError:
            return set()


class SharedMemory(Files):
    """Segments in /dev/shm, without those that a process outside of this test uses.

    A segment is removed if a process of this test has it open or mapped, or if its name says that such a
    process created it. Any other may be another program's: it is only reported.
    """

    def __init__(self, marker: str = "no-marker") -> None:
        super().__init__(Path("/dev/shm"))
        self._marker = marker

    def problems(self) -> list[str]:
        return [f"new file: {self._folder / name}" for name in self._new()]

    def clean_up(self) -> None:
        own = self._own_pids()
        for name in self._new():
            if _is_segment_of(own, self._folder / name):
                (self._folder / name).unlink(missing_ok=True)
        self._before |= set(self._new())

    def _new(self) -> list[str]:
        if not (names := self._names() - self._before):
            return []
        foreign = set(psutil.pids()) - self._own_pids()
        return sorted(name for name in names if not _is_foreign(self._folder / name, foreign))

    def _own_pids(self) -> set[int]:
        return {os.getpid(), *(process.pid for process in processes.started_here(self._marker))}


class RankZeroOnly(Check):
    """The rank that `rank_zero_only` uses."""

    def __init__(self) -> None:
        self._before = _rank()

    def problems(self) -> list[str]:
        now = _rank()
        return [] if now == self._before else [f"rank_zero_only.rank was {self._before!r}, is {now!r}"]

    def clean_up(self) -> None:
        _set_rank(self._before)


def all_checks(marker: str, temp_folder: Path, base_folder: Path) -> list[Check]:
    """Return all checks, each with the state before a test recorded."""
    return [*costly_checks(marker, base_folder), *cheap_checks(temp_folder)]


def costly_checks(marker: str, base_folder: Path) -> list[Check]:
    """Return the checks that take longer the more processes, sockets or tests there are."""
    return [
        SharedMemory(marker),  # before the processes whose segments it removes are killed
        Processes(marker),  # before the rest, which a process may hold
        ListeningSockets(),
        Files(base_folder, only_files=True),  # the folders in it are pytest's tmp_path of each test
    ]


def cheap_checks(temp_folder: Path) -> list[Check]:
    """Return the checks that together take less than a millisecond."""
    return [
        *(Threads(), ProcessGroup(), Environment(), WorkingDirectory(), SignalHandlers(), ExceptHooks()),
        *(TorchSettings(), TorchFunctions(), RankZeroOnly()),
        *(Files(temp_folder, but=TEMPORARY), Files(REPOSITORY, but=CACHES)),
    ]


TEMPORARY = (
    "pymp-",  # multiprocessing's folder for sockets, one per process, removed when the process ends
    "torchelastic_",  # torchrun's log folder: torch leaves it there
    "torchinductor_",  # torch's compile cache
)
CACHES = (
    *(".coverage", ".git", ".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".venv"),
    "__pycache__",
)


def _rank() -> int | None:
    rank: int | None = getattr(rank_zero_only, "rank", None)
    return rank


def _set_rank(rank: int | None) -> None:
    setattr(rank_zero_only, "rank", rank)  # noqa: B010 -- mypy knows no attributes of functions


_NAMED_BY_PID = re.compile(r"(?:torch_|pym-)(\d+)[_-]")  # names that torch and multiprocessing give


def _is_foreign(path: Path, foreign: Iterable[int]) -> bool:
    """Tell whether another user, or one of these processes, has this file in /dev/shm."""
    try:
        status = path.stat()
    except OSError:  # gone by now
        return True
    return status.st_uid != os.getuid() or any(_uses(pid, str(path), status.st_ino) for pid in foreign)


def _is_segment_of(pids: set[int], path: Path) -> bool:
    """Tell whether one of these processes uses this file in /dev/shm, or created it under its own number."""
    try:
        status = path.stat()
    except OSError:  # gone by now
        return False
    if not stat.S_ISREG(status.st_mode):
        return False
    creator = _NAMED_BY_PID.match(path.name)
    is_named = creator is not None and int(creator[1]) in pids
    return is_named or any(_uses(pid, str(path), status.st_ino) for pid in pids)


def _uses(pid: int, path: str, inode: int) -> bool:
    folder = Path("/proc", str(pid))
    try:
        lines = (folder / "maps").read_text(errors="replace").splitlines()
        # glibc creates a semaphore under another name, which is shown here as deleted.
        if any("/dev/shm/" in line and line.split()[4] == str(inode) for line in lines):
            return True
        return any(os.readlink(link) == path for link in (folder / "fd").iterdir())  # noqa: PTH115 -- "pipe:[1]" is no path
    except OSError:
        return False
