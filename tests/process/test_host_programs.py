"""Programs around a job that have changed what a process has of the operating system."""

from __future__ import annotations

import signal
import sys
import time
from typing import Any

import pytest

from rankwise.errors import WorkerRaisedError
from tests.helpers.scripts import ScriptRunner
from tests.process.helpers import METHODS as START_METHODS
from tests.process.helpers import ddp

METHODS = [
    "fork",
    "popen",
    pytest.param("spawn", marks=pytest.mark.soak),
    pytest.param("forkserver", marks=pytest.mark.soak),
]

ELASTIC = ["elastic-fork", pytest.param("elastic-spawn", marks=pytest.mark.soak)]

JOB = """
    import os
    import signal
    import sys
    import time

    from rankwise.errors import WorkerError
    from rankwise.strategies import DDPElasticStrategy, DDPStrategy

    def good(strategy):
        for _ in range(3):
            time.sleep(0.3)
            strategy.barrier()
        return strategy.broadcast("fine")

    def bad(strategy):
        strategy.barrier()
        if strategy.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        strategy.barrier()

    options = {"accelerator": "cpu", "devices": 2}

    def strategy_of(method):
        agent, _, method = method.rpartition("-")
        if agent:
            return DDPElasticStrategy(start_method=method, max_restarts=0, **options)
        return DDPStrategy(start_method=method, **options)

    def main(method, name):
        strategy = strategy_of(method)
        try:
            print(strategy.launch(good if name == "good" else bad))
        except WorkerError as error:
            print(type(error).__name__, error.global_rank, error)

    if __name__ == "__main__":
        main(sys.argv[1], sys.argv[2])
"""

DEFAULT_TIMEOUT = """
    import socket

    socket.setdefaulttimeout(0.1)
"""

SIGCHLD_IGNORED = """
    import signal

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
"""

ALL_CHILDREN_REAPED = """
    import os
    import signal

    def reap(*_):
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass

    signal.signal(signal.SIGCHLD, reap)
"""

FORBIDDEN = """
    import ctypes
    import struct

    def forbid(numbers, error):
        # seccomp: these system calls return an error, as in older kernels and in some sandboxes
        def instruction(code, if_true, if_false, value):
            return struct.pack("HBBI", code, if_true, if_false, value)

        program = instruction(0x20, 0, 0, 0)  # load the number of the system call
        for place, number in enumerate(numbers):
            program += instruction(0x15, len(numbers) - place, 0, number)
        program += instruction(0x06, 0, 0, 0x7FFF0000) + instruction(0x06, 0, 0, 0x00050000 | error)
        buffer = ctypes.create_string_buffer(program)

        class Filter(ctypes.Structure):
            _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]

        libc = ctypes.CDLL(None, use_errno=True)
        given = Filter(len(program) // 8, ctypes.addressof(buffer))
        assert libc.prctl(38, 1, 0, 0, 0) == 0
        assert libc.prctl(22, 2, ctypes.byref(given), 0, 0) == 0, ctypes.get_errno()

    forbid(%s, %d)
"""
PIDFD, MEMFD = (434, 424), (319,)  # pidfd_open and pidfd_send_signal; memfd_create
EPERM, ENOSYS = 1, 38


@pytest.mark.parametrize("method", [*METHODS, *ELASTIC])
@pytest.mark.parametrize(
    "before",
    [DEFAULT_TIMEOUT, SIGCHLD_IGNORED, ALL_CHILDREN_REAPED],
    ids=["default-timeout", "ignored", "reaped"],
)
def test_a_good_job(before: str, method: str, run_script: ScriptRunner) -> None:
    """A default timeout for sockets ends no channel; a rank whose exit code is unknown is good when done."""
    result = run_script(before + JOB, method, "good")
    assert result.returncode == 0, result
    assert result.stdout.count("fine") == (2 if method == "popen" else 1), result


@pytest.mark.parametrize("method", [*METHODS, *ELASTIC])
@pytest.mark.parametrize("before", [SIGCHLD_IGNORED, ALL_CHILDREN_REAPED], ids=["ignored", "reaped"])
def test_a_killed_rank_whose_exit_code_is_unknown(before: str, method: str, run_script: ScriptRunner) -> None:
    """The rank is named, and why its exit code is not known; where it is known all the same, the signal."""
    result = run_script(before + JOB, method, "bad")
    assert result.returncode == 0, result
    how = "exited with an unknown code before it had finished", "was killed by SIGKILL"
    assert any(each in result.stdout for each in how), result
    assert "Error 1 " in result.stdout, result
    assert ("SIGCHLD" in result.stdout) == ("unknown code" in result.stdout), result


