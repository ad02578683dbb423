"""Stragglers among ranks that no supervisor sees together are reported by rank zero."""

import json
import os
import time
from collections.abc import Callable

import pytest
import torch.distributed as dist

from rankwise.monitoring.heartbeat import (
    NO_FILE,
    HeartbeatReader,
    MonitoredRank,
    heartbeat_written_to,
    report_phase,
)
from rankwise.monitoring.stragglers import LocalStragglerMonitor, StragglerMonitor
from rankwise.ranks import RankInfo
from rankwise.stores.rendezvous import RankIdentity

IDENTITIES = [RankIdentity(rank, 0, rank, 2, "ab"[rank], 100 + rank) for rank in range(2)]


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Set the clock forward, by more than a loaded machine takes."""
    real, passed = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: real() + sum(passed))
    return passed.append


def test_who_lags_is_reported_while_it_does(
    capfd: pytest.CaptureFixture[str], pass_time: Callable[[float], None]
) -> None:
    """With identity and phase, once in each interval, by rank zero alone; not when it goes on."""
    store = dist.HashStore()
    watches = [StragglerMonitor(IDENTITIES, identity, warn_after_s=60.0) for identity in IDENTITIES]
    with heartbeat_written_to(NO_FILE):
        report_phase("data loading", step=7)
        watches[1].look(store)
        report_phase("backward", step=7, waits=True)
        watches[0].look(store)
        pass_time(61.0)
        watches[0].look(store)
        watches[0].look(store)
        [line] = capfd.readouterr().err.splitlines()
        assert line.startswith(
            "rankwise: global_rank 1 (node 1, host 'b', pid 101) was last in step 7, data loading"
        )
        assert (
            "The others wait: global_rank 0 (node 0, host 'a', pid 100) was last in step 7, backward" in line
        )
        report_phase("backward", step=7, waits=True)
        watches[1].look(store)
        watches[0].look(store)
    assert capfd.readouterr().err == ""


def test_a_rank_that_writes_nothing_new_is_where_it_was(
    capfd: pytest.CaptureFixture[str], pass_time: Callable[[float], None]
) -> None:
    """A suspended rank ages by rank zero's clock; one that no rank waits for is not reported."""
    store = dist.HashStore()
    store.set("heartbeat/1", json.dumps([1, 3, 0.0, False, "forward"]))
    watch = StragglerMonitor(IDENTITIES, IDENTITIES[0], warn_after_s=60.0)
    with heartbeat_written_to(NO_FILE):
        for waits in (False, True):
            report_phase("barrier" if waits else "running", step=3, waits=waits)
            watch.look(store)
            pass_time(61.0)
            watch.look(store)
            assert ("rankwise: global_rank 1 (node 1" in capfd.readouterr().err) is waits


@pytest.mark.parametrize(
    ("waits", "is_supervised", "is_reported"),
    [(0, True, False), (0, False, True), (2, True, True)],
    ids=["here, supervised", "here", "on another node"],
)
def test_what_the_supervisor_reports_is_not_told_twice(
    capfd: pytest.CaptureFixture[str], waits: int, is_supervised: bool, is_reported: bool
) -> None:
    """A supervisor sees its own node alone: a straggler for ranks of other nodes is rank zero's to report."""
    store = dist.HashStore()
    identities = [RankIdentity(rank, rank % 2, rank // 2, 3, "aab"[rank], 100 + rank) for rank in range(3)]
    for rank in (0, 1, 2):
        phase = "barrier" if rank == waits else "running"
        store.set(f"heartbeat/{rank}", json.dumps([1, 3, 5.0 * (rank == 1), rank == waits, phase]))
    StragglerMonitor(identities, identities[0], warn_after_s=1.0, is_supervised=is_supervised).look(store)
    assert ("rankwise: global_rank 1 (node 0" in capfd.readouterr().err) is is_reported


def test_a_supervisor_names_all_ranks_that_wait(
    capfd: pytest.CaptureFixture[str], pass_time: Callable[[float], None]
) -> None:
    """However many ranks its node has."""
    workers = []
    for rank in range(16):
        descriptor = os.memfd_create("heartbeat")
        workers.append(MonitoredRank(RankInfo(rank, rank, 0, 16, 16, 1), None, HeartbeatReader(descriptor)))
        with heartbeat_written_to(descriptor):
            report_phase("backward", step=7, waits=rank > 0)
        os.close(descriptor)
    monitor = LocalStragglerMonitor(workers, warn_after_s=60.0)
    pass_time(61.0)
    monitor.look()
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith("rankwise: global_rank=0 was last in step 7, backward")
    assert all(f"global_rank={rank} was last" in line for rank in range(1, 16))
