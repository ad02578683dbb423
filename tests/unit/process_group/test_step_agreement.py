"""Agreeing to stop, and on changes: threads of this process stand for ranks, with a store in memory."""

import random
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from rankwise.errors import RankMismatchError, StopAgreementError
from rankwise.monitoring.rank_monitor import PollingMonitor
from rankwise.process_group.step_agreement import ChangeAgreement, StopAgreement
from rankwise.ranks import RankInfo
from tests.helpers.threaded import run_ranks

TIMEOUT = timedelta(seconds=20)


def started(rank: int, world_size: int, store: dist.Store, timeout: timedelta = TIMEOUT) -> StopAgreement:
    """Return a rank's agreement over `store`, started."""
    ranks = RankInfo(rank, rank, 0, world_size, world_size, 1)
    agreement = StopAgreement(ranks, PollingMonitor(rank, world_size, store, lambda: store), timeout)
    agreement.start()
    return agreement


def close(agreement: StopAgreement) -> None:
    """End a rank's agreement, and its monitor."""
    agreement.close()
    assert agreement.monitor is not None
    agreement.monitor.close()


def train(agreement: StopAgreement, steps: int, act: Callable[[int], None]) -> tuple[int, bool]:
    """Take up to `steps` steps; return how many, and whether all ranks have stopped."""
    for step in range(steps):
        if not agreement.begin_step():
            return step, True
        act(step)
    return steps, agreement.finish()


def in_threads(count: int, run: Callable[[int], None]) -> None:
    """Call a function with each rank at once, and wait until all have ended."""
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)


def together(
    world_size: int, steps: int, act: Callable[[StopAgreement, int, int], None]
) -> tuple[list[tuple[int, bool]], list[StopAgreement]]:
    """Run all ranks at once; `act` gets the agreement, the rank and the step."""
    store = dist.HashStore()
    workers = [started(rank, world_size, store) for rank in range(world_size)]
    ends: list[tuple[int, bool]] = [(-1, False)] * world_size

    def run(rank: int) -> None:
        ends[rank] = train(workers[rank], steps, lambda step: act(workers[rank], rank, step))
        close(workers[rank])

    in_threads(world_size, run)
    return ends, workers


def test_without_a_request() -> None:
    """Without a request every rank comes to its end, and no thread is left."""
    ends, workers = together(3, 50, lambda agreement, rank, step: None)
    assert ends == [(50, False)] * 3
    assert [each.reason for each in workers] == [None] * 3
    assert not [thread for thread in threading.enumerate() if thread.name == "rankwise-monitor"]


@pytest.mark.parametrize("asking", [[0], [1], [0, 1, 2]])
def test_all_stop_after_the_same_step(asking: list[int]) -> None:
    """One rank or all ask in step 20; nobody begins a step that another does not; all name one reason."""

    def act(agreement: StopAgreement, rank: int, step: int) -> None:
        time.sleep(0.001)
        if rank in asking and step == 20:
            agreement.request(f"reason of {rank}")

    ends, workers = together(3, 4000, act)
    stops = {end for end, _ in ends}
    assert len(stops) == 1, ends
    assert all(has_stopped for _, has_stopped in ends)
    assert 21 <= stops.pop() < 4000
    [reason] = {each.reason for each in workers}
    assert reason in [f"reason of {rank}" for rank in asking]


def test_a_request_of_all_ranks_in_one_step() -> None:
    """Where every rank asks in the same step, as with early stopping, that step is the last."""

    def act(agreement: StopAgreement, rank: int, step: int) -> None:
        time.sleep(random.random() / 100)
        if step == 5:
            agreement.request("early")

    assert together(3, 100, act)[0] == [(6, True)] * 3


def test_a_request_near_the_end_is_for_all_or_for_none() -> None:
    """Whether a request still comes before the end of the loop is a race, but one outcome for all ranks."""
    for repetition in range(60):

        def act(agreement: StopAgreement, rank: int, step: int, when: int = repetition) -> None:
            if rank == when % 3 and step == 29 - when % 4:
                agreement.request("late")

        ends, workers = together(3, 30, act)
        assert len(set(ends)) == 1, ends
        assert len({each.reason for each in workers}) == 1