SIGNALS_BLOCKED = """
    import signal

    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
"""


@pytest.mark.parametrize(
    "method",
    ["forkserver", *(pytest.param(method, marks=pytest.mark.soak) for method in ("fork", "spawn", "popen"))],
)
def test_a_killed_rank_of_a_host_that_blocks_signals(method: str, run_script: ScriptRunner) -> None:
    """Its exit status is known: a forkserver gets it by SIGCHLD, and begins with the signals blocked."""
    result = run_script(SIGNALS_BLOCKED + JOB, method, "bad")
    assert "WorkerKilledError 1 " in result.stdout, result


HEARS_SIGTERM = (
    SIGNALS_BLOCKED
    + """
    import sys

    from rankwise.strategies import DDPElasticStrategy

    def blocked(strategy):
        return {signal.SIGTERM, signal.SIGUSR1} & signal.pthread_sigmask(signal.SIG_BLOCK, ())

    if __name__ == "__main__":
        strategy = DDPElasticStrategy(accelerator="cpu", devices=2, start_method=sys.argv[1])
        print(strategy.launch(blocked))
"""
)


@pytest.mark.parametrize(
    "method", ["fork", *(pytest.param(each, marks=pytest.mark.soak) for each in ("spawn", "forkserver"))]
)
def test_elastic_ranks_of_a_host_that_blocks_signals(method: str, run_script: ScriptRunner) -> None:
    """They hear SIGTERM, by which torch's agent ends them, and no other signal that was blocked."""
    result = run_script(HEARS_SIGTERM, method)
    assert result.stdout == "{<Signals.SIGUSR1: 10>}\n", result


ASYNCIO = """
    import asyncio

    async def main(method, name):
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, print, "the main process's")
        DDPStrategy(accelerator="cpu", devices=2, start_method=method).launch(handle)
        await asyncio.sleep(0.1)

    def handle(strategy):
        signal.signal(signal.SIGUSR1, lambda *_: print("own", flush=True))
        signal.raise_signal(signal.SIGUSR1)

    if __name__ == "__main__":
        asyncio.run(main(*sys.argv[1:]))
        sys.exit()
"""


def test_signals_of_ranks_that_an_asyncio_program_forks(run_script: ScriptRunner) -> None:
    """They wake no event loop of the main process."""
    result = run_script(JOB.partition("    def main")[0] + ASYNCIO, "fork", "")
    assert result.stdout == "own\nown\n", result


FULL_WAKE_UP = """
    import asyncio
    import contextlib
    import os
    import signal

    async def in_a_loop(*args):
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, print)  # asyncio sets the descriptor that signals wake
        wakes = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(wakes)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(wakes, bytes(1))
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
        main(*args)
        signal.setitimer(signal.ITIMER_REAL, 0)
"""


@pytest.mark.parametrize("method", [*METHODS, *ELASTIC])
def test_a_host_whose_wake_up_descriptor_is_full(method: str, run_script: ScriptRunner) -> None:
    """The event loop, which waits for the job, reads none of the signals that its timer goes on to send."""
    job = JOB.replace("time.sleep(0.3)", "signal.setitimer(signal.ITIMER_REAL, 0); time.sleep(0.3)")
    program = FULL_WAKE_UP + job.replace(
        "main(sys.argv[1], sys.argv[2])", "asyncio.run(in_a_loop(sys.argv[1], sys.argv[2]))"
    )
    result = run_script(program, method, "good")
    assert result.returncode == 0, result
    assert "fine" in result.stdout, result


FORKSERVER_KILLED = """
    import multiprocessing.forkserver
    import threading
    from pathlib import Path

    def kill_forkserver():
        while not Path("up").exists():
            time.sleep(0.01)
        server = multiprocessing.forkserver._forkserver._forkserver_pid
        os.kill(server, signal.SIGKILL)
        os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)
        Path("killed").touch()

    def wait():
        Path("up").touch()
        while not Path("killed").exists():
            time.sleep(0.01)
"""


@pytest.mark.parametrize("name", ["good", pytest.param("bad", marks=pytest.mark.soak)])
def test_a_forkserver_that_is_killed_during_a_job(name: str, run_script: ScriptRunner) -> None:
    """Its ranks go on without it; the next launch has another one."""
    job = JOB.replace("strategy.barrier()", "wait(); strategy.barrier()").replace(
        "main(sys.argv[1]",
        "threading.Thread(target=kill_forkserver).start(); main(sys.argv[1], 'good'); main(sys.argv[1]",
    )
    result = run_script(FORKSERVER_KILLED + job, "forkserver", name)
    assert result.returncode == 0, result
    assert result.stdout.startswith("fine\n"), result
    assert ("fine\nfine" if name == "good" else "WorkerKilledError 1 ") in result.stdout, result


