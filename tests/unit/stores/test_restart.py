"""The ranks of a restart agree on its number in a store with the keys of earlier ones; each in a thread."""

import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from rankwise.errors import ProcessGroupError, RendezvousTimeoutError
from rankwise.ranks import RankInfo
from rankwise.stores.rendezvous import RestartInfo, agree_on_restart
from tests.helpers.raising import raises

LONG, SHORT = timedelta(seconds=20), timedelta(milliseconds=200)


def ranks(rank: int, size: int) -> RankInfo:
    return RankInfo(rank, rank, 0, size, size, 1)


def start(store: dist.Store, size: int, *, pause_s: float = 0.0) -> set[RestartInfo]:
    """Let all ranks agree, rank 0 later than the others by `pause_s`; return what each has agreed on."""
    with ThreadPoolExecutor(size) as pool:
        others = [pool.submit(agree_on_restart, store, ranks(rank, size), LONG) for rank in range(1, size)]
        time.sleep(pause_s)
        return {agree_on_restart(store, ranks(0, size), LONG), *(other.result() for other in others)}


def test_all_starts_of_a_job_have_its_name() -> None:
    """They are numbered from 0, and another job's store gives another name."""
    store = dist.HashStore()
    starts = [start(store, size) for size in (3, 3, 1, 2)]
    assert [len(agreed) for agreed in starts] == [1] * 4
    assert [agreed.pop().number for agreed in starts] == list(range(4))
    [first], [other] = start(store, 2), start(dist.HashStore(), 2)
    assert (first.number, other.number) == (4, 0)
    assert first.job != other.job
    assert start(store, 2) == {RestartInfo(5, first.job)}


@pytest.mark.parametrize("size", [2, 3])
def test_who_comes_before_rank_zero_waits_for_it(size: int) -> None:
    """The keys of an earlier, complete start are not mistaken for the present one's."""
    store = dist.HashStore()
    start(store, 3)
    [agreed] = start(store, size, pause_s=0.1)
    assert agreed.number == 1


def test_a_start_that_was_never_complete() -> None:
    """A rank that comes later does not complete it: that start's rank 0 has ended."""
    store = dist.HashStore()
    with pytest.raises(RendezvousTimeoutError, match=r"global_rank 1 to come .*here are global_rank 0"):
        agree_on_restart(store, ranks(0, 2), SHORT)
    [agreed] = start(store, 2, pause_s=0.1)
    assert agreed.number == 1


def test_who_does_not_come_is_named() -> None:
    """By a rank other than 0, too, whether rank 0 is there or not."""
    store = dist.HashStore()
    with pytest.raises(RendezvousTimeoutError, match=r"global_rank 0, 2 to come .*here are global_rank 1"):
        agree_on_restart(store, ranks(1, 3), SHORT)
    failures: list[Future[RestartInfo]] = []
    limit = timedelta(seconds=1)  # in which both come
    with ThreadPoolExecutor(2) as pool:
        failures = [pool.submit(agree_on_restart, store, ranks(rank, 3), limit) for rank in range(2)]
    for failure in failures:
        raises(RendezvousTimeoutError, "global_rank 2 to come", failure.result)


def test_one_too_many() -> None:
    """A rank that was started twice is an error where the start is complete without it."""
    store = dist.HashStore()
    start(store, 2)
    raises(ProcessGroupError, "a rank was started twice", agree_on_restart, store, ranks(1, 2), SHORT)


def test_again_and_again() -> None:
    """In whatever order ranks come, with one lost in every other start, no two starts mix."""
    store = dist.HashStore()
    for number in range(0, 40, 2):
        lost = [threading.Thread(target=_comes_in_vain, args=(store, rank)) for rank in (0, 2)]
        for thread in lost:
            thread.start()
        for thread in lost:
            thread.join()
        assert {agreed.number for agreed in start(store, 3, pause_s=0.002 * (number % 3))} == {number + 1}


def _comes_in_vain(store: dist.Store, rank: int) -> None:
    # The latter where its rank 0 has not come in these few milliseconds: the start before was complete.
    with pytest.raises((RendezvousTimeoutError, ProcessGroupError)):
        agree_on_restart(store, ranks(rank, 3), timedelta(milliseconds=5))


class _Lone:
    """A rank that is alone, under an agent that makes a folder for each start."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder, self._store, self._starts = folder / "attempt_0", dist.HashStore(), 0
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(self._folder / "0" / "error.json"))

    def start(self, processes: int) -> list[RestartInfo]:
        """Start its worker; return what its processes agree on, one after another."""
        self._folder.mkdir(exist_ok=True)
        self._starts += 1
        os.utime(self._folder, (self._starts, self._starts))
        return [agree_on_restart(self._store, ranks(0, 1), LONG) for _ in range(processes)]


def test_a_lone_rank_is_known_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its starts are counted, also those that its agent does not count, and have one job."""
    lone = _Lone(tmp_path, monkeypatch)
    starts = [lone.start(1)[0] for _ in range(3)]
    assert [start.number for start in starts] == [0, 1, 2]
    assert len({start.job for start in starts}) == 1
    assert starts[0].job


def test_several_processes_of_a_lone_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They belong to one start, and those of the next one resume no job."""
    lone = _Lone(tmp_path, monkeypatch)
    first, second, third = lone.start(3)
    assert first.job
    assert (first.number, second, third) == (0, RestartInfo(), RestartInfo())
    assert lone.start(2) == [RestartInfo(1), RestartInfo(1)]


def test_where_the_agent_keeps_no_error_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an error file a lone rank has its agent's count."""
    store = dist.HashStore()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert agree_on_restart(store, ranks(0, 1), LONG).job
    assert agree_on_restart(store, ranks(0, 1), LONG) == RestartInfo()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert agree_on_restart(store, ranks(0, 1), LONG) == RestartInfo(1)
