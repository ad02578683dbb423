"""How a process exits: its exit code, its pools, its last lines on stderr."""

from __future__ import annotations

import atexit
import functools
import gc
import io
import os
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, NoReturn, final

from rankwise.errors import WorkerError, WorkerExitedError, WorkerKilledError
from rankwise.processes.signals import frames_from
from rankwise.time_limit import call_with_limit

_STDERR_TIMEOUT_S = 0.2
LAST_LINES_TIMEOUT_S = 5.0
"""How long to wait for a reader of stderr before the process ends anyway."""

call_at_exit = functools.cache(atexit.register)
"""Register an exit hook, once: Python keeps the place of one that is unregistered."""

# The class of all files. `issubclass(..., io.IOBase)`, an abstract class, would take 0.2 s for all objects.
_FILE: Any = io.IOBase.__base__
_writing: threading.Thread | None = None


def write_stderr(text: str, timeout_s: float = _STDERR_TIMEOUT_S) -> None:
    """Write a text to stderr, in a thread of its own; do nothing if stderr is closed or has no reader.

    If the reader takes longer than `timeout_s`, the text is written later; others are dropped until then.
    """
    global _writing
    if _writing is not None and _writing.is_alive():
        _writing.join(timeout_s)
        if _writing.is_alive():
            return
    _writing = thread = threading.Thread(target=_write, args=(text,), name="rankwise-stderr", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # Python 3.12 starts none while exit hooks run
        _write(text)
    else:
        thread.join(timeout_s)


def _write(text: str) -> None:
    with suppress(Exception):  # stderr may be None, closed, without a reader, or the user's own code
        sys.stderr.write(text)
        sys.stderr.flush()


def exit_now(code: int) -> NoReturn:
    """Flush stdout and stderr, then end this process without exit hooks."""
    if threading.current_thread() is threading.main_thread():
        _flush_streams()
    else:  # the main thread may be blocked in a write, and flushing waits for that
        call_with_limit(_flush_streams, _STDERR_TIMEOUT_S)
    os._exit(code)


def skip_last_collections() -> None:
    """Let this process, a worker, exit without the garbage collections with which Python ends: 0.6 s.

    They would walk all of torch's objects several times. Open files are flushed. An object in a reference
    cycle is not finalized, as in a process that multiprocessing forks.
    """
    for each in gc.get_objects():
        if issubclass(type(each), _FILE):
            with suppress(Exception):  # closed, or the user's own code
                each.flush()
    gc.freeze()


def _flush_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # closed, without a reader, None, or the user's own code
            stream.flush()


def report_at_exit(error: BaseException) -> None:
    """Print an error as the interpreter does; of a worker's error its text, which has its own traceback."""
    is_ours = isinstance(error, WorkerError)
    text = f"{type(error).__name__}: {error}\n" if is_ours else "".join(traceback.format_exception(error))
    write_stderr(text, LAST_LINES_TIMEOUT_S)


@contextmanager
def forked_children_exit() -> Iterator[None]:
    """End a process that the block forks when it leaves the block: with its exit code, without exit hooks."""
    pid = os.getpid()
    try:
        yield
    except BaseException as error:
        if os.getpid() == pid:
            raise
        exit_now(_report_in_child(error))
    if os.getpid() != pid:
        exit_now(0)


def _report_in_child(error: BaseException) -> int:
    """Print an exception as the interpreter does; return its exit code."""
    if not isinstance(error, SystemExit):
        sys.excepthook(type(error), error, error.__traceback__)
    elif error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    else:
        write_stderr(f"{error.code}\n")
    return _FAILURE


# Where each module keeps the threads that serve its pools.
_THREADS = {"concurrent.futures.thread": "_threads_queues", "concurrent.futures.process": "_threads_wakeups"}


def end_pools() -> None:
    """Let pools of this fork finish and end; Python's hook would also join threads of the parent's pools."""
    for name, its_threads in _THREADS.items():
        if (module := sys.modules.get(name)) is None:
            continue
        threads = getattr(module, its_threads)
        for thread in list(threads):
            if thread is threading.current_thread() or not thread.is_alive():
                del threads[thread]
        module._python_exit()


_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]

_FAILURE = 1
# These run other code and catch all its exceptions: none reaches the end of the interpreter.
_HOSTS = ("_pytest", "IPython", "ipykernel", "code", "bdb", "doctest", "unittest")


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a script for the error that ended it, as a shell shows it; never 0."""
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT
    if isinstance(error, WorkerKilledError):
        return (128 + error.signal_number) & 0xFF or _FAILURE
    if isinstance(error, WorkerExitedError):
        return (error.exit_code or 0) & 0xFF or _FAILURE
    return _FAILURE


@contextmanager
def exit_code_kept() -> Iterator[None]:
    """Exit with the failed worker's code if a worker's error leaves the block and is not caught.

    The current `sys.excepthook` prints the traceback as usual. Nothing changes outside of the main thread, or
    if a caller catches all exceptions (a notebook, pytest).

    Mutates: `sys.excepthook`, for as long as the exception lives.
    """
    try:
        yield
    except WorkerError as error:
        is_in_main_thread = threading.current_thread() is threading.main_thread()
        if exit_code_of(error) != _FAILURE and is_in_main_thread and not is_hosted():
            sys.excepthook = _ExitCodeHook(error, sys.excepthook)
        raise


@final
class _ExitCodeHook:
    """A `sys.excepthook` that calls the one before, and for one error raises `SystemExit`: CPython obeys."""

    def __init__(self, error: WorkerError, before: _Hook) -> None:
        self._error = weakref.ref(error, self._restore)
        self._before = before

    def __call__(
        self, kind: type[BaseException], value: BaseException, traceback: TracebackType | None
    ) -> None:
        self._before(kind, value, traceback)
        if isinstance(value, WorkerError) and value is self._error() and not _is_interactive():
            raise SystemExit(exit_code_of(value))

    def _restore(self, error: object) -> None:
        hook: _Hook = self
        if sys.excepthook is self:
            while isinstance(hook, _ExitCodeHook) and hook._error() is None:
                hook = hook._before
            sys.excepthook = hook


def is_hosted() -> bool:
    """Whether the main thread runs in a program that outlives errors, such as a notebook's kernel."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    names = (str(each.f_globals.get("__name__")) for each in frames_from(frame))
    return any(name.partition(".")[0] in _HOSTS for name in names) or _is_interactive()


def _is_interactive() -> bool:
    return "ps1" in vars(sys) or bool(sys.flags.inspect or os.environ.get("PYTHONINSPECT"))
