"""Where the nodes of a job meet, and the keys of one job in the store there. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from torch.distributed import Store


@final
@dataclass(frozen=True)
class RendezvousEndpoint:
    """Host and port of a job's store, and whether this node hosts it."""

    address: tuple[str, int]
    hosts: bool


def job_prefix(job: int, start: int = 0) -> str:
    """Return what the keys of one job, in one start of it, begin with."""
    return f"start{start}/job{job}"


def store_of_job(store: Store, job: int, start: int = 0) -> Store:
    """Return the part of a store that belongs to one job, in one start of it."""
    from torch.distributed import PrefixStore

    return PrefixStore(job_prefix(job, start), store)
