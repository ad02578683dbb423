"""Agreeing that all ranks have changed something, in groups that overlap."""

import weakref
from datetime import timedelta

import pytest
import torch.distributed as dist

from rankwise.errors import RankMismatchError
from rankwise.monitoring.rank_monitor import PollingMonitor
from rankwise.process_group.step_agreement import ChangeAgreement
from tests.helpers.threaded import run_ranks

TIMEOUT = timedelta(seconds=5)


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
