"""The cases that `test_host_programs.py` runs."""

import _thread
import asyncio
import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from rankwise.errors import LaunchRefusedError, WorkerError, WorkerTimedOutError
from rankwise.processes import started_process
from rankwise.strategies import DDPElasticStrategy, DDPStrategy, Strategy
from tests.helpers import own_process


def strategy_of(method: str, **arguments: Any) -> DDPStrategy:
    """Return a strategy on two CPU processes; `elastic-<start method>` is one with torch's agent."""
    agent, _, start_method = method.rpartition("-")
    arguments = {"accelerator": "cpu", "devices": 2, "start_method": start_method, **arguments}
    return DDPElasticStrategy(**{"max_restarts": 0, **arguments}) if agent else DDPStrategy(**arguments)


def good(strategy: Strategy) -> str:
    for _ in range(3):
        time.sleep(0.3)
        strategy.barrier()
    return str(strategy.broadcast("fine"))


def quick(strategy: Strategy) -> str:
    strategy.barrier()
    return str(strategy.broadcast("fine"))


def bad(strategy: Strategy) -> None:
    strategy.barrier()
    if strategy.global_rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    strategy.barrier()


def stubborn(strategy: Strategy) -> None:
    strategy.barrier()
    if strategy.global_rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        with contextlib.suppress(BaseException):
            time.sleep(60)


def report(
    method: str, function: Callable[..., Any], *args: Any, errors: Any = WorkerError, **arguments: Any
) -> None:
    """Launch a function; print what it returns, or the error."""
    try:
        # A rank that is killed later loses what it has buffered.
        print(strategy_of(method, **arguments).launch(function, *args), flush=True)
    except errors as error:
        print(type(error).__name__, getattr(error, "global_rank", ""), error)


# ---------------------------------------------------------------------- what a program has changed


def reap_all_children() -> None:
    def reap(*_: object) -> None:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass

    signal.signal(signal.SIGCHLD, reap)


def forbid(numbers: Sequence[int], error: int) -> None:
    """Let these system calls return an error, as in older kernels and in some sandboxes: by seccomp."""
    instructions = [  # of an operation, the places to go on at if true and if false, a value
        (0x20, 0, 0, 0),  # load the number of the system call
        *((0x15, len(numbers) - place, 0, number) for place, number in enumerate(numbers)),
        *((0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x00050000 | error)),
    ]
    program = b"".join(struct.pack("HBBI", *each) for each in instructions)
    buffer = ctypes.create_string_buffer(program)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    given = struct.pack("HP", len(instructions), ctypes.addressof(buffer))
    assert libc.prctl(22, 2, given, 0, 0) == 0, ctypes.get_errno()
    started_process._HAS_PIDFD = started_process._has_pidfd()  # the package asks once, when it is imported


PIDFD, SEND, MEMFD = (434, 424), (424,), (319,)  # pidfd_open and pidfd_send_signal; memfd_create
PROCESSES, THREADS = (56, 57, 58), (435,)
EPERM, EAGAIN, ENOMEM, ENOSYS = 1, 11, 12, 38

SITUATIONS: dict[str, Callable[[], object]] = {
    "timeout": partial(socket.setdefaulttimeout, 0.1),
    "ignored": partial(signal.signal, signal.SIGCHLD, signal.SIG_IGN),
    "reaped": reap_all_children,
    "blocked": partial(signal.pthread_sigmask, signal.SIG_BLOCK, signal.valid_signals()),
    "pidfd missing": partial(forbid, PIDFD, ENOSYS),
    "pidfd refused": partial(forbid, PIDFD, EPERM),
    "sending refused": partial(forbid, SEND, EPERM),
    "memfd refused": partial(forbid, MEMFD, EPERM),
    "processes": partial(forbid, PROCESSES, EAGAIN),
    "memory": partial(forbid, PROCESSES, ENOMEM),
    "threads": partial(forbid, THREADS, EAGAIN),
}


def in_situation(situation: str, method: str, *names: str) -> None:
    SITUATIONS[situation]()
    for name in names:
        report(method, globals()[name])


def patched_threads(method: str) -> None:
    """Launch where gevent has replaced Python's threads."""
    started = _thread.start_new_thread

    def start_new_thread(*args: Any, **kwargs: Any) -> int:
        return started(*args, **kwargs)

    start_new_thread.__module__ = "gevent.thread"
    _thread.start_new_thread = start_new_thread
    report(method, quick, errors=Exception)


def blocked_signals(strategy: Strategy) -> set[signal.Signals]:
    return {signal.SIGTERM, signal.SIGUSR1} & signal.pthread_sigmask(signal.SIG_BLOCK, ())


