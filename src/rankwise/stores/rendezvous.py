"""The ranks meet in the store before they make a group, and see whether what each was told fits together."""

from __future__ import annotations

import json
import socket
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import final

import torch
import torch.distributed as dist

from rankwise.errors import ProcessGroupError, RendezvousTimeoutError
from rankwise.ranks import RankInfo
from rankwise.stores.private import is_private
from rankwise.stores.waiting import poll_until, wait_for_keys

__all__ = ["FAILURE", "RemoteFailure", "RankIdentity", "read_key", "run_rendezvous", "identity_of"]

FAILURE = "failure"
"""The key of the first failure's record."""


_ANSWER_S = 1.0  # in which a store says what it has


@final
class RemoteFailure(Exception):
    """A rank of another node has failed, before this one came to need it or after it was done; its record."""

    def __init__(self, record: bytes) -> None:
        super().__init__("a rank of another node has failed")
        self.record = record


def read_key(rank: int) -> str:
    """Return what a rank sets that has heard of the failure."""
    return f"heard/{rank}"


@final
@dataclass(frozen=True)
class RankIdentity:
    """What one rank knows of itself, and what device it takes (an empty text: one that can be shared)."""

    global_rank: int
    local_rank: int
    node_rank: int
    world_size: int
    host: str
    pid: int
    device: str = ""

    def __str__(self) -> str:
        return f"global_rank {self.global_rank} (node {self.node_rank}, host {self.host!r}, pid {self.pid})"


def identity_of(ranks: RankInfo, backend: str, device: torch.device, pid: int) -> RankIdentity:
    """Return this rank's place. NCCL can use a device once only, so its identity is part of it."""
    is_exclusive = device.type == "cuda" and "nccl" in backend
    identity = str(torch.cuda.get_device_properties(device).uuid) if is_exclusive else ""
    return RankIdentity(
        ranks.global_rank,
        ranks.local_rank,
        ranks.node_rank,
        ranks.world_size,
        socket.gethostname(),
        pid,
        identity,
    )


def run_rendezvous(store: dist.Store, mine: RankIdentity, timeout: timedelta) -> tuple[RankIdentity, ...]:
    """Wait until every rank is here; return all places by global rank.

    The last to arrive compares them all, so this costs each rank four short messages.

    Collective: every rank must call this.

    Raises:
        ProcessGroupError: on every rank, when two ranks are the same or have the same device, or believe in
            different worlds.
        RendezvousTimeoutError: when not all came in time; names those that did not.
        RemoteFailure: when the process that started one of them has left word that it failed.
    """
    arrival = store.add("arrived", 1)
    if arrival > mine.world_size:
        raise duplicate_rank_error(mine)
    store.set(f"place/{arrival}", json.dumps(asdict(mine)))
    if arrival == mine.world_size:
        here = _places(store, arrival)
        problem = disagreement(here)
        store.set("met", json.dumps([problem, [asdict(place) for place in here]]))
    else:
        _wait_for_the_last(store, mine, timeout)
    problem, places = json.loads(store.get("met"))
    if problem:
        raise ProcessGroupError(problem, "start every rank once, each with its own rank and device.")
    return tuple(sorted((RankIdentity(**place) for place in places), key=lambda place: place.global_rank))


def disagreement(places: Sequence[RankIdentity]) -> str:
    """Return what is wrong with these ranks as one job, or an empty text."""
    sizes = Counter(place.world_size for place in places)
    if len(sizes) > 1:
        most = sizes.most_common(1)[0][0]
        odd = next(place for place in places if place.world_size != most)
        return f"{odd} believes in a world of {odd.world_size}, others in one of {most}."
    return (
        _twice(places, "global_rank", lambda place: (place.global_rank,))
        or _twice(places, "local_rank", lambda place: (place.host, place.node_rank, place.local_rank))
        or _twice(
            [place for place in places if place.device], "device", lambda place: (place.host, place.device)
        )
    )


def _twice(
    places: Sequence[RankIdentity], what: str, key: Callable[[RankIdentity], tuple[object, ...]]
) -> str:
    groups: dict[tuple[object, ...], list[RankIdentity]] = defaultdict(list)
    for place in places:
        groups[key(place)].append(place)
    for group in groups.values():
        if len(group) > 1:
            return f"{group[0]} and {group[1]} have the same {what}."
    return ""


def _places(store: dist.Store, count: int) -> list[RankIdentity]:
    return [RankIdentity(**json.loads(store.get(f"place/{number}"))) for number in range(1, count + 1)]


def _places_so_far(store: dist.Store, count: int) -> list[RankIdentity]:
    keys = [f"place/{number}" for number in range(1, count + 1)]
    return [RankIdentity(**json.loads(store.get(key))) for key in keys if store.check([key])]


def _wait_for_the_last(store: dist.Store, mine: RankIdentity, timeout: timedelta) -> None:
    if is_private(store):
        is_complete = wait_for_keys(store, ["met"], timeout)
    else:
        is_complete = poll_until(lambda: _is_met(store, mine), timeout)
    if is_complete:
        return
    if not _has_soon(store, "arrived"):
        waiting_for = "the process that has the store, which answers nobody: it hangs, or is suspended"
        raise RendezvousTimeoutError(waiting_for=waiting_for, timeout_s=timeout.total_seconds())
    arrived = store.add("arrived", 0)
    if arrived > mine.world_size:
        raise duplicate_rank_error(mine)
    if arrived == mine.world_size and _has_soon(store, "met"):
        return  # the last came at the very deadline
    raise missing_ranks_error(_places_so_far(store, arrived), mine.world_size, timeout)


def _is_met(store: dist.Store, mine: RankIdentity) -> bool:
    if store.check(["met"]):
        return True
    if store.check([FAILURE]):
        store.set(read_key(mine.global_rank), "")
        raise RemoteFailure(bytes(store.get(FAILURE)))
    return False


def _has_soon(store: dist.Store, key: str) -> bool:
    try:
        store.wait([key], timedelta(seconds=_ANSWER_S))
    except dist.DistStoreError:
        return False
    return True


def duplicate_rank_error(mine: RankIdentity) -> ProcessGroupError:
    return ProcessGroupError(
        f"{mine} came to a meeting of {mine.world_size} ranks that are all there: a rank was started twice, "
        "or another job meets at the same address and port.",
        "start every rank once; give each job a MASTER_PORT of its own.",
    )


def missing_ranks_error(
    here: Sequence[RankIdentity], world_size: int, timeout: timedelta
) -> RendezvousTimeoutError:
    missing_ranks_error = sorted(set(range(world_size)) - {place.global_rank for place in here})
    names = ", ".join(str(rank) for rank in missing_ranks_error[:10]) + (
        ", ..." if len(missing_ranks_error) > 10 else ""
    )
    came = ", ".join(str(place) for place in here[:10])
    waiting_for = f"global_rank {names} to come to the process group (here are {came})"
    return RendezvousTimeoutError(waiting_for=waiting_for, timeout_s=timeout.total_seconds())
