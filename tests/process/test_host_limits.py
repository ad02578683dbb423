"""Programs in which a job cannot be started, or that use what a job uses, too."""

from __future__ import annotations

import sys

import pytest

from tests.helpers.ports import free_port
from tests.helpers.scripts import ScriptRunner
from tests.process.test_host_programs import ELASTIC, FORBIDDEN, JOB, METHODS, SIGCHLD_IGNORED

REFUSED = JOB.replace("except WorkerError", "except Exception")


PATCHED = """
    import _thread

    started = _thread.start_new_thread

    def start_new_thread(*args, **kwargs):
        return started(*args, **kwargs)

    start_new_thread.__module__ = "gevent.thread"
    _thread.start_new_thread = start_new_thread
"""


@pytest.mark.parametrize("method", [*METHODS, *ELASTIC])
def test_patched_threads(method: str, run_script: ScriptRunner) -> None:
    """What replaces Python's threads is refused by name."""
    job = REFUSED.replace("error.global_rank", "''")
    result = run_script(PATCHED + job, method, "good")
    assert "LaunchRefusedError" in result.stdout, result
    assert "gevent has replaced Python's threads" in result.stdout, result
    assert "start_new_thread() is gevent.thread's" in result.stdout, result


@pytest.mark.parametrize("world_size", [1, 2])
def test_patched_threads_where_ranks_exist(world_size: int, run_script: ScriptRunner) -> None:
    """A rank that another launcher has started refuses them too, unless it is alone."""
    places = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size)}
    env = {**places, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    job = REFUSED.replace("error.global_rank", "''").replace('devices": 2', 'devices": "auto"')
    result = run_script(PATCHED + job, "popen", "good", env=env)
    assert ("gevent has replaced Python's threads" in result.stdout) == (world_size == 2), result
    assert ("fine" in result.stdout) == (world_size == 1), result


FEW_FILES = """
    import contextlib
    import os
    import resource

    import psutil
    import torch

    def held():
        kinds = []
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # that of the listing itself
                kinds.append(os.readlink(f"/proc/self/fd/{name}"))
        return sorted(kinds), psutil.Process().children()

    def limited(spare, method):
        free = [number for number in range(1000) if not os.path.exists(f"/proc/self/fd/{number}")]
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free[spare], before[1]))
        try:
            strategy_of(method).launch(good)
        except Exception as error:
            return f"{type(error).__name__}: {error}".replace("\\n", " ")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        return "fine"

    if __name__ == "__main__":
        method, least, most, step = sys.argv[1], *map(int, sys.argv[2:])
        if method == "popen" and "RANK" not in os.environ:
            options["command"] = [sys.executable, sys.argv[0], "popen", "500", "500", "1"]
        if method != "popen":
            strategy_of(method).launch(good)
        before = held()
        for spare in range(least, most + 1, step):
            outcome = limited(spare, method)
            if spare == 500:
                break  # the other rank of a script
            print(spare, outcome, end="\\n\\n", flush=True)
            if method == "popen" and outcome == "fine":
                break
            assert held() == before, (held(), before)
"""


# The job without pauses, and without the program.
QUICK = JOB.partition("if __name__")[0].replace("range(3)", "range(1)").replace("sleep(0.3)", "sleep(0)")


@pytest.mark.parametrize("method", [*METHODS, *ELASTIC])
def test_too_few_files(method: str, run_script: ScriptRunner) -> None:
    """The limit is named before anything is started, or the job works; nothing is left."""
    result = run_script(QUICK + FEW_FILES, method, "1", "61", "20")
    assert result.returncode == 0, result
    *refused, last = [text for text in result.stdout.split("\n\n") if text.strip()]
    assert refused, result
    for text in refused:
        assert "LaunchRefusedError: The ranks cannot be started: this process may open no more files" in text
        assert "ulimit -n" in text, result
    assert last.split() == ["61", "fine"], result


FEW_PROCESSES = """
    from torch.distributed.launcher import api

    from rankwise.errors import LaunchRefusedError
    from rankwise.processes.fork_safety import import_dynamo

    if __name__ == "__main__":
        import_dynamo()
        before = held()[1]
        forbid(%s, %d)
        try:
            strategy_of(sys.argv[1]).launch(good)
        except LaunchRefusedError as error:
            print(error)
        assert held()[1] == before, (held(), before)
"""
PROCESSES, THREADS = (56, 57, 58), (435,)
EAGAIN, ENOMEM = 11, 12


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="system calls are forbidden by seccomp")
@pytest.mark.parametrize("method", [*METHODS, *ELASTIC])
@pytest.mark.parametrize(
    ("numbers", "error", "problem"),
    [
        (PROCESSES, EAGAIN, "this user may start no more processes or threads"),
        (PROCESSES, ENOMEM, "there is not enough memory for another process"),
        (THREADS, EAGAIN, "this user may start no more processes or threads"),
    ],
    ids=["processes", "memory", "threads"],
)
def test_too_few_processes(
    numbers: tuple[int, ...], error: int, problem: str, method: str, run_script: ScriptRunner
) -> None:
    """The limit is named, and no process is left."""
    program = FORBIDDEN.partition("    forbid(%s")[0] + QUICK + FEW_FILES.partition("    def limited")[0]
    result = run_script(program + FEW_PROCESSES % (numbers, error), method)
    assert result.returncode == 0, result
    assert f"The ranks cannot be started: {problem}" in result.stdout, result


