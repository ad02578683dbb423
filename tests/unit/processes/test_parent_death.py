"""What ties the processes of a job to their rank, and what is left of it afterwards: nothing."""

import fcntl
import multiprocessing
import os
import resource
from contextlib import ExitStack
from pathlib import Path

import pytest

from rankwise.processes.parent_death import ParentDeathPipe, children_end_with_parent, end_with_writer


def settings() -> dict[str, object]:
    return dict(vars(multiprocessing.current_process())["_config"])


def test_the_caller_keeps_no_tie() -> None:
    """A `Process` made in the block carries the tie, also in a block within; one made later does not."""
    before = settings()
    with children_end_with_parent():
        opened = set(Path("/proc/self/fd").iterdir())
        with children_end_with_parent():
            assert settings().keys() - before.keys() == {"rankwise"}
            assert set(Path("/proc/self/fd").iterdir()) == opened
        assert "rankwise" in settings()
        made = multiprocessing.get_context("spawn").Process()
    assert "rankwise" in vars(made)["_config"]
    assert settings() == before


def test_a_pipe_without_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel cannot send SIGKILL at end of file it is asked for nothing: the worker reads."""
    asked: list[object] = []
    monkeypatch.delattr(fcntl, "F_SETSIG")
    monkeypatch.setattr(fcntl, "fcntl", lambda *request: asked.append(request))
    pipe = ParentDeathPipe()
    pipe.tie(os.getpid())
    pipe.close()
    assert asked == []


def test_blocks_of_several_threads() -> None:
    """They may end in any order: the last one unties."""
    before = settings()
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(children_end_with_parent())
        second.enter_context(children_end_with_parent())
        first.close()
        assert settings().keys() - before.keys() == {"rankwise"}
    assert settings() == before


def test_a_process_with_many_open_files() -> None:
    """Its descriptors may be 1024 and more, as with a DataLoader's tensors; `select.select` refuses those."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < 2048:
        pytest.skip(f"a process may have {most} open files")
    read_end, write_end = os.pipe()
    if not (pid := os.fork()):
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (2048, most))
            for _ in range(1024):
                os.dup(read_end)
            end_with_writer(read_end)
            os._exit(0)
        finally:
            os._exit(2)
    status = os.waitpid(pid, 0)[1]
    os.close(read_end)
    os.close(write_end)
    assert os.waitstatus_to_exitcode(status) == 0
