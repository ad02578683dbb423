"""The workers of a launching process, whatever starts them: what they get, and what is closed after them."""

from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from rankwise.launchers.context import WorkerContext
from rankwise.launchers.worker_group import WorkerGroup, WorkerLinks
from rankwise.ranks import RankInfo
from rankwise.stores.tcp import RendezvousEndpoint, forget_store
from tests.helpers.ports import free_port
from tests.unit.launchers.supervised import GONE, OPTIONS, ScriptedProcess

RANKS = tuple(RankInfo(number, number, 0, 2, 2, 1) for number in range(2))


class Starter:
    """Start stand-ins for processes: as many as are asked for, then fail."""

    def __init__(self, count: int) -> None:
        self.workers: list[WorkerContext] = []
        self.links: list[WorkerLinks] = []
        self.processes: list[ScriptedProcess] = []
        self._count = count

    def __call__(self, worker: WorkerContext, links: WorkerLinks) -> ScriptedProcess:
        self.workers.append(worker)
        self.links.append(links)
        if len(self.processes) == self._count:
            raise OSError("no more processes")
        self.processes.append(ScriptedProcess(GONE + worker.ranks.global_rank, links.parent_pipe))
        return self.processes[-1]


def make_group(*, job: int = 1) -> closing[WorkerGroup]:
    """Return a group of two ranks, to be closed."""
    return closing(WorkerGroup(RANKS, OPTIONS, job))


def descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def test_each_rank_gets_a_process() -> None:
    """With its variables and the number of the job; all are supervised, and ended with the group."""
    starter = Starter(2)
    with make_group(job=4) as group:
        group.start(RANKS, starter)
        assert [worker.ranks for worker in starter.workers] == list(RANKS)
        assert [worker.variables["RANK"] for worker in starter.workers] == ["0", "1"]
        assert {worker.job for worker in starter.workers} == {4}
        assert [group.values[rank] for rank in (0, 1)] == [links.values for links in starter.links]
        assert [each.pid for each in group.supervisor.ranks()] == [GONE, GONE + 1]
    assert all(process.was_killed for process in starter.processes)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_all_is_closed_with_the_group(count: int) -> None:
    """Also where the start of a process fails, whose error is raised: those before it are ended."""
    before, starter = descriptors(), Starter(count)
    with make_group() as group:
        with nullcontext() if count == 2 else pytest.raises(OSError, match="no more processes"):
            group.start(RANKS, starter)
        assert len(starter.processes) == len(group.supervisor.ranks()) == count
    assert [process.was_killed for process in starter.processes] == [True] * count
    assert descriptors() == before


def test_where_ranks_meet() -> None:
    """Privately, without an address, or in a store on loopback, hosted here until the group is closed."""
    with make_group() as group:
        group.open_rendezvous("private")
        assert (group.address, group.store) == (None, None)
        assert "MASTER_ADDR" not in group.context_of(RANKS[1]).variables
    with make_group() as group:
        group.open_rendezvous("tcp")
        assert group.address is not None
        assert group.address[0] == "127.0.0.1"
        assert group.store is not None
        worker = group.context_of(RANKS[1])
        assert (worker.address, worker.variables["MASTER_PORT"]) == (group.address, str(group.address[1]))
    assert group.store is None


@pytest.mark.parametrize("hosts", [True, False])
def test_ranks_of_several_nodes(hosts: bool) -> None:
    """They meet at the endpoint; one node's launching process hosts the store there."""
    endpoint = RendezvousEndpoint(("127.0.0.1", free_port()), hosts)
    ranks = (RankInfo(0, 0, 0, 2, 1, 2),)
    with closing(WorkerGroup(ranks, replace(OPTIONS, endpoint=endpoint), job=1)) as group:
        group.open_rendezvous("private")
        assert group.address == endpoint.address
        assert (group.store is not None) == hosts
    forget_store(endpoint.address)
