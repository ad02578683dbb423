"""Failures that a node's launching process publishes to the ranks of other nodes."""

import dataclasses
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest

from rankwise.failures import exchange
from rankwise.failures.exchange import CrossNodeFailures, published_failure
from rankwise.failures.record import FailureRecord
from rankwise.ranks import RankInfo
from rankwise.stores.rendezvous import read_key
from rankwise.stores.tcp import RendezvousEndpoint, forget_store, hosted_store, store_of_job
from tests.helpers.ports import free_port

RANKS = [RankInfo(2 * node, 0, node, 4, 2, 2) for node in range(2)]
KILLED = FailureRecord(3, 1, 1, 100, at_s=1.0, exit_status=-9)


LIMIT = timedelta(seconds=30)  # a connection may wait five for a resolver that does not answer


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    """Let this process be node 0, which hosts the store."""
    monkeypatch.setattr(exchange, "_CONNECT_TIMEOUT", LIMIT)
    address = ("127.0.0.1", free_port())
    hosted_store(LIMIT, address)
    yield address
    forget_store(address)


RAISED = FailureRecord(3, 1, 1, 100, at_s=1.0, exception_type="RuntimeError", has_met=False)


@pytest.mark.parametrize(
    ("record", "is_published"),
    [
        *((KILLED, True), (RAISED, True), (dataclasses.replace(RAISED, has_met=True), False)),
        (dataclasses.replace(RAISED, node_rank=0), False),
        (dataclasses.replace(RAISED, is_consequence=True), False),
        (dataclasses.replace(RAISED, is_timeout=True), False),
    ],
    ids=["killed", "before it met them", "after", "of another node", "an echo", "waited in vain"],
)
def test_a_failure_is_published_where_its_rank_cannot(
    record: FailureRecord, is_published: bool, address: tuple[str, int]
) -> None:
    """A kill, or a failure before the rendezvous, and no consequence; under the keys of its job alone."""
    node = CrossNodeFailures(RendezvousEndpoint(address, hosts=False), RANKS[1], job=2)
    node.publish(FailureRecord(2, 0, 1, 99, at_s=1.0, exception_type="ValueError"))  # which it says itself
    node.publish(record)
    node.wait_until_published()
    store = hosted_store(LIMIT, address)
    left = published_failure(store_of_job(store, 2))
    assert (None if left is None else FailureRecord.from_json(left)) == (record if is_published else None)
    assert published_failure(store_of_job(store, 1)) is None


def test_the_host_waits_until_the_other_nodes_have_read_it(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not wait for ranks of the node that has failed, nor without a failure."""
    host = CrossNodeFailures(RendezvousEndpoint(address, hosts=True), RANKS[0])
    store = store_of_job(hosted_store(LIMIT, address), 1)
    monkeypatch.setattr(exchange, "_READ_TIMEOUT", timedelta(minutes=1))
    began = time.monotonic()
    host.wait_until_published()
    store.set("failure", KILLED.to_json().decode())
    host.wait_until_published()
    assert time.monotonic() - began < 30
    monkeypatch.setattr(exchange, "_READ_TIMEOUT", timedelta(seconds=0.5))
    began = time.monotonic()
    host.job = 2
    host.publish(FailureRecord(1, 1, 0, 101, at_s=1.0, exit_status=3))
    host.wait_until_published()
    assert 0.5 < time.monotonic() - began < 30
    store = store_of_job(hosted_store(LIMIT, address), 2)
    assert not store.check([read_key(2)])


def test_a_store_that_is_gone() -> None:
    """Publishing to a store that is gone ends without an error; a job on one node does not try it."""
    killed_here = dataclasses.replace(KILLED, node_rank=0)
    tried = []
    for endpoint in (None, RendezvousEndpoint(("127.0.0.1", free_port()), hosts=True)):
        node = CrossNodeFailures(endpoint, RANKS[0])
        node.publish(killed_here)
        tried.append(node._thread is not None)
        node.wait_until_published()
        assert node._thread is None or not node._thread.is_alive()
    assert tried == [False, True]