def handle_own_signal(_: Strategy) -> None:
    signal.signal(signal.SIGUSR1, lambda *_: print("own", flush=True))
    signal.raise_signal(signal.SIGUSR1)


async def asyncio_handler() -> None:
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, print, "the main process's")
    strategy_of("fork").launch(handle_own_signal)
    await asyncio.sleep(0.1)


def good_without_timer(strategy: Strategy) -> str:
    signal.setitimer(signal.ITIMER_REAL, 0)
    return good(strategy)


async def full_wake_up(method: str) -> None:
    """Launch in an event loop whose wake-up descriptor is full, while a timer goes on to send signals."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, print)  # sets the descriptor
    wakes = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakes)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(wakes, bytes(1))
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.3, 0.3)
    report(method, good_without_timer)
    signal.setitimer(signal.ITIMER_REAL, 0)


def good_after_the_kill(strategy: Strategy) -> str:
    """Let rank 0 kill the forkserver, the parent of both ranks, and go on without it."""
    server = os.getppid()
    strategy.barrier()
    if strategy.global_rank == 0:
        os.kill(server, signal.SIGKILL)
    while os.getppid() == server:
        time.sleep(0.01)
    return good(strategy)


def forkserver_killed(name: str, _: str) -> None:
    for function in (good_after_the_kill, globals()[name]):
        report("forkserver", function)


def fail_with_a_title(strategy: Strategy, rank: int) -> None:
    """Set a title of 15 bytes, which end within a character, as the kernel cuts it; let a rank fail."""
    ctypes.CDLL(None).prctl(15, "训练-实验-模型".encode()[:15])
    strategy.barrier()
    if strategy.global_rank == rank == 0:
        raise ValueError
    if strategy.global_rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    strategy.barrier()


def cut_title(rank: str, method: str) -> None:
    report(method, fail_with_a_title, int(rank))


def write_to_channel(strategy: Any) -> None:
    """Let rank 1 write to its own channel what begins no frame."""
    strategy.barrier()
    if strategy.global_rank == 1:
        strategy.job.worker.channel._sock.sendall(b"\xff\xff\xff\xff\2more")
    time.sleep(20)


def writes_to_channel() -> None:
    strategy_of("popen", grace_period_s=1.0).launch(write_to_channel)


FORK_ENDS = {"exit": 3, "raise": 1, "return": 0}


def fork_and_end(strategy: Strategy, how: str) -> str:
    """Fork a process, which ends in one of three ways, and print its exit code."""
    strategy.barrier()
    if pid := os.fork():
        print(f"{how}:", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    elif how == "exit":
        sys.exit(3)
    elif how == "raise":
        raise RuntimeError("the child's own")
    else:
        return "child"
    strategy.barrier()
    return "fine"


def ranks_fork(method: str) -> None:
    strategy = strategy_of(method)
    for how in FORK_ENDS:
        print(f"--- {how}", file=sys.stderr, flush=True)
        print(how, strategy.launch(fork_and_end, how), flush=True)


# ---------------------------------------------------------------------- ranks that nothing interrupts


def wait() -> None:
    print("waiting", flush=True)
    while True:
        time.sleep(0.1)


def in_except(wait: Callable[[], None]) -> None:
    try:
        raise ConnectionError
    except ConnectionError:
        wait()


def wait_swallowing() -> None:
    while True:
        with contextlib.suppress(BaseException):
            wait()


def wait_for_a_reader() -> None:
    os.dup2(os.pipe()[1], 1)  # which is full before all is written
    print("x" * 1_000_000, flush=True)


WAITS: dict[str, Callable[[], None]] = {
    "except": partial(in_except, wait),
    "swallow": wait_swallowing,
    "print": partial(in_except, wait_for_a_reader),
}


def wait_or_end(strategy: Strategy, how: str, end: str) -> None:
    """Let rank 0 wait and rank 1 end, or send SIGTERM to the main process, which is rank 0."""
    strategy.barrier()
    if strategy.global_rank == 0:
        WAITS.get(how, wait)()
    if end == "raise":
        raise ValueError("the cause")
    while "waiting" not in Path("/proc/self/fd/1").read_text():
        time.sleep(0.01)
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(60)


def busy(method: str, how: str, end: str) -> None:
    launch = partial(strategy_of(method).launch, wait_or_end, how, end)
    if how == "blocked":
        SITUATIONS["blocked"]()
    in_a_thread(launch) if how == "thread" else launch()


def in_a_thread(function: Callable[[], object]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def rest_of_a_script() -> None:
    strategy = strategy_of("popen", grace_period_s=0.0)
    strategy.launch(quick)
    if not strategy.is_global_zero:
        os._exit(3)
    time.sleep(2)
    print("the rest")


def save_after_an_interrupt(strategy: Strategy) -> None:
    """Interrupt rank 0, which takes two seconds to save; rank 1 raises when it is stopped."""
    strategy.barrier()
    try:
        if strategy.global_rank == 0:
            signal.raise_signal(signal.SIGINT)
        time.sleep(60)
    except KeyboardInterrupt:
        time.sleep(2)
        print("saved")
        raise
    except BaseException:
        raise RuntimeError("after the stop") from None


def interrupted() -> None:
    try:
        strategy_of("popen", grace_period_s=0.2).launch(save_after_an_interrupt)
    except KeyboardInterrupt:
        print("interrupted")


def without_grace() -> None:
    report("popen", wait_or_end, "", "raise", grace_period_s=0)


def launch_in_a_thread() -> None:
    in_a_thread(partial(report, "popen", good))


# ---------------------------------------------------------------------- limits


def held() -> tuple[list[str], list[psutil.Process]]:
    kinds = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 -- a folder that is read in one call
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            kinds.append(os.readlink(f"/proc/self/fd/{name}"))  # noqa: PTH115 -- "pipe:[1]" is no path
    return sorted(kinds), psutil.Process().children()


def few_files(method: str) -> None:
    arguments = {"command": [sys.executable, sys.argv[0], "few_files_rank"]} if method == "popen" else {}
    if method != "popen":
        strategy_of(method).launch(quick)
    before = held()
    for spare in range(1, 62, 20):
        strategy = strategy_of(method, **arguments)
        try:
            with own_process.few_files(spare):
                outcome = strategy.launch(quick)
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}".replace("\n", " ")
        print(spare, outcome, end="\n\n", flush=True)
        if spare < 61 or method != "popen":
            assert held() == before, (held(), before)


def few_files_rank() -> None:
    """Be the second rank of a script's launch that has enough files."""
    strategy_of("popen").launch(quick)


