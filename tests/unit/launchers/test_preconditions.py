"""What makes a launch impossible is refused by name; other errors are left as they are."""

import errno
import re
import socket
from pathlib import Path

import pytest

from rankwise.errors import LaunchRefusedError
from rankwise.launchers.preconditions import refuse_patched_threads, refuse_removed_directory, shortages_named
from tests.helpers.own_process import few_files


@pytest.mark.parametrize(
    ("error", "problem", "remedy"),
    [
        (OSError(errno.EMFILE, ""), "this process may open no more files", "ulimit -n 4096."),
        (OSError(errno.ENFILE, ""), "the machine can open no more files", "sysctl fs.file-max=1000000."),
        (OSError(errno.EAGAIN, ""), "this user may start no more processes", "ulimit -u 4096."),
        (OSError(errno.ENOMEM, ""), "not enough memory", "set devices to fewer."),
        (RuntimeError("can't start new thread"), "this user may start no more processes", "ulimit -u 4096."),
    ],
)
def test_shortages(error: Exception, problem: str, remedy: str) -> None:
    """Each has its remedy."""
    with pytest.raises(LaunchRefusedError, match=problem) as refused, shortages_named(1):
        raise error
    assert f"Fix: {remedy}" in str(refused.value)


@pytest.mark.parametrize("error", [OSError(errno.EACCES, "denied"), RuntimeError("of the user's")])
def test_other_errors_of_a_launch(error: Exception) -> None:
    """They are raised as they are."""
    with pytest.raises(type(error)) as raised, shortages_named(1):
        raise error
    assert raised.value is error


def test_files_are_counted_before_anything_starts() -> None:
    """More ranks need more files; what is opened for that is closed again."""
    with few_files(64) as free:
        with shortages_named(1):
            assert not Path(f"/proc/self/fd/{free[0]}").exists()
        with pytest.raises(LaunchRefusedError, match="RLIMIT_NOFILE"), shortages_named(9):
            pytest.fail("the block has begun")


@pytest.mark.usefixtures("removed_directory")
def test_a_directory_that_has_been_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks could not inherit it."""
    with pytest.raises(LaunchRefusedError, match="working directory has been removed"):
        refuse_removed_directory()
    monkeypatch.chdir(tmp_path)
    refuse_removed_directory()


@pytest.mark.parametrize("patcher", ["gevent._socket3", "eventlet.green.socket", None, "geventual.socket"])
def test_patched_sockets(monkeypatch: pytest.MonkeyPatch, patcher: str | None) -> None:
    """The module that has replaced them is named; other replacements are no problem."""
    if patcher is not None:
        monkeypatch.setattr(socket, "socket", type("socket", (), {"__module__": patcher}))
    if patcher is None or patcher.startswith("geventual"):
        refuse_patched_threads()
        return
    text = re.escape(f"socket() is {patcher}'s")
    with pytest.raises(LaunchRefusedError, match=f"{patcher.partition('.')[0]} has replaced(.|\n)*{text}"):
        refuse_patched_threads()
