"""The launcher that starts nothing: values, failures, and what continues between two jobs."""

import socket
from dataclasses import replace

import pytest

from rankwise.errors import LaunchRefusedError
from rankwise.launchers import inline
from rankwise.launchers.context import WorkerContext
from rankwise.launchers.inline import InlineLauncher
from rankwise.monitoring.heartbeat import own_heartbeat
from rankwise.ranks import RankInfo
from tests.helpers.raising import raises

ONE = InlineLauncher(RankInfo())
OTHERS = InlineLauncher(RankInfo(1, 1, 0, 2, 2, 1), ("127.0.0.1", 29500), store_outlives=True)


@pytest.fixture(autouse=True)
def _first_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start each test as if this process had run no job."""
    monkeypatch.setattr(inline, "_has_last_succeeded", False)


def fail(worker: WorkerContext) -> None:
    raise ValueError("loss is nan")


@pytest.mark.parametrize("launcher", [ONE, OTHERS])
def test_the_value_is_that_of_this_rank(launcher: InlineLauncher) -> None:
    """By its global rank; there is a heartbeat in the meantime where other ranks may ask for it."""
    seen: list[tuple[WorkerContext, bool]] = []

    def entry(worker: WorkerContext) -> str:
        seen.append((worker, own_heartbeat() is not None))
        return "value"

    assert launcher.launch(entry, {}, "private") == {launcher.ranks.global_rank: "value"}
    [(worker, has_heartbeat)] = seen
    assert (worker.ranks, worker.address, worker.store_outlives) == (
        launcher.ranks,
        launcher.address,
        launcher.store_outlives,
    )
    assert has_heartbeat == launcher.has_other_ranks == (launcher is OTHERS)
    assert own_heartbeat() is None


def test_patched_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """What replaces Python's threads is refused by a rank that another launcher has started, if not alone."""
    monkeypatch.setattr(socket, "socket", type("socket", (), {"__module__": "gevent._socket3"}))
    assert ONE.launch(lambda _: "value", {}, "private") == {0: "value"}
    with pytest.raises(LaunchRefusedError, match="gevent has replaced Python's threads"):
        OTHERS.launch(lambda _: "value", {}, "private")


def test_jobs_are_counted() -> None:
    """Keys of two jobs in the one store of the launcher around do not meet."""
    first = ONE.launch(lambda worker: worker.job, {}, "private")[0]
    assert replace(ONE).launch(lambda worker: worker.job, {}, "private") == {0: first + 1}


def test_a_failure_is_raised() -> None:
    """As it is: this process is the rank."""
    raises(ValueError, "loss is nan", OTHERS.launch, fail, {}, "private")
    assert own_heartbeat() is None


def test_what_continues_between_two_jobs() -> None:
    """A rank of several whose last job has succeeded, and that knows its store."""
    launchers = [ONE, OTHERS, replace(OTHERS, address=None)]
    assert [each.context_between_jobs() for each in launchers] == [None, None, None]
    OTHERS.launch(lambda worker: None, {}, "private")
    assert [each.context_between_jobs() is None for each in launchers] == [True, False, True]
    context = OTHERS.context_between_jobs()
    assert context is not None
    assert (context.address, context.job) == (OTHERS.address, 0)
    raises(ValueError, "loss is nan", OTHERS.launch, fail, {}, "private")
    assert OTHERS.context_between_jobs() is None