CUT_TITLE = """
    import ctypes

    title = "训练-实验-模型".encode()[:15]  # the kernel keeps 15 bytes, which end within a character

    def set_title():
        ctypes.CDLL(None).prctl(15, title)
"""


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.soak)])
def test_a_title_that_is_cut_within_a_character(rank: int, method: str, run_script: ScriptRunner) -> None:
    """The supervisor reads what /proc says of a rank, whatever bytes that are."""
    program = (CUT_TITLE + JOB).replace("strategy.barrier()", "set_title(); strategy.barrier()")
    end = "raise ValueError" if rank == 0 else "os.kill(os.getpid(), signal.SIGKILL)"
    program = program.replace(
        "== 1:\n            os.kill(os.getpid(), signal.SIGKILL)", f"== {rank}:\n            {end}"
    )
    result = run_script(program, method, "bad")
    assert f"Error {rank} Worker global_rank={rank} " in result.stdout, result


SENT = {
    "kind": b"\0\0\0\1\x63A",
    "record": b"\0\0\0\4\2null",
    "request": b"\0\0\0\x0a\6" + bytes(10),
    "number": b"\0\0\0\2\x0axx",
    "length": b"\xff\xff\xff\xff\2more",
}


@pytest.mark.parametrize("method", [method for method in METHODS if method != "popen"])
@pytest.mark.parametrize("sent", SENT.values(), ids=SENT)
def test_a_rank_that_writes_to_its_channel(sent: bytes, method: str) -> None:
    """The rank is named, and the supervisor goes on."""
    strategy = ddp(method, grace_period_s=1.0)
    with pytest.raises(WorkerRaisedError, match="what it sent is no message") as caught:
        strategy.launch(write_to_channel, sent)
    assert caught.value.global_rank == 1
    assert strategy.launch(value_of_rank) == 0


WRITES = """
    import sys
    import time

    from rankwise.strategies import DDPStrategy

    def job(strategy, sent):
        strategy.barrier()
        if strategy.global_rank == 1:
            strategy.job.worker.channel._sock.sendall(sent)
        time.sleep(20)

    strategy = DDPStrategy(accelerator="cpu", devices=2, start_method="popen", grace_period_s=1.0)
    strategy.launch(job, bytes.fromhex(sys.argv[1]))
"""


@pytest.mark.parametrize(
    "sent", [SENT["length"], *(pytest.param(sent, marks=pytest.mark.soak) for sent in SENT.values())]
)
def test_a_script_that_writes_to_its_channel(sent: bytes, run_script: ScriptRunner) -> None:
    """The rank is named, and the main process ends."""
    result = run_script(WRITES, sent.hex())
    assert result.returncode == 1, result
    assert "global_rank=1" in result.stderr, result
    assert "what it sent is no message" in result.stderr, result


def write_to_channel(strategy: Any, sent: bytes) -> None:
    """Let rank 1 write bytes to its own channel."""
    strategy.barrier()
    if strategy.global_rank == 1:
        strategy.job.worker.channel._sock.sendall(sent)
    time.sleep(20)


def value_of_rank(strategy: Any) -> int:
    """Return the rank."""
    return int(strategy.global_rank)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="system calls are forbidden by seccomp")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("numbers", "error"),
    [
        pytest.param(PIDFD, ENOSYS, id="old"),
        pytest.param(PIDFD, EPERM, id="refused", marks=pytest.mark.soak),
        pytest.param(MEMFD, EPERM, id="memfd", marks=pytest.mark.soak),
    ],
)
def test_system_calls_that_are_missing(
    numbers: tuple[int, ...], error: int, method: str, run_script: ScriptRunner
) -> None:
    """Without pidfds or memory files a job ends as it does with them, well or badly."""
    program = FORBIDDEN % (numbers, error) + JOB
    good, bad = run_script(program, method, "good"), run_script(program, method, "bad")
    assert good.returncode == 0, good
    assert "fine" in good.stdout, good
    assert "WorkerKilledError 1 " in bad.stdout, bad


