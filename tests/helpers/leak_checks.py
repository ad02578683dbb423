"""Checks for what a test leaves behind: each reports what has changed and restores it."""

import itertools
import os
import re
import signal
import stat
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
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


class Settings(Check):
    """Values by name, each of which is compared with what it was, and set again."""

    label = "{}"

    def __init__(self) -> None:
        self._before = self._values()

    def problems(self) -> list[str]:
        return [f"{self.label.format(name)} was {old!r}, is {new!r}" for name, old, new in self._changed()]

    def clean_up(self) -> None:
        for name, old, _ in self._changed():
            self._set(name, old)

    def _changed(self) -> list[tuple[Any, Any, Any]]:
        before, now = self._before, self._values()
        names = sorted(before.keys() | now.keys(), key=str) if before != now else []
        pairs = [(name, before.get(name), now.get(name)) for name in names]
        return [(name, old, new) for name, old, new in pairs if old != new]

    @abstractmethod
    def _values(self) -> dict[Any, Any]: ...

    @abstractmethod
    def _set(self, name: Any, value: Any) -> None:
        """Set one of them; a value of None was not there."""


class Environment(Settings):
    """`os.environ`, but for what pytest and imports set."""

    label = "os.environ[{!r}]"
    not_ours = ("PYTEST_CURRENT_TEST", *SET_BY_IMPORTS)

    def _values(self) -> dict[Any, Any]:
        return {name: value for name, value in os.environ.items() if name not in self.not_ours}

    def _set(self, name: str, value: str | None) -> None:
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


class WorkingDirectory(Settings):
    """The working directory."""

    def _values(self) -> dict[Any, Any]:
        return {"the working directory": Path.cwd()}

    def _set(self, name: str, value: Path) -> None:
        os.chdir(value)


class SignalHandlers(Settings):
    """The handlers of all signals, but for SIGALRM, which pytest-timeout uses."""

    label = "the handler of signal {}"

    def _values(self) -> dict[Any, Any]:
        return {int(number): signal.getsignal(number) for number in _SIGNALS}

    def _set(self, name: int, value: Any) -> None:
        if value is not None:  # else it was none of Python's
            signal.signal(name, value)


class ExceptHooks(Settings):
    """`sys.excepthook` and `threading.excepthook`."""

    label = "{}.excepthook"

    def _values(self) -> dict[Any, Any]:
        return {"sys": sys.excepthook, "threading": threading.excepthook}

    def _set(self, name: str, value: Any) -> None:
        vars(sys.modules[name])["excepthook"] = value


class TorchSettings(Settings):
    """Global settings of torch. The check imports nothing: without torch there are none."""

    label = "{} of torch"

    def __init__(self) -> None:
        self._has_torch = _WRAPPERS in sys.modules
        super().__init__()

    def _values(self) -> dict[Any, Any]:
        if not self._has_torch:
            return {}
        torch = sys.modules["torch"]
        return {
            "default dtype": torch.get_default_dtype(),
            "use of deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
            "active wrapper": sys.modules[_WRAPPERS].DistributedDataParallel._active_ddp_module,
        }

    def _set(self, name: str, value: Any) -> None:
        torch = sys.modules["torch"]
        if name == "default dtype":
            torch.set_default_dtype(value)
        elif name == "active wrapper":
            sys.modules[_WRAPPERS].DistributedDataParallel._active_ddp_module = value
        else:
            torch.use_deterministic_algorithms(value)


class ProcessGroup(Settings):
    """torch's default process group."""

    def _values(self) -> dict[Any, Any]:
        distributed = sys.modules.get("torch.distributed")
        has_one = distributed is not None and distributed.is_available() and distributed.is_initialized()
        return {"torch's default process group": "initialised" if has_one else None}

    def _set(self, name: str, value: str | None) -> None:
        sys.modules["torch.distributed"].destroy_process_group()