def _train_in_parts(agreement: StopAgreement, rank: int, chance: random.Random, asks_at: int) -> list[int]:
    """Take steps with parts, fewer on some ranks, until all stop; return what was begun, step by step."""
    begun, count = [0], 0

    def may(is_allowed: bool) -> bool:
        nonlocal count
        count += is_allowed
        if count == asks_at:
            agreement.request(f"signal {rank}")
        return is_allowed

    while True:
        if not may(agreement.begin_step()):
            return begun
        begun.append(0)
        for _ in range(chance.randrange(4)):
            if not may(agreement.begin_part()):
                return begun
            begun[-1] += 1
            time.sleep(chance.random() / 500)
        if not may(agreement.end_parts()):
            return begun
        begun[-1] = -1  # all of them


@pytest.mark.parametrize("repetitions", [12, pytest.param(40, marks=pytest.mark.soak)])
def test_steps_in_parts(repetitions: int) -> None:
    """Ranks have different numbers of parts; all stop in the same step, in the middle of it or at its end."""
    for repetition in range(repetitions):
        store = dist.HashStore()
        workers = [started(rank, 3, store) for rank in range(3)]
        ends: list[list[int]] = [[]] * 3

        def run(rank: int, number: int = repetition, each: Any = workers, into: Any = ends) -> None:
            asks_at = 10 + number if rank == number % 3 else -1
            into[rank] = _train_in_parts(each[rank], rank, random.Random(number * 3 + rank), asks_at)
            close(each[rank])

        in_threads(3, run)
        assert len({(len(begun), begun[-1] == -1) for begun in ends}) == 1, ends


def test_alone() -> None:
    """A single rank needs no other: no thread, no store."""
    agreement = StopAgreement(RankInfo(), None, TIMEOUT)
    agreement.start()
    assert agreement.begin_step()
    agreement.request("enough")
    assert not agreement.begin_step()
    assert agreement.reason == "enough"


def test_a_silent_rank_is_named() -> None:
    """A rank that never answers is named by those that wait for it."""
    store = dist.HashStore()
    first = started(0, 2, store, timedelta(seconds=0.2))
    first.request("enough")
    with pytest.raises(StopAgreementError, match="global_rank 1 did not say"):
        first.begin_step()
    close(first)


def test_a_rank_whose_loop_has_failed_has_answered() -> None:
    """A later request waits for no answer of it: its own loop goes on until a collective fails."""
    store = dist.HashStore()
    failed, other = (started(rank, 2, store) for rank in range(2))
    assert failed.begin_step()
    assert other.begin_step()
    close(failed)
    other.request("SIGTERM")
    began_s = time.monotonic()
    assert other.begin_step()
    assert time.monotonic() - began_s < TIMEOUT.total_seconds() / 2
    assert not other.finish()
    close(other)


def test_groups_with_the_same_first_rank() -> None:
    """Ranks agree in each group that they are in, in whatever order they have joined the groups."""

    def run(rank: int) -> None:
        pair = dist.new_group([0, 1])
        agreements = [ChangeAgreement(dict, pair, TIMEOUT)] if rank < 2 else []
        agreements.append(ChangeAgreement(dict, None, TIMEOUT))
        for agreement in agreements:
            agreement.begin_step(True)

    run_ranks(3, run)


def test_different_changes() -> None:
    """Every rank of the group has the error, which names what differs."""

    def run(rank: int) -> str:
        agreement = ChangeAgreement(lambda: {"parameter": f"frozen {rank == 1}"}, None, TIMEOUT)
        with pytest.raises(RankMismatchError) as caught:
            agreement.begin_step(True)
        return str(caught.value)

    assert all("parameter" in text and "frozen True" in text for text in run_ranks(2, run))


def test_a_monitor_keeps_no_agreement() -> None:
    """An agreement ends with its module, of which a job may have many, and the monitor forgets it."""

    def run(rank: int) -> None:
        store = dist.HashStore()
        monitor = PollingMonitor(rank, 2, store, lambda: store)
        agreement = ChangeAgreement(dict, None, TIMEOUT, monitor)
        gone = weakref.ref(agreement)
        del agreement
        assert gone() is None
        assert not monitor._subscribers
        monitor.close()

    run_ranks(2, run)
