"""A launch by multiprocessing, up to the first process: what is refused; and how values come back."""

import multiprocessing.process
import sys
import threading
import time
from contextlib import ExitStack
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

import pytest
import torch

from rankwise.errors import LaunchRefusedError, NotPicklableError, WorkerRaisedError
from rankwise.failures.record import FailureRecord
from rankwise.launchers import multiprocess
from rankwise.launchers.context import WorkerContext
from rankwise.launchers.multiprocess import (
    MultiprocessLauncher,
    create_job,
    refuse_where_impossible,
    returned_values,
)
from rankwise.processes.memory_file import Descriptor, owned_descriptor, pack
from rankwise.ranks import RankInfo
from tests.unit.launchers.supervised import OPTIONS, Supervise

RANK = FailureRecord(1, 1, 0, 17, at_s=0.0)


def entry(worker: WorkerContext) -> int:
    return worker.ranks.global_rank


def test_where_processes_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a plain process by any start method; not in a daemon, as a DataLoader's worker, or an import."""
    for start_method in ("spawn", "fork", "forkserver"):
        refuse_where_impossible(start_method)
    process: Any = multiprocessing.process.current_process()
    with monkeypatch.context() as patch:
        patch.setitem(process._config, "daemon", True)
        with pytest.raises(LaunchRefusedError, match="start_method='fork' cannot work in a daemon"):
            refuse_where_impossible("fork")
    monkeypatch.setattr(process, "_inheriting", True, raising=False)  # each worker would launch again
    with pytest.raises(LaunchRefusedError, match="while the main module was still being imported"):
        refuse_where_impossible("spawn")


def test_a_fork_after_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA does not survive a fork; a new interpreter begins afresh."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    refuse_where_impossible("spawn")
    with pytest.raises(LaunchRefusedError, match="CUDA is initialised in this process already"):
        refuse_where_impossible("fork")


def main_module(file: str | None, *, has_spec: bool = False) -> ModuleType:
    """Return a main module: of a script, of `-m`, or of what no other process can import."""
    module = ModuleType("__main__")
    if file is not None:
        module.__file__ = file
    module.__spec__ = ModuleSpec("module", None) if has_spec else None
    return module


def defined_in_main(worker: WorkerContext) -> None:
    """Do nothing; the test makes it one of `__main__`."""


@pytest.mark.parametrize(
    ("main", "is_refused"),
    [
        (main_module(None), True),
        (main_module("<stdin>"), True),
        (main_module(__file__), False),
        (main_module(None, has_spec=True), False),
    ],
    ids=["notebook", "stdin", "script", "module"],
)
@pytest.mark.parametrize("is_of_main", [True, False])
def test_what_workers_cannot_import(
    monkeypatch: pytest.MonkeyPatch, main: ModuleType, is_refused: bool, is_of_main: bool
) -> None:
    """A function of a main module that only this process has is refused; one of another module never is."""
    if is_of_main:
        monkeypatch.setattr(defined_in_main, "__module__", "__main__")
    main.defined_in_main = defined_in_main  # type: ignore[attr-defined]  # as a notebook defines it
    with monkeypatch.context() as patch, ExitStack() as cleanup:
        patch.setitem(sys.modules, "__main__", main)
        if is_refused and is_of_main:
            with pytest.raises(
                LaunchRefusedError, match="cannot find what a notebook, a shell or -c defines"
            ):
                create_job("spawn", defined_in_main, {}, cleanup)
        else:
            create_job("spawn", defined_in_main, {}, cleanup)


def test_what_a_new_interpreter_gets() -> None:
    """The function is packed; it inherits the environment."""
    with ExitStack() as cleanup:
        job = create_job("spawn", entry, {}, cleanup)
        assert isinstance(job.entry, Descriptor)
        assert job.run(WorkerContext(RankInfo(1, 1, 0, 2, 2, 1))) == 1
        assert job.environ is None


def test_what_cannot_be_pickled() -> None:
    """The part is named as the caller describes it."""
    with ExitStack() as cleanup, pytest.raises(NotPicklableError, match="the model"):
        described = {"the model": lambda: None}
        create_job("spawn", lambda worker: described, described, cleanup)


def fail() -> NoReturn:
    raise ValueError("not here")


class FailsToUnpickle:
    """A value that cannot be read in the launching process."""

    def __reduce__(self) -> tuple[object, ...]:
        return fail, ()


def test_a_value_comes_back() -> None:
    """Also None."""
    with ExitStack() as cleanup:
        for value in ([1, "two"], None):
            file = owned_descriptor(cleanup)
            pack(value, file.number)
            assert returned_values([RANK], [file], time.monotonic()) == {1: value}


def test_a_value_that_cannot_be_read_is_its_ranks_failure() -> None:
    """The error names the rank, and what unpickling has raised."""
    with ExitStack() as cleanup, pytest.raises(WorkerRaisedError, match="global_rank=1 ") as raised:
        file = owned_descriptor(cleanup)
        pack(FailsToUnpickle(), file.number)
        returned_values([RANK], [file], time.monotonic())
    assert raised.value.exception_type == "ValueError"
    assert raised.value.exception_message == "what it returned cannot be unpickled: not here"
    assert (raised.value.stopped, raised.value.consequences) == ((), ())


def test_other_nodes_are_other_ranks() -> None:
    """Of a job on one node all ranks are started here."""
    assert not MultiprocessLauncher("fork", (RankInfo(0, 0, 0, 2, 2, 1),), OPTIONS).has_other_ranks
    assert MultiprocessLauncher("fork", (RankInfo(0, 0, 0, 2, 1, 2),), OPTIONS).has_other_ranks


def test_jobs_of_daemon_threads(supervise: Supervise, monkeypatch: pytest.MonkeyPatch) -> None:
    """They end with the program, as by SIGTERM; the threads are waited for."""
    job = supervise().begin()
    thread = threading.Thread(target=time.sleep, args=(0.5,))  # it leaves late
    thread.start()
    monkeypatch.setitem(multiprocess._supervisors, job.supervisor, thread)
    multiprocess._end_jobs()
    assert not thread.is_alive()
    with pytest.raises(SystemExit) as ended:
        job.supervisor.wait_job()
    assert ended.value.code == 143
    assert job.supervisor.all_ended()
