"""Modules that the forkserver imports once, for all processes that it forks; and how it ends.

It must not raise: the forkserver would end without a message. Other processes may import it too, for example
tools that read all modules; in such a process it changes nothing.
"""

import atexit
import contextlib
import gc
import multiprocessing
import multiprocessing.util
import os
import shutil
import signal
import socket
import sys
import time
from functools import partial
from pathlib import Path

_PARENT_ENDS_S = 1.0
_POLL_S = 0.01
_IS_SERVER = sys.orig_argv[-2:-1] == ["-c"] and sys.orig_argv[-1].startswith(
    "from multiprocessing.forkserver import"
)


def exit_when_idle(server: int, main_process: int, folder: Path | None) -> None:
    """End the server without unloading torch, which takes long.

    Removes multiprocessing's folder for the server's socket if the main process was killed.
    """
    if os.getpid() != server:  # a process that the server has forked
        return
    deadline = time.monotonic() + _PARENT_ENDS_S
    while os.getppid() == main_process and time.monotonic() < deadline:
        time.sleep(_POLL_S)  # it has closed its files, but not ended yet
    if folder is not None and os.getppid() != main_process:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _folder_of_the_socket() -> Path | None:
    """Return the folder that multiprocessing has made for the socket on which this server listens."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 -- Path.iterdir would leave the folder open
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as opened:
            address = opened.getsockname() if opened.family == socket.AF_UNIX else ""
            if isinstance(address, str) and Path(address).parent.name.startswith("pymp-"):
                return Path(address).parent
    return None


def freeze_objects(server: int) -> None:
    """Exclude imported objects from garbage collection before the server forks, as `objects_frozen` does."""
    if os.getpid() == server:
        gc.freeze()


def enable_interrupts(_: object) -> None:
    """Unblock SIGINT, which the forkserver blocks because of the ranks, in a process that is not a rank."""
    if not multiprocessing.current_process().name.startswith("rankwise-"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


with contextlib.suppress(Exception):
    if _IS_SERVER:
        # This signal tells the server that a process has ended; the program may have blocked it.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        if signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
            multiprocessing.util.register_after_fork(enable_interrupts, enable_interrupts)
        atexit.register(exit_when_idle, os.getpid(), os.getppid(), _folder_of_the_socket())

with contextlib.suppress(Exception):
    from rankwise.processes.fork_safety import import_dynamo

    import_dynamo()
    import torch.nn.parallel  # noqa: F401

    import rankwise.launchers.multiprocess  # noqa: F401  the worker function lives there

    if _IS_SERVER:
        os.register_at_fork(before=partial(freeze_objects, os.getpid()))