def few_processes(situation: str, method: str) -> None:
    before = psutil.Process().children()
    SITUATIONS[situation]()
    report(method, quick, errors=LaunchRefusedError)
    assert psutil.Process().children() == before


def handle_own(*_: object) -> None:
    print("own handler", flush=True)


def wait_for_a_sleeper(strategy: Strategy, how: str) -> None:
    """Let rank 0 wait longer than it may for rank 1, which handles SIGUSR2 itself."""
    if how != "before":
        signal.signal(signal.SIGUSR2, handle_own if how == "handler" else signal.SIG_DFL)
    strategy.barrier()
    if strategy.global_rank == 1:
        if how == "before":
            signal.raise_signal(signal.SIGUSR2)
        time.sleep(20)
    strategy.all_reduce(torch.ones(1))


def handles_sigusr2(method: str, how: str) -> None:
    if how == "before":
        signal.signal(signal.SIGUSR2, handle_own)
    try:
        strategy_of(method, timeout=2).launch(wait_for_a_sleeper, how)
    except WorkerTimedOutError as error:
        print(type(error).__name__, error.missing)


def fork_and_launch(rank: int, strategy: DDPStrategy) -> None:
    """Launch in a process that multiprocessing forks, and exit in another fork."""

    def launch() -> None:
        print(f"launch of {rank}:", flush=True)
        report("popen", quick, errors=LaunchRefusedError)

    child = multiprocessing.get_context("fork").Process(target=launch)
    child.start()
    child.join()
    print(f"child of {rank}: {child.exitcode}")
    sys.stdout.flush()
    if (pid := os.fork()) == 0:
        sys.exit(3)
    print(f"child of {rank}: {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}", flush=True)


def forks_after_a_job() -> None:
    strategy = strategy_of("popen")
    strategy.launch(quick)
    for rank in range(2):
        if strategy.global_rank == rank:
            fork_and_launch(rank, strategy)
        print(f"after {rank}: {strategy.launch(quick)}", flush=True)


def descriptors(method: str) -> None:
    strategy = strategy_of(method)
    strategy.launch(quick)
    gc.disable()
    for situation in ("default", "ignored"):
        SITUATIONS.get(situation, bool)()
        before = len(held()[0])
        strategy.launch(quick)
        left = len(held()[0]) - before, len(multiprocessing.process._children)  # type: ignore[attr-defined]
        print(situation, *left, flush=True)


if __name__ == "__main__":
    result = globals()[sys.argv[1]](*sys.argv[2:])
    if asyncio.iscoroutine(result):
        asyncio.run(result)
