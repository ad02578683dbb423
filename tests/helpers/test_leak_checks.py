"""Each leak check finds what it looks for and restores it."""

import contextlib
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from rankwise.ranks import rank_zero_only
from rankwise.strategies.job import variables_set
from tests.helpers import leak_checks, processes

WRAPPER = DistributedDataParallel  # remembers whose forward is under way


def caught(check: leak_checks.Check) -> str:
    """Return what the check finds, after seeing that its clean-up leaves nothing to find."""
    problems = leak_checks.wait_until_clean([check], timeout_s=0)
    assert check.problems() == []
    return "\n".join(problems)


def test_nothing_is_found_where_nothing_has_changed(tmp_path: Path) -> None:
    """Without a change nothing is reported."""
    assert leak_checks.wait_until_clean(leak_checks.all_checks("nobody", tmp_path, tmp_path)) == []


@pytest.mark.full
def test_the_failure_says_who(monkeypatch: pytest.MonkeyPatch) -> None:
    """The failure names the test or its module, and what was left behind."""
    checks = [leak_checks.Environment()]
    monkeypatch.setenv("RW_PLANTED", "new")
    expected = r"^One of the tests of m\.py \(test_a, test_b\) did not leave .*\n  os.environ\['RW_PLANTED'\]"
    with pytest.raises(pytest.fail.Exception, match=expected):
        leak_checks.fail_if_changed(checks, "One of the tests of m.py (test_a, test_b)")


@pytest.mark.parametrize(("before", "after"), [("before", "changed"), ("before", None), (None, "new")])
def test_a_variable_is_found(before: str | None, after: str | None) -> None:
    """A variable that was changed, taken away or added is reported and restored."""
    with variables_set({} if before is None else {"RW_PLANTED": before}):
        check = leak_checks.Environment()
        os.environ.pop("RW_PLANTED", None)
        os.environ.update({} if after is None else {"RW_PLANTED": after})
        assert f"os.environ['RW_PLANTED'] was {before!r}, is {after!r}" in caught(check)
        assert os.environ.get("RW_PLANTED") == before


def create_group() -> None:
    hook = sys.excepthook
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    sys.excepthook = hook  # torch wraps it


@pytest.mark.parametrize(
    ("kind", "change", "expected"),
    [
        (leak_checks.WorkingDirectory, partial(os.chdir, "/"), r"the working directory was .*'\)"),
        (leak_checks.SignalHandlers, partial(signal.signal, 15, print), "signal 15 was .*print"),
        (leak_checks.ExceptHooks, partial(setattr, sys, "excepthook", print), "sys.excepthook was .*print"),
        (leak_checks.TorchSettings, partial(setattr, WRAPPER, "_active_ddp_module", 7), "wrapper .* is 7"),
        (leak_checks.TorchSettings, partial(torch.set_default_dtype, torch.float64), "dtype of torch .*64"),
        (leak_checks.TorchFunctions, partial(setattr, dist, "all_reduce", print), "d.all_reduce was"),
        (leak_checks.TorchFunctions, partial(setattr, dist.ProcessGroup, "allreduce", print), "p.allreduce"),
        (leak_checks.ProcessGroup, create_group, "default process group was None"),
        (leak_checks.RankZeroOnly, partial(setattr, rank_zero_only, "rank", 7), "_only.rank was .* 7"),
    ],
)
def test_a_setting_is_found(kind: type[Any], change: Callable[[], None], expected: str) -> None:
    """What the process or torch has once is named, and is afterwards what it was."""
    before, check = kind()._values(), kind()
    change()
    assert re.search(expected, caught(check))
    assert kind()._values() == before


def test_a_thread_is_found() -> None:
    """A thread that is no daemon is named."""
    check = leak_checks.Threads()
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name="planted")
    thread.start()
    try:
        assert "thread 'planted' is still running" in caught(check)
    finally:
        release.set()
        thread.join()


def test_a_child_process_is_found() -> None:
    """A child that runs on is named and killed."""
    check = leak_checks.Processes("no-marker")
    code = "print(flush=True); import time; time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()  # until then its command line may be empty
        found = caught(check)
    assert f"pid {child.pid}" in found
    assert "time.sleep(60)" in found


def test_a_child_that_nobody_waited_for_is_found() -> None:
    """A zombie of this process is named."""
    check = leak_checks.Processes("no-marker")
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert "nobody has waited for it" in caught(check)
    child.wait(5)


