"""The rendezvous over a store, with each rank in a thread."""

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from rankwise.errors import ProcessGroupError, RendezvousTimeoutError
from rankwise.ranks import RankInfo
from rankwise.stores.private import PrivateStore, StoreTable
from rankwise.stores.rendezvous import (
    FAILURE,
    RankIdentity,
    RemoteFailure,
    exclusive_device,
    identity_of,
    read_key,
    run_rendezvous,
)
from tests.unit.stores.test_private import answer, store_on

SECOND = timedelta(seconds=1)


def identity(
    rank: int, size: int = 2, host: str = "a", local: int | None = None, device: str = ""
) -> RankIdentity:
    return RankIdentity(rank, rank if local is None else local, 0, size, host, 100 + rank, device)


def run_together(
    identities: Sequence[RankIdentity], timeout: timedelta = 30 * SECOND
) -> list[tuple[RankIdentity, ...] | Exception]:
    store = dist.HashStore()

    def come(own: RankIdentity) -> tuple[RankIdentity, ...] | Exception:
        try:
            return run_rendezvous(store, own, timeout)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(identities)) as pool:
        return list(pool.map(come, identities))


def test_every_rank_gets_all_identities() -> None:
    """Each rank gets all identities, by global rank, whatever the order of arrival."""
    identities = [identity(2, 3), identity(0, 3), identity(1, 3)]
    assert run_together(identities) == [tuple(sorted(identities, key=lambda one: one.global_rank))] * 3


def test_a_failure_ends_the_wait() -> None:
    """A published failure ends the wait for other ranks, and is marked as read."""
    store = dist.HashStore()
    store.set(FAILURE, "the record")
    with pytest.raises(RemoteFailure) as caught:
        run_rendezvous(store, identity(1), 20 * SECOND)
    assert caught.value.record == b"the record"
    assert store.check([read_key(1)])


@pytest.mark.parametrize(
    ("identities", "problem"),
    [
        ([identity(1), identity(1)], "have the same global_rank"),
        ([identity(0), identity(1, local=0)], "have the same local_rank"),
        ([identity(0, device="GPU-1"), identity(1, device="GPU-1")], "have the same device"),
        ([identity(0, 3), identity(1, 3), identity(2, 2)], "has a world size of 2|two ranks|all there"),
    ],
    ids=["rank", "local rank", "device", "world"],
)
def test_a_disagreement_is_an_error_on_every_rank(identities: Sequence[RankIdentity], problem: str) -> None:
    """The error on every rank names what is the same, the ranks and their hosts."""
    errors = run_together(identities, SECOND)  # who has met one too many waits in vain
    assert any(isinstance(error, ProcessGroupError) for error in errors)
    text = next(str(error) for error in errors if isinstance(error, ProcessGroupError))
    assert any(part in text for part in problem.split("|"))
    assert "host 'a'" in text
    assert all(isinstance(error, (ProcessGroupError, RendezvousTimeoutError)) for error in errors)


@pytest.mark.parametrize(
    "identities",
    [
        [identity(0), identity(1, host="b", local=0)],
        [identity(0, device="GPU-1"), identity(1, host="b", local=0, device="GPU-1")],
        [identity(0), identity(1)],
    ],
    ids=["local ranks of two hosts", "devices of two hosts", "the CPU"],
)
def test_no_conflict(identities: Sequence[RankIdentity]) -> None:
    """The same local rank or device on another host, and the CPU, which all share, are no conflict."""
    assert run_together(identities) == [tuple(identities)] * 2


def test_a_missing_rank_is_named() -> None:
    """After the timeout the error names the missing ranks, and those that have come."""
    errors = run_together([identity(0, 4), identity(3, 4)], SECOND)
    for error in errors:
        assert isinstance(error, RendezvousTimeoutError)
        assert "global_rank 1, 2 to come" in str(error)
        assert "global_rank 3 (node 0, host 'a', pid 103)" in str(error)


def test_a_store_that_stops_answering() -> None:
    """The error says so, after one wait."""
    table, answers = StoreTable(), list[bytes]()

    def request(payload: bytes, limit_s: float) -> bytes:
        if len(answers) < 2:  # to the arrival, and to the place
            table.handle(payload, answers.append)
            return answers[-1]
        time.sleep(limit_s)
        raise TimeoutError

    timeout = timedelta(seconds=0.2)
    began_s = time.monotonic()
    with pytest.raises(RendezvousTimeoutError, match="an answer of the process that hosts the store"):
        run_rendezvous(PrivateStore(request, timedelta(seconds=60)), identity(0), timeout)
    assert time.monotonic() - began_s < 30


def test_the_last_rank_comes_at_the_deadline() -> None:
    """A rank whose wait ends just as the last one comes has met it: no rank is missing."""
    table, came = StoreTable(), list[tuple[RankIdentity, ...]]()

    def ask_too_early(payload: bytes, limit_s: float) -> bytes:
        try:
            return answer(table, payload, limit_s)
        except TimeoutError:
            came.append(run_rendezvous(store_on(table), identity(1), SECOND))
            raise

    here = run_rendezvous(PrivateStore(ask_too_early, SECOND), identity(0), 0 * SECOND)
    assert came == [here] == [(identity(0), identity(1))]


def test_one_too_many() -> None:
    """A rank that comes when all are there belongs to another job, or was started twice."""
    store = dist.HashStore()
    run_rendezvous(store, identity(0, 1), SECOND)
    with pytest.raises(ProcessGroupError, match="started twice, or another job"):
        run_rendezvous(store, identity(0, 1), SECOND)


def test_a_ranks_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """An identity has the ranks and this host; all may use the CPU, but each slice of a GPU is a device."""
    own = identity_of(RankInfo(1, 1, 0, 2, 2, 1), exclusive_device("gloo", torch.device("cpu")))
    assert own.host
    assert own == RankIdentity(1, 1, 0, 2, own.host, os.getpid(), "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a,MIG-b")
    names = [exclusive_device("cpu:gloo,cuda:nccl", torch.device("cuda", index)) for index in (0, 1)]
    assert names == ["MIG-a", "MIG-b"]
