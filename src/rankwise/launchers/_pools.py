"""End the pools of `concurrent.futures` that a forked process leaves open, as an interpreter does."""

from __future__ import annotations

import sys
import threading

# Where each module keeps the threads that serve its pools. They wait for work until they are told of the end.
_THREADS = {"concurrent.futures.thread": "_threads_queues", "concurrent.futures.process": "_threads_wakeups"}


def end_pools() -> None:
    """Let the pools of this process finish what they have to do, then end their threads and processes.

    Python's own hook for that knows the caller's pools, too, whose threads are in another process, and the
    thread that has launched the job may be one of them.
    """
    for name, its_threads in _THREADS.items():
        if (module := sys.modules.get(name)) is None:
            continue
        threads = getattr(module, its_threads)
        for thread in list(threads):
            if thread is threading.current_thread() or not thread.is_alive():
                del threads[thread]
        module._python_exit()