@pytest.mark.parametrize("way", ["session", "fork"])
def test_an_orphan_is_found(way: str) -> None:
    """A process whose parent has died is found by its marker, or by the page that forks inherit."""
    check = leak_checks.Processes(os.environ[processes.MARKER])
    if way == "session":
        code = (
            "import subprocess; start = subprocess.Popen;"
            "print(start(['sleep', '60'], stdout=subprocess.DEVNULL, start_new_session=True).pid)"
        )
        orphan = int(subprocess.check_output([sys.executable, "-c", code]))
        while not psutil.Process(orphan).environ():  # just after exec it can be empty
            time.sleep(0.01)
    else:
        orphan = _fork_an_orphan()
    assert f"pid {orphan}" in caught(check)


def _fork_an_orphan() -> int:
    """Fork a child that forks a sleeper, and dies; return the sleeper's pid."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        sleeper = os.fork()
        if sleeper == 0:
            signal.pause()
        os.write(writing, str(sleeper).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    sleeper = int(os.read(reading, 100))
    os.close(reading)
    os.close(writing)
    return sleeper


def test_a_listening_socket_is_found() -> None:
    """A socket of this process that listens is named by address and port."""
    check = leak_checks.ListeningSockets()
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert f"127.0.0.1 port {server.getsockname()[1]}" in caught(check)


def test_a_new_file_is_found(tmp_path: Path) -> None:
    """A file in a watched folder is named, a tool's cache is not."""
    check = leak_checks.Files(tmp_path, but=leak_checks.CACHES)
    (tmp_path / ".ruff_cache").mkdir()
    (tmp_path / "planted").touch()
    assert caught(check) == f"new file: {tmp_path / 'planted'}"


@pytest.fixture
def planted() -> Iterator[Path]:
    """Return a path in /dev/shm, which is removed in the end."""
    path = Path(f"/dev/shm/rw_planted_{os.getpid()}")
    yield path
    if path.is_dir():
        path.rmdir()
    path.unlink(missing_ok=True)


# Opens a file while its stdin is open; it prints its pid when it has.
HOLDER = "import os, sys; file = open(sys.argv[1], 'w'); print(os.getpid(), flush=True); sys.stdin.read()"
# Starts such a program which it does not wait for, and in which nothing tells of this process.
STRANGER = """
import os, subprocess, sys
subprocess.Popen([sys.executable, *sys.argv[1:]], env={}, start_new_session=True)
"""


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_shared_memory_segment_is_found(is_ours: bool, planted: Path) -> None:
    """A segment that a child of ours uses is removed; one that another program uses is not reported."""
    check = leak_checks.SharedMemory()
    started = [] if is_ours else ["-c", STRANGER]
    command = [sys.executable, *started, "-c", HOLDER, str(planted)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        user = int(process.stdout.readline())
        if not is_ours:
            process.wait(5)
        assert leak_checks._uses(user, str(planted), planted.stat().st_ino)
        found = caught(check)
    assert (str(planted) in found, planted.exists()) == (is_ours, not is_ours)


@pytest.mark.parametrize("name", ["torch_{}_7_0", "pym-{}-abc"])
def test_a_segment_with_our_number_is_removed(name: str) -> None:
    """A segment that nobody uses any more is this test's if its name says that this process created it."""
    check = leak_checks.SharedMemory()
    path = Path("/dev/shm", name.format(os.getpid()))
    path.touch()
    assert str(path) in caught(check)
    assert not path.exists()


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir])
def test_what_may_be_another_programs_stays(make: Callable[[Path], None], planted: Path) -> None:
    """A segment that nobody uses, and a folder, are reported but not removed."""
    check = leak_checks.SharedMemory()
    make(planted)
    assert str(planted) in caught(check)
    assert planted.is_dir() == (make is Path.mkdir)
    assert planted.exists()


def test_a_semaphore_in_use_is_known() -> None:
    """A semaphore of multiprocessing, which is made under another name, belongs to who has it open."""
    before = set(Path("/dev/shm").iterdir())
    semaphore = multiprocessing.get_context("spawn").Semaphore()
    in_use = []
    for path in set(Path("/dev/shm").iterdir()) - before:
        with contextlib.suppress(FileNotFoundError):  # another process's, which has just removed it
            in_use += [path] * leak_checks._uses(os.getpid(), str(path), path.stat().st_ino)
    assert len(in_use) == 1
    del semaphore
