"""The rendezvous of several nodes' agents: a new store for each start, and one count of the starts."""

import errno
import socket
import threading
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousParameters

from rankwise.errors import ProcessGroupError
from rankwise.launchers.elastic_rendezvous import NODES, NodesRendezvous
from rankwise.stores.rendezvous import RestartInfo
from tests.helpers.ports import free_port

MADE = "made by a rank of the start before"


def handler(port: int, starts: list[RestartInfo], *, is_host: bool | None) -> NodesRendezvous:
    """Return the agent's part on a node of a job of two to three."""
    parameters = RendezvousParameters(
        NODES,
        f"127.0.0.1:{port}",
        "a job",
        2,
        3,
        is_host=is_host,
        last_call_timeout=4,  # in which the third comes: an agent looks once in a second
        on_start=starts.append,
        own_address=lambda host: host,
    )
    return NodesRendezvous(parameters)


def meet(each: NodesRendezvous, met: list[Any], together: threading.Barrier) -> None:
    """Meet the others, and note rank, address, and whether somebody has used the store before."""
    info = each.next_rendezvous()
    assert info.bootstrap_store_info is not None
    address = (info.bootstrap_store_info.master_addr, info.bootstrap_store_info.master_port)
    store = dist.TCPStore(*address, None, False)
    met.append((info.rank, address, store.check([MADE])))
    together.wait(30)
    store.set(MADE, "")


@pytest.mark.full
def test_a_node_that_comes_later_meets_those_that_stayed() -> None:
    """All find rank 0's new store, which is empty and on loopback, and agree that it is the second start."""
    port = free_port()
    started: list[list[RestartInfo]] = [[], [], []]
    handlers = [handler(port, starts, is_host=not number) for number, starts in enumerate(started)]
    for size in (2, 3):
        met: list[Any] = []
        together = threading.Barrier(size)
        threads = [threading.Thread(target=meet, args=(each, met, together)) for each in handlers[:size]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sorted(rank for rank, _, _ in met) == list(range(size))
        assert len({address for _, address, _ in met}) == 1
        assert {host for _, (host, _), _ in met} == {"127.0.0.1"}
        assert not any(is_used for _, _, is_used in met)
    assert [[start.number for start in starts] for starts in started] == [[0, 1], [0, 1], [1]]
    assert len({start.job for starts in started for start in starts}) == 1
    with socket.socket() as elsewhere:  # the agents' own store listens at the endpoint, and nowhere else
        assert elsewhere.connect_ex(("127.0.0.2", port)) == errno.ECONNREFUSED
    for each in reversed(handlers):
        each.shutdown()


@pytest.mark.full
def test_who_hosts_the_agents_store() -> None:
    """Of agents on the endpoint's host the first hosts; others come to it, as from everywhere else."""
    port = free_port()
    hosting = handler(port, [], is_host=None)
    coming = handler(port, [], is_host=None)
    coming.set_closed()
    assert hosting.is_closed()
    for each in (coming, hosting):
        each.shutdown()


def test_a_port_that_somebody_else_has() -> None:
    """The agent that is to host says so, and does not take another's store for its own."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ProcessGroupError, match=f"cannot listen at 127.0.0.1:{taken.getsockname()[1]}"):
            handler(taken.getsockname()[1], [], is_host=True)