REMOVED = """
    import os
    import tempfile

    import torch

    folder = tempfile.mkdtemp()
    os.chdir(folder)
    os.rmdir(folder)

    import rankwise
"""


@pytest.mark.parametrize("method", [*METHODS, *ELASTIC])
def test_a_working_directory_that_has_been_removed(method: str, run_script: ScriptRunner) -> None:
    """The package can be imported; a launch is refused."""
    result = run_script(REMOVED + REFUSED.replace("error.global_rank", "''"), method, "good")
    assert "LaunchRefusedError" in result.stdout, result
    assert "cannot be started where the working directory has been removed" in result.stdout, result


MOVED = """
    import os
    import sys

    import rankwise

    if __name__ == "__main__":
        os.rmdir(os.getcwd())
        os.chdir(sys.path[0])
"""


@pytest.mark.parametrize("method", [*METHODS, *ELASTIC])
def test_a_program_that_has_left_a_removed_directory(method: str, run_script: ScriptRunner) -> None:
    """It works in another one; a script, which would be run again in the first one, is refused."""
    folder = run_script.folder / "started_in"
    folder.mkdir()
    result = run_script(MOVED + REFUSED.replace("error.global_rank", "''"), method, "good", cwd=folder)
    assert ("LaunchRefusedError" in result.stdout) == (method == "popen"), result
    assert ("the folder that it was started in has been removed" in result.stdout) == (method == "popen")
    assert ("fine" in result.stdout) == (method != "popen"), result


SIGNALS = """
    import signal
    import sys
    import time
    from datetime import timedelta

    import torch

    from rankwise.errors import WorkerError
    from rankwise.strategies import DDPStrategy

    def own(*_):
        print("own handler", flush=True)

    def job(strategy, how):
        if how != "before":
            signal.signal(signal.SIGUSR2, own if how == "handler" else signal.SIG_DFL)
        strategy.barrier()
        if strategy.global_rank == 1:
            if how == "before":
                signal.raise_signal(signal.SIGUSR2)
            time.sleep(20)
        strategy.all_reduce(torch.ones(1))

    if __name__ == "__main__":
        method, how = sys.argv[1:]
        if how == "before":
            signal.signal(signal.SIGUSR2, own)
        try:
            timeout = timedelta(seconds=2)
            DDPStrategy(accelerator="cpu", devices=2, start_method=method, timeout=timeout).launch(job, how)
        except WorkerError as error:
            print(type(error).__name__, error.missing)
"""


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("how", ["handler", "default", "before"])
def test_a_rank_that_handles_sigusr2(how: str, method: str, run_script: ScriptRunner) -> None:
    """The supervisor asks for its stacks by another signal, and the signal reaches the user's handler."""
    result = run_script(SIGNALS, method, how)
    assert "WorkerTimedOutError (1,)" in result.stdout, result
    assert "time.sleep" in result.stderr or ", line" in result.stderr, result
    expected = 0 if how != "before" or method in ("spawn", "forkserver") else 1
    assert result.stdout.count("own handler") == expected, result


FORKS_AFTERWARDS = """
    import multiprocessing
    import os
    import sys

    from rankwise.errors import LaunchRefusedError
    from rankwise.strategies import DDPStrategy

    def job(strategy):
        return "fine"

    def launch():
        try:
            DDPStrategy(accelerator="cpu", devices=2, start_method="popen").launch(job)
        except LaunchRefusedError as error:
            print(error, flush=True)

    strategy = DDPStrategy(accelerator="cpu", devices=2, start_method="popen")
    strategy.launch(job)
    if strategy.global_rank == int(sys.argv[1]):
        child = multiprocessing.get_context("fork").Process(target=launch)
        child.start()
        child.join()
        print("child:", child.exitcode)
        if (pid := os.fork()) == 0:
            sys.exit(3)
        print("child:", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    print(strategy.launch(job))
"""


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_script_that_forks_after_a_job(rank: str, run_script: ScriptRunner) -> None:
    """The child has no part in the script's processes: it may not launch with them, and exits by itself."""
    result = run_script(FORKS_AFTERWARDS, rank)
    assert result.returncode == 0, result
    assert "No job can start in a process that a rank has forked" in result.stdout, result
    assert "child: 0\n" in result.stdout, result
    assert "child: 3\n" in result.stdout, result
    assert result.stdout.count("fine") == 2, result
    assert result.stderr == "", result


LAUNCHES = """
    import gc
    import multiprocessing.process
    import os
    import sys

    from rankwise.strategies import DDPStrategy

    def job(strategy):
        return "fine"

    if __name__ == "__main__":
        strategy = DDPStrategy(accelerator="cpu", devices=2, start_method=sys.argv[1])
        strategy.launch(job)
        gc.disable()
        before = len(os.listdir("/proc/self/fd"))
        strategy.launch(job)
        print(len(os.listdir("/proc/self/fd")) - before, len(multiprocessing.process._children))
"""


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("before", ["", SIGCHLD_IGNORED], ids=["default", "ignored"])
def test_a_launch_leaves_no_descriptors(before: str, method: str, run_script: ScriptRunner) -> None:
    """All are closed at its end, not when garbage is collected, nor kept for a status that nobody knows."""
    result = run_script(before + LAUNCHES, method)
    assert result.stdout == "0 0\n" * (2 if method == "popen" else 1), result