BAD = """
        if strategy.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        strategy.barrier()
"""
REFUSES_TO_END = """
        if strategy.global_rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            try:
                time.sleep(60)
            except BaseException:
                pass
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="system calls are forbidden by seccomp")
@pytest.mark.parametrize("method", [METHODS[0], *METHODS[2:]])
@pytest.mark.parametrize("numbers", [PIDFD, PIDFD[1:]], ids=["neither", "unsent"])
def test_the_first_rank_ends_without_pidfds(
    numbers: tuple[int, ...], method: str, run_script: ScriptRunner
) -> None:
    """Its end is seen while the other rank, which was forked later, works on; that one is killed."""
    job = JOB.replace(BAD, REFUSES_TO_END)
    result = run_script(FORBIDDEN % (numbers, EPERM) + job, method, "bad")
    assert "WorkerKilledError 0 " in result.stdout, result
    assert result.elapsed < 50, result


FORKS = """
    import os
    import sys
    import time

    from rankwise.strategies import DDPStrategy

    def job(strategy, how):
        strategy.barrier()
        if pid := os.fork():
            print("child:", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
        else:
            if how == "exit":
                sys.exit(3)
            if how == "raise":
                raise RuntimeError("the child's own")
            return "child"
        strategy.barrier()
        return "fine"

    if __name__ == "__main__":
        strategy = DDPStrategy(accelerator="cpu", devices=2, start_method=sys.argv[1])
        print(strategy.launch(job, sys.argv[2]))
"""


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("how", "code"), [("exit", 3), ("raise", 1), ("return", 0)])
def test_a_process_that_a_rank_forks(how: str, code: int, method: str, run_script: ScriptRunner) -> None:
    """It ends with its own exit code, and the job goes on."""
    result = run_script(FORKS, method, how)
    assert result.returncode == 0, result
    assert result.stdout.count(f"child: {code}\n") == 2, result
    assert result.stdout.count("fine") == (2 if method == "popen" else 1), result
    assert ("RuntimeError: the child's own" in result.stderr) == (how == "raise"), result


BUSY = """
    import os
    import signal
    import sys
    import threading
    import time

    from rankwise.strategies import DDPStrategy

    def wait():
        print("waiting", flush=True)
        while True:
            time.sleep(0.1)

    def wait_in_except():
        try:
            raise ConnectionError
        except ConnectionError:
            wait()

    def wait_swallowing():
        while True:
            try:
                wait()
            except BaseException:
                pass

    def wait_for_a_reader():
        os.dup2(os.pipe()[1], 1)
        try:
            raise ConnectionError
        except ConnectionError:
            print("x" * 1_000_000, flush=True)

    def job(strategy, how, end):
        strategy.barrier()
        if strategy.global_rank == 0:
            WAITS.get(how, wait)()
        if end == "raise":
            raise ValueError("the cause")
        if end == "exit":
            os._exit(3)
        time.sleep(60)

    WAITS = {"except": wait_in_except, "swallow": wait_swallowing, "print": wait_for_a_reader}

    def main(method, how, end):
        strategy = DDPStrategy(accelerator="cpu", devices=2, start_method=method)
        strategy.launch(job, how, end)

    if __name__ == "__main__":
        method, how, end = sys.argv[1:]
        if how == "blocked":
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        if how == "thread":
            thread = threading.Thread(target=main, args=[method, how, end])
            thread.start()
            thread.join()
        else:
            main(method, how, end)
"""
MAIN_IS_A_RANK = ["popen", *(pytest.param(method, marks=pytest.mark.soak) for method in START_METHODS)]


@pytest.mark.parametrize("method", MAIN_IS_A_RANK)
@pytest.mark.parametrize("how", ["except", "swallow", "thread", "blocked", "print"])
def test_a_rank_that_nothing_interrupts(how: str, method: str, run_script: ScriptRunner) -> None:
    """It is killed; where it is rank 0 in the main process, that prints the cause and ends."""
    result = run_script(BUSY, method, how, "raise")
    assert result.returncode == 1, result
    assert "global_rank=1" in result.stderr, result
    assert "ValueError: the cause" in result.stderr, result


REST = """
    import os
    import time

    from rankwise.strategies import DDPStrategy

    def job(strategy):
        return "fine"

    strategy = DDPStrategy(accelerator="cpu", devices=2, start_method="popen", grace_period_s=0.0)
    strategy.launch(job)
    if not strategy.is_global_zero:
        os._exit(3)
    time.sleep(2)
    print("the rest")
"""


def test_the_rest_of_a_script_in_which_a_rank_ends(run_script: ScriptRunner) -> None:
    """Rank 0 comes to the end of its own; then the failure is reported."""
    result = run_script(REST)
    assert result.stdout == "the rest\n", result
    assert result.returncode == 3, result
    assert "Worker global_rank=1" in result.stderr, result


IN_SHELL = """
    import code
    import time

    from rankwise.strategies import DDPStrategy

    def job(strategy):
        if strategy.global_rank == 1:
            raise ValueError("the cause")
        try:
            raise ConnectionError
        except ConnectionError:
            time.sleep(2)

    def launch():
        DDPStrategy(accelerator="cpu", devices=2, start_method="popen", grace_period_s=0.0).launch(job)

    shell = code.InteractiveConsole({"launch": launch})
    shell.runcode("launch()")
    print("goes on")
"""


def test_a_shell_in_which_rank_0_is_not_interrupted(run_script: ScriptRunner) -> None:
    """A program that outlives errors, as a notebook's kernel does, is not ended: it gets the error late."""
    result = run_script(IN_SHELL)
    assert result.stdout == "goes on\n", result
    assert "ValueError: the cause" in result.stderr, result


INTERRUPTED = """
    import signal
    import time

    from rankwise.strategies import DDPStrategy

    def job(strategy):
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
            raise RuntimeError("after the stop")

    if __name__ == "__main__":
        try:
            strategy = DDPStrategy(accelerator="cpu", devices=2, start_method="popen", grace_period_s=0.2)
            strategy.launch(job)
        except KeyboardInterrupt:
            print("interrupted")
"""


def test_a_main_process_that_saves_after_an_interrupt(run_script: ScriptRunner) -> None:
    """What other ranks raise when they are stopped does not end it."""
    result = run_script(INTERRUPTED)
    assert result.stdout == "saved\ninterrupted\n", result


def test_a_busy_main_process_exits_with_the_code_of_the_rank(run_script: ScriptRunner) -> None:
    """As where the error is raised in it."""
    result = run_script(BUSY, "popen", "swallow", "exit")
    assert result.returncode == 3, result
    assert "exited with code 3" in result.stderr, result


@pytest.mark.parametrize("how", ["except", "swallow"])
def test_a_busy_main_process_that_gets_sigterm(how: str, run_script: ScriptRunner) -> None:
    """It ends after the grace period: no rank is left to wait for."""
    running = run_script.start(BUSY, "popen", how, "wait")
    running.wait_for("waiting")
    running.send_signal(signal.SIGTERM)
    result = running.finish(timeout=60)
    assert result.returncode == 128 + signal.SIGTERM, result


LATE = """
    import threading

    from rankwise.processes.started_process import StartedProcess

    kill = StartedProcess.kill
    StartedProcess.kill = lambda process: threading.Timer(2.0, kill, [process]).start()
"""


def test_a_killed_rank_that_ends_late(run_script: ScriptRunner) -> None:
    """A main process that is no rank waits for its end, as of one with much memory, and raises the error."""
    result = run_script(LATE + BUSY, "fork", "swallow", "raise")
    assert result.returncode == 1, result
    assert "rankwise.errors.WorkerRaisedError: Worker global_rank=1" in result.stderr, result


NO_GRACE = """
    import time

    from rankwise.errors import WorkerError
    from rankwise.strategies import DDPStrategy

    def job(strategy):
        strategy.barrier()
        if strategy.global_rank == 1:
            raise ValueError
        time.sleep(60)

    try:
        DDPStrategy(accelerator="cpu", devices=2, start_method="popen", grace_period_s=0).launch(job)
    except WorkerError as error:
        print("caught", error.global_rank)
"""


def test_a_main_process_without_a_grace_period(run_script: ScriptRunner) -> None:
    """It raises the error of a rank that fails, as it can be interrupted."""
    result = run_script(NO_GRACE)
    assert result.stdout == "caught 1\n", result


HELPER = """
    import subprocess
    import sys

    helper = subprocess.run([sys.executable, "-c", "import rankwise"], capture_output=True, text=True)
    if helper.returncode:
        sys.exit(helper.stderr)
"""


def test_a_program_that_a_script_starts_before_it_imports_rankwise(run_script: ScriptRunner) -> None:
    """The program does not take itself for the rank that has started it."""
    result = run_script(HELPER + JOB, "popen", "good")
    assert result.returncode == 0, result
    assert result.stdout.count("fine") == 2, result


@pytest.mark.parametrize("tries", [1, pytest.param(10, marks=pytest.mark.soak)])
def test_a_script_that_launches_in_a_thread(tries: int, run_script: ScriptRunner) -> None:
    """Python exits only when the threads of the group have ended, whichever thread has launched."""
    program = JOB.replace("if __name__", "import threading\n\n    if __name__").replace(
        "main(sys.argv[1], sys.argv[2])",
        "thread = threading.Thread(target=main, args=sys.argv[1:]); thread.start(); thread.join()",
    )
    for _ in range(tries):
        result = run_script(program, "popen", "good")
        assert result.returncode == 0, result
        assert result.stderr == "", result
