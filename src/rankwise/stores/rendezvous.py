"""Rendezvous: all ranks exchange their identities in the store, and check that they fit together."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from operator import attrgetter
from typing import final

import torch
import torch.distributed as dist

from rankwise.errors import ProcessGroupError, RendezvousTimeoutError
from rankwise.ranks import RankInfo
from rankwise.stores.private import is_private
from rankwise.stores.values import read_value
from rankwise.stores.waiting import poll_until, wait_for_keys

FAILURE = "failure"
"""The key of the first failure's record."""

_ANSWER_TIMEOUT = timedelta(seconds=1)
_MOST_NAMED = 10


@final
class RemoteFailure(Exception):
    """A rank of another node has failed, before this one needed it or after this one was done."""

    def __init__(self, record: bytes) -> None:
        super().__init__("a rank of another node has failed")
        self.record = record


def read_key(rank: int) -> str:
    """Return the key that a rank sets when it has read the failure's record."""
    return f"read/{rank}"


@final
@dataclass(frozen=True)
class RankIdentity:
    """One rank, and its device if no other rank may use the same one (an empty text otherwise)."""

    global_rank: int
    local_rank: int
    node_rank: int
    world_size: int
    host: str
    pid: int
    device: str = ""

    def __str__(self) -> str:
        return f"global_rank {self.global_rank} (node {self.node_rank}, host {self.host!r}, pid {self.pid})"


def identity_of(ranks: RankInfo, device: str = "") -> RankIdentity:
    """Return this process's identity."""
    place = (ranks.global_rank, ranks.local_rank, ranks.node_rank, ranks.world_size)
    return RankIdentity(*place, socket.gethostname(), os.getpid(), device)


def mig_slices(environ: Mapping[str, str]) -> list[str]:
    """Return the uuids by which the environment names slices of a GPU (MIG); [] where it names none."""
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    return visible.split(",") if visible.startswith("MIG-") else []


def exclusive_device(backend: str, device: torch.device) -> str:
    """Return the identity of a device that one rank alone may use, as NCCL's; an empty text for others."""
    if device.type != "cuda" or "nccl" not in backend:
        return ""
    if slices := mig_slices(os.environ):
        return slices[device.index or 0]  # torch knows the uuid of the whole GPU
    return str(torch.cuda.get_device_properties(device).uuid)


def run_rendezvous(store: dist.Store, own: RankIdentity, timeout: timedelta) -> tuple[RankIdentity, ...]:
    """Wait until every rank is here; return all identities by global rank.

    Collective: every rank must call this. The last rank to arrive compares the identities; each rank raises
    where they do not form one job, and `RemoteFailure` when a rank's failure is published meanwhile.
    """
    arrival = store.add("arrived", 1)
    if arrival > own.world_size:
        raise duplicate_rank_error(own)
    write_identity(store, arrival, own)
    if arrival == own.world_size:
        numbers = range(1, arrival + 1)
        are_written = wait_for_keys(store, [_identity_key(number) for number in numbers], timeout)
        here = read_identities(store, numbers)
        if not are_written:
            raise missing_ranks_error(here, own.world_size, timeout)
        store.set("met", json.dumps([disagreement(here), [asdict(each) for each in here]]))
    else:
        _wait_for_the_last(store, own, timeout)
    problem, identities = read_value(store, "met", tuple[str, list[RankIdentity]])
    identities.sort(key=attrgetter("global_rank"))
    if not problem and [each.global_rank for each in identities] != list(range(own.world_size)):
        problem = f"The ranks that the job's store names are not the {own.world_size} ranks of this job."
    if problem:
        raise ProcessGroupError(problem, "start every rank once, each with its own rank and device.")
    return tuple(identities)


def disagreement(identities: Sequence[RankIdentity]) -> str:
    """Return why these ranks do not form one job, or an empty text."""
    sizes = [each.world_size for each in identities]
    if len(set(sizes)) > 1:
        most = max(sizes, key=sizes.count)
        odd = next(each for each in identities if each.world_size != most)
        return f"{odd} has a world size of {odd.world_size}, others have one of {most}."
    with_device = [each for each in identities if each.device]
    return (
        _duplicate(identities, "global_rank")
        or _duplicate(identities, "local_rank", "host", "node_rank")
        or _duplicate(with_device, "device", "host")
    )


def _duplicate(identities: Sequence[RankIdentity], what: str, *scope: str) -> str:
    """Return which two ranks have the same value of `what` within a scope, or an empty text."""
    key, first = attrgetter(what, *scope), dict[object, RankIdentity]()
    for each in identities:
        if (other := first.setdefault(key(each), each)) is not each:
            return f"{other} and {each} have the same {what}."
    return ""


def write_identity(store: dist.Store, number: int, identity: RankIdentity) -> None:
    """Write the identity of the rank that arrived as number so many."""
    store.set(_identity_key(number), json.dumps(asdict(identity)))


def read_identities(store: dist.Store, numbers: Iterable[int]) -> list[RankIdentity]:
    """Return the identities that are written under these numbers."""
    keys = [_identity_key(number) for number in numbers]
    return [read_value(store, key, RankIdentity) for key in keys if store.check([key])]


def _identity_key(number: int) -> str:
    return f"identity/{number}"


def _wait_for_the_last(store: dist.Store, own: RankIdentity, timeout: timedelta) -> None:
    if is_private(store):
        if wait_for_keys(store, ["met"], timeout):
            return
    elif poll_until(lambda: _is_complete(store, own), timeout):
        return
    if not _is_set_soon(store, "arrived"):
        waiting_for = "an answer of the process that hosts the store: it hangs, or is suspended"
        raise RendezvousTimeoutError(waiting_for=waiting_for, timeout_s=timeout.total_seconds())
    arrived = store.add("arrived", 0)
    if arrived > own.world_size:
        raise duplicate_rank_error(own)
    if arrived == own.world_size and _is_set_soon(store, "met"):
        return  # the last rank arrived just in time
    raise missing_ranks_error(read_identities(store, range(1, arrived + 1)), own.world_size, timeout)


def _is_complete(store: dist.Store, own: RankIdentity) -> bool:
    if store.check(["met"]):
        return True
    if store.check([FAILURE]):
        store.set(read_key(own.global_rank), "1")
        raise RemoteFailure(bytes(store.get(FAILURE)))
    return False


def _is_set_soon(store: dist.Store, key: str) -> bool:
    try:
        store.wait([key], _ANSWER_TIMEOUT)
    except dist.DistStoreError:
        return False
    return True


def duplicate_rank_error(own: RankIdentity) -> ProcessGroupError:
    """Return the error of a rank that comes when all ranks are there already."""
    return ProcessGroupError(
        f"{own} came to a rendezvous of {own.world_size} ranks that are all there: a rank was started twice, "
        "or another job uses the same address and port.",
        "start every rank once; give each job a MASTER_PORT of its own.",
    )


def missing_ranks_error(
    here: Sequence[RankIdentity], world_size: int, timeout: timedelta
) -> RendezvousTimeoutError:
    """Return the error that names the ranks which did not come."""
    missing = sorted(set(range(world_size)) - {each.global_rank for each in here})
    more = ", ..." if len(missing) > _MOST_NAMED else ""
    names = ", ".join(map(str, missing[:_MOST_NAMED]))
    came = ", ".join(map(str, here[:_MOST_NAMED]))
    waiting_for = f"global_rank {names}{more} to come to the process group (here are {came})"
    return RendezvousTimeoutError(waiting_for=waiting_for, timeout_s=timeout.total_seconds())