class TorchFunctions(Settings):
    """The functions of `torch.distributed` and the methods of its groups, which a test may replace.

    Every rank that is forked later would have the replacement.
    """

    label = "{0[0].__name__}.{0[1]}"

    def __init__(self) -> None:
        distributed = sys.modules.get("torch.distributed")
        self._owners: list[Any] = []
        if distributed is not None and distributed.is_available():
            self._owners = [distributed, distributed.distributed_c10d, distributed.ProcessGroup]
        super().__init__()

    def _values(self) -> dict[Any, Any]:
        return {owner: dict(vars(owner)) for owner in self._owners}

    def _changed(self) -> list[tuple[Any, Any, Any]]:
        return [
            ((owner, name), old, now.get(name))
            for owner, before, now in super()._changed()
            for name, old in before.items()
            if callable(old) and now.get(name) is not old
        ]

    def _set(self, name: tuple[Any, str], value: Any) -> None:
        setattr(*name, value)


class RankZeroOnly(Settings):
    """The rank that `rank_zero_only` uses."""

    def _values(self) -> dict[Any, Any]:
        return {"rank_zero_only.rank": getattr(rank_zero_only, "rank", None)}

    def _set(self, name: str, value: int | None) -> None:
        setattr(rank_zero_only, "rank", value)  # noqa: B010 -- mypy knows no attributes of functions


class Additions(Check):
    """Things of which a test may leave no new one. They are only reported."""

    text: str

    def __init__(self) -> None:
        self._before = self._found()

    def problems(self) -> list[str]:
        return [self.text.format(each) for each in self._new()]

    def clean_up(self) -> None:
        self._before = self._found()

    def _new(self) -> list[Any]:
        return sorted(self._found() - self._before, key=str)

    @abstractmethod
    def _found(self) -> set[Any]: ...


class Threads(Additions):
    """Threads that are no daemons, which keep the interpreter from ending."""

    text = "thread {0.name!r} is still running"

    def _found(self) -> set[Any]:
        return {thread for thread in threading.enumerate() if not thread.daemon}


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


class ListeningSockets(Additions):
    """Listening sockets of this process. They are not closed: C++ code may own one.

    One that was open before, and begins to listen without another socket being opened, is not found.
    """

    text = "this process still listens on {0[0]} port {0[1]}"
    _last: tuple[set[str], set[Any]] = (set(), set())

    def _found(self) -> set[Any]:
        sockets = _open_sockets()
        if sockets != self._last[0]:  # psutil reads all sockets of the machine
            connections = psutil.Process().net_connections(kind="inet")
            listening = {(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN}
            ListeningSockets._last = sockets, listening
        return self._last[1]


def _open_sockets() -> set[str]:
    """Return the numbers that the kernel gives to the sockets of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 -- after every test
        with suppress(OSError):  # that of listdir itself
            found.add(os.readlink(f"/proc/self/fd/{name}"))  # noqa: PTH115
    return {each for each in found if each.startswith("socket:")}


class Files(Additions):
    """The paths of what is in a folder, without names in `but`. They stay, for the reader of the report."""

    text = "new file: {}"

    def __init__(self, folder: Path, *, but: Sequence[str] = (), only_files: bool = False) -> None:
        self._folder, self._but, self._only_files = folder, tuple(but), only_files
        super().__init__()

    def _found(self) -> set[Any]:
        try:
            with os.scandir(self._folder) as entries:  # which knows without a further call what is a file
                return {
                    entry.path
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

    def clean_up(self) -> None:
        own = self._own_pids()
        for path in map(Path, self._new()):
            if _is_segment_of(own, path):
                path.unlink(missing_ok=True)
        self._before |= set(self._new())

    def _new(self) -> list[Any]:
        if not (paths := super()._new()):
            return []
        foreign = set(psutil.pids()) - self._own_pids()
        return [path for path in paths if not _is_foreign(Path(path), foreign)]

    def _own_pids(self) -> set[int]:
        return {os.getpid(), *(process.pid for process in processes.started_here(self._marker))}


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
