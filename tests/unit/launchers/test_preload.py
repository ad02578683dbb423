"""What the forkserver does before it forks and when it ends; in any other process nothing happens."""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankwise.launchers.preload import enable_interrupts, exit_when_idle, freeze_objects


@pytest.fixture(autouse=True)
def _unfrozen() -> Iterator[None]:
    yield
    gc.unfreeze()


@pytest.mark.parametrize("is_killed", [True, False])
def test_the_server_ends_with_the_main_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_killed: bool
) -> None:
    """It exits with code 0; it removes the folder of its socket where the main process cannot."""
    monkeypatch.setattr("rankwise.launchers.preload._PARENT_ENDS_S", 0.01)
    main_process = 1 if is_killed else os.getpid()
    if (pid := os.fork()) == 0:
        exit_when_idle(os.getpid(), main_process, tmp_path)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert tmp_path.exists() != is_killed


def test_only_the_server_ends_so_and_freezes_its_objects(tmp_path: Path) -> None:
    """A process that it has forked inherits the exit hook, and goes on; its own objects stay as they are."""
    exit_when_idle(os.getppid(), main_process=1, folder=tmp_path)
    assert tmp_path.exists()
    freeze_objects(os.getppid())
    assert gc.get_freeze_count() == 0
    freeze_objects(os.getpid())
    assert gc.get_freeze_count() > 0


@pytest.mark.parametrize("name", ["Process-1", "rankwise-0"])
def test_interrupts_of_forked_processes(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """They are unblocked in processes that are no ranks, which have a handler of their own first."""
    monkeypatch.setattr("multiprocessing.current_process", lambda: type("Process", (), {"name": name}))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        enable_interrupts(None)
        is_blocked = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert is_blocked == name.startswith("rankwise-")
