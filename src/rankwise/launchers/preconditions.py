"""Raise if something in the launching process makes it impossible to start or supervise processes."""

from __future__ import annotations

import _thread
import errno
import multiprocessing.process
import os
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from rankwise.errors import LaunchRefusedError

# These run all threads in one, so the supervisor's cannot run while the main thread is in a collective.
_PATCHERS = ("gevent", "eventlet")
_FILES, _FILES_OF_RANK = 20, 12  # open in the launching process and a rank together; more for each local rank
_SHORTAGES = {
    errno.EMFILE: ("this process may open no more files (RLIMIT_NOFILE)", "ulimit -n 4096"),
    errno.ENFILE: ("the machine can open no more files (fs.file-max)", "sysctl fs.file-max=1000000"),
    errno.EAGAIN: (
        "this user may start no more processes or threads (RLIMIT_NPROC, pids.max)",
        "ulimit -u 4096",
    ),
    errno.ENOMEM: ("there is not enough memory for another process", "set devices to fewer"),
}


def refuse_patched_threads() -> None:
    """Raise `LaunchRefusedError` where threads or sockets have been replaced by ones that cooperate."""
    for function in (_thread.start_new_thread, socket.socket, select.select):
        patcher = str(function.__module__).partition(".")[0]
        if patcher in _PATCHERS:
            raise LaunchRefusedError(
                message=f"{patcher} has replaced Python's threads and sockets; no job can be supervised so.",
                facts=f"{function.__qualname__}() is {function.__module__}'s.",
                remedy=f"start the training in a process of its own, which {patcher} has not patched.",
            )


def refuse_removed_directory() -> None:
    """Raise `LaunchRefusedError` where the working directory has been removed: ranks inherit it."""
    try:
        os.getcwd()  # noqa: PTH109  as torch and multiprocessing do
    except OSError:
        raise LaunchRefusedError(
            message="The ranks cannot be started where the working directory has been removed.",
            remedy="call os.chdir() with a folder that exists, or start the program in one.",
        ) from None


def refuse_while_main_is_imported(start_method: str) -> None:
    """Raise `LaunchRefusedError` in a worker that imports the main module, which would launch again."""
    if getattr(multiprocessing.process.current_process(), "_inheriting", False):
        raise LaunchRefusedError(
            message=f"start_method={start_method!r} was used while the main module was still being imported.",
            facts="each worker imports the main module, which launches again.",
            remedy='put what starts the training under: if __name__ == "__main__":',
        )


@contextmanager
def shortages_named(local_world_size: int) -> Iterator[None]:
    """Raise `LaunchRefusedError` where a limit keeps this process from starting its ranks in the block."""
    # Before anything is started: ranks inherit the limits of open files and threads, and gloo aborts at them.
    try:
        thread = threading.Thread(target=bool)
        thread.start()
        thread.join()
        with ExitStack() as opened:
            for _ in range(_FILES // 2 + _FILES_OF_RANK // 2 * local_world_size):
                for end in os.pipe():
                    opened.callback(os.close, end)
        yield
    except OSError as error:
        if error.errno not in _SHORTAGES:
            raise
        problem, remedy = _SHORTAGES[error.errno]
    except RuntimeError as error:
        if "can't start new thread" not in str(error):
            raise
        problem, remedy = _SHORTAGES[errno.EAGAIN]
    else:
        return
    raise LaunchRefusedError(message=f"The ranks cannot be started: {problem}.", remedy=f"{remedy}.")
