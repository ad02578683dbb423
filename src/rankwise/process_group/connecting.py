"""`init_process_group`: connect a process that somebody else has started, for training loops of one's own."""

from __future__ import annotations

import itertools
import os
from contextlib import nullcontext
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from rankwise.errors import ProcessGroupError
from rankwise.process_group.backend import check_backend, default_backend
from rankwise.process_group.group import gloo_on_loopback, join_process_group
from rankwise.process_group.rendezvous import open_store
from rankwise.process_group.starts import start_at
from rankwise.ranks import RankInfo

__all__ = ["init_process_group"]

_joins = itertools.count()  # tells the groups that a process joins one after another apart in the store


class Place(Protocol):
    """What a cluster environment says of this process; `rankwise.ClusterEnvironment` is one."""

    @property
    def ranks(self) -> RankInfo: ...

    @property
    def main_address(self) -> str: ...

    @property
    def main_port(self) -> int: ...


def init_process_group(
    environment: Place,
    backend: str | None = None,
    *,
    device: torch.device | None = None,
    timeout: timedelta = timedelta(minutes=10),
    init_timeout: timedelta = timedelta(minutes=2),
) -> RankInfo:
    """Make torch's default process group of the processes that `environment` describes.

    A group that exists is used if it has these ranks and this back end, and refused otherwise. A strategy
    does all this by itself; this is for programs without one, which leave the group with
    `torch.distributed.destroy_process_group()`.

    Collective: every rank must call this.

    Args:
        environment: who started this process, such as `detect_environment().environment`.
        backend: `"gloo"`, `"nccl"`, ...; by default NCCL on CUDA, gloo on the CPU, torch's own elsewhere.
        device: this rank's; by default the CUDA device of its local rank where there is one, else the CPU.
        timeout: how long a collective may take.
        init_timeout: how long to wait for the other ranks.

    Returns:
        Who this process is.

    Raises:
        ProcessGroupError (a RuntimeError): when torch has no distributed package, or a group exists that does
            not fit.
        UnknownNameError, ConfigurationError: for a back end that there is not.
        EnvironmentVariableError: when the environment's variables are wrong.
        RendezvousTimeoutError: when rank 0 cannot be reached in time.
    """
    if not dist.is_available():
        raise ProcessGroupError("This build of torch has no torch.distributed.", "install one that has.")
    ranks = environment.ranks
    place = _device_of(ranks) if device is None else device
    wanted = default_backend(place.type) if backend is None else check_backend(backend)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    if dist.is_initialized():
        join_process_group(
            dist.HashStore(), ranks, wanted, place, timeout=timeout, init_timeout=init_timeout
        )  # only compares
        return ranks
    store = _store_of(environment, ranks, init_timeout)
    with gloo_on_loopback() if ranks.is_one_node else nullcontext():
        join_process_group(store, ranks, wanted, place, timeout=timeout, init_timeout=init_timeout)
    return ranks


def _store_of(environment: Place, ranks: RankInfo, timeout: timedelta) -> dist.Store:
    if ranks.world_size == 1:
        return dist.HashStore()
    is_hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    # Ranks on one node meet on loopback, whatever address they were given, unless somebody else hosts.
    host = environment.main_address if is_hosted or not ranks.is_one_node else "127.0.0.1"
    address = (host, environment.main_port)
    store = open_store(None, address, hosts=ranks.is_global_zero and not is_hosted, timeout=timeout)
    start = start_at(address, store, ranks, timeout).number if is_hosted else 0
    return dist.PrefixStore(f"start{start}/join{next(_joins)}", store)


def _device_of(ranks: RankInfo) -> torch.device:
    count = torch.cuda.device_count()
    return torch.device("cuda", ranks.local_rank % count) if count else torch.device("cpu")
