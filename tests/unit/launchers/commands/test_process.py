"""The process of a rank that was started by a command, whatever the user's object does."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait

import pytest

from rankwise.launchers.commands.process import SupervisedCommand
from rankwise.processes.parent_death import ParentDeathPipe

LIMIT_S = 20.0


class Ended:
    """A process that has ended, or whose end nobody learns."""

    def __init__(self, status: int | Exception | None) -> None:
        self.status = status
        self.may_return = threading.Event()

    def wait(self) -> int | None:
        self.may_return.wait(LIMIT_S)
        if isinstance(self.status, Exception):
            raise self.status
        return self.status

    def kill(self) -> None:
        raise OSError("no route")


@contextmanager
def supervised(process: Ended) -> Iterator[tuple[SupervisedCommand, list[str]]]:
    """Provide the process as the supervisor sees it, and what was cut."""
    cuts: list[str] = []
    command = SupervisedCommand(3, ParentDeathPipe(), lambda: cuts.append("lifeline"))
    command.watch(process)
    try:
        yield command, cuts
    finally:
        process.may_return.set()
        command.close()


@pytest.mark.parametrize(("status", "seen"), [(3, 3), (None, None), (OSError("lost"), None)])
def test_the_end_is_when_wait_returns(
    status: int | Exception | None, seen: int | None, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its descriptor is readable then; an exception of `wait` is reported, and the exit code unknown."""
    process = Ended(status)
    with supervised(process) as (command, cuts):
        assert command.has_memory()
        assert wait([command.fileno()], 0.05) == []
        process.may_return.set()
        assert wait([command.fileno()], LIMIT_S) == [command.fileno()]
        assert (command.wait(), command.has_memory(), cuts) == (seen, False, [])
    assert ("rank=3: wait() raised OSError: lost" in capfd.readouterr().err) == isinstance(status, Exception)


def test_a_kill_without_an_end(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """The lifeline is cut, once, and the supervisor does not wait for ever for a process that stays."""
    monkeypatch.setattr(f"{SupervisedCommand.__module__}._GIVE_UP_S", 0.05)
    with supervised(Ended(0)) as (command, cuts):
        command.kill()
        command.kill()
        assert wait([command.fileno()], LIMIT_S) == [command.fileno()]
        assert (command.wait(), command.was_killed, cuts) == (None, True, ["lifeline"])
    error = capfd.readouterr().err
    assert "kill() raised OSError: no route" in error
    assert "wait() has not returned 0.05 s after kill()" in error


def test_a_rank_that_outlives_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the command has ended, but not the rank's connection, that is closed."""
    monkeypatch.setattr(f"{SupervisedCommand.__module__}._SETTLE_S", 0.05)
    process = Ended(255)
    with supervised(process) as (command, cuts):
        command.is_connected = True
        process.may_return.set()
        assert wait([command.fileno()], LIMIT_S) == [command.fileno()]
        assert (command.wait(), cuts) == (255, ["lifeline"])
