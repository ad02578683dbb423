"""The process group: made, joined, checked and destroyed."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from rankwise.errors import ProcessGroupError
from rankwise.process_group.backend import check_backend, default_backend
from rankwise.ranks import RankInfo
from rankwise.stores.rendezvous import RankIdentity, identity_of, run_rendezvous
from rankwise.stores.restart import find_restart
from rankwise.stores.tcp import open_store

__all__ = [
    "destroy_groups",
    "gloo_on_interface",
    "gloo_on_loopback",
    "init_process_group",
    "join_process_group",
    "process_group",
]

_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


@contextmanager
def process_group(
    store: dist.Store,
    ranks: RankInfo,
    backend: str,
    device: torch.device,
    *,
    timeout: timedelta,
    init_timeout: timedelta | None = None,
    once_met: Callable[[tuple[RankIdentity, ...]], object] = tuple,
) -> Iterator[tuple[RankIdentity, ...]]:
    """Have the default process group while the block runs; one that existed before is used and left.

    Collective: every rank must call this, in the same order.

    Args: those of `join_process_group`.

    Yields:
        What each rank knows of itself, by global rank; nothing for a group that existed before.

    Raises:
        ProcessGroupError: when a group exists that does not fit, or the ranks do not fit together.
        RendezvousTimeoutError: when not all ranks came within `init_timeout`.
    """
    is_ours = not dist.is_initialized()
    places = join_process_group(
        store, ranks, backend, device, timeout=timeout, init_timeout=init_timeout, once_met=once_met
    )
    try:
        yield places
    finally:
        if is_ours and dist.is_initialized():
            destroy_groups()


def join_process_group(
    store: dist.Store,
    ranks: RankInfo,
    backend: str,
    device: torch.device,
    *,
    timeout: timedelta,
    init_timeout: timedelta | None = None,
    once_met: Callable[[tuple[RankIdentity, ...]], object] = tuple,
) -> tuple[RankIdentity, ...]:
    """Make the default process group, or check that the one which exists is the same.

    Collective: every rank must call this, in the same order.

    Args:
        store: where the ranks meet.
        ranks: who this process is.
        backend: `"gloo"`, `"nccl"`, ...
        device: this rank's device; a group on NCCL is bound to it.
        timeout: how long a collective may take.
        init_timeout: how long the ranks may take to meet; None: as long as a collective.
        once_met: called with what each rank knows of itself, before the group is made: that takes its time,
            in C++, and another rank may fail meanwhile.

    Returns:
        What each rank knows of itself, by global rank; nothing for a group that existed before.

    Raises:
        ProcessGroupError: when torch has no distributed package, a group exists that does not fit, or the
            ranks do not fit together.
        RendezvousTimeoutError: when not all ranks came in time.
    """
    if not dist.is_available():
        raise ProcessGroupError("This build of torch has no torch.distributed.", "install one that has.")
    if dist.is_initialized():
        _check_existing(ranks, backend)
        return ()
    mine = identity_of(ranks, backend, device, os.getpid())
    places = run_rendezvous(store, mine, timeout if init_timeout is None else init_timeout)
    once_met(places)
    hook = sys.excepthook  # torch wraps it each time and never unwraps it
    groups = _group_count()
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=ranks.global_rank,
            world_size=ranks.world_size,
            timeout=timeout,
            device_id=device if backend == "nccl" else None,
        )
        _wait_until_connected(store, ranks, timeout)
    except BaseException:
        _group_count(groups)
        raise
    finally:
        sys.excepthook = hook
    return places


def _group_count(restored: int | None = None) -> int | None:
    """Return (or put back) torch's count of groups: it names a group's keys, so the ranks must agree on it.

    torch counts a group before it is made, and does not take it back when that fails.
    """
    world = getattr(dist.distributed_c10d, "_world", None)
    if world is not None and restored is not None:
        world.group_count = restored
    return getattr(world, "group_count", None)


def _wait_until_connected(store: dist.Store, ranks: RankInfo, timeout: timedelta) -> None:
    # A rank with little to do could otherwise have left again while another still connects to it.
    if store.add("connected", 1) == ranks.world_size:
        store.set("all_connected", "1")
    store.wait(["all_connected"], timeout)


def _check_existing(ranks: RankInfo, backend: str) -> None:
    rank, size, existing = dist.get_rank(), dist.get_world_size(), dist.get_backend()
    if (rank, size) != (ranks.global_rank, ranks.world_size):
        raise ProcessGroupError(
            f"A process group exists in which this process is rank {rank} of {size}, but the job has it as "
            f"global_rank {ranks.global_rank} of {ranks.world_size}.",
            "destroy it first with torch.distributed.destroy_process_group(), or ask for its world size.",
        )
    if existing != backend:
        raise ProcessGroupError(
            f"A process group with back end {existing!r} exists, but the strategy asks for {backend!r}.",
            f"pass process_group_backend={existing!r}, or destroy the group first.",
        )


def gloo_on_loopback() -> AbstractContextManager[None]:
    """Keep gloo on the loopback interface; see `gloo_on_interface`."""
    return gloo_on_interface("lo" if sys.platform == "linux" else "lo0")


@contextmanager
def gloo_on_interface(name: str | None) -> Iterator[None]:
    """Keep gloo on one interface while the block runs, for groups made later in it too; None: its own choice.

    Mutates: `os.environ["GLOO_SOCKET_IFNAME"]`, restored on exit; left alone where the user has set it.
    """
    if name is None or _GLOO_INTERFACE in os.environ:
        yield
        return
    os.environ[_GLOO_INTERFACE] = name
    try:
        yield
    finally:
        os.environ.pop(_GLOO_INTERFACE, None)


def destroy_groups() -> None:
    """Destroy the default process group and all others, and have them end where they can.

    A group of gloo's ends its threads, and waits for them, when its last reference goes. One of these
    threads runs the callbacks of futures, communication hooks' among them, and drops them when those that
    waited for the result are at work again already. A callback that refers to the group may so be the last
    that does: the thread would wait for itself, which aborts the process.
    """
    for group in list(dist.distributed_c10d._world.pg_map):
        # What has the threads is the back end: while it is kept, a group can go anywhere.
        backends = [group._get_backend(device_type) for device_type in group._device_types]
        weakref.finalize(group, _end, backends).atexit = False
    dist.destroy_process_group()


def _end(backends: list[Any]) -> None:
    if threading.get_ident() == threading.main_thread().ident:
        backends.clear()
    else:  # this may be a thread of theirs
        threading.Thread(target=backends.clear, name="rankwise-letting-go", daemon=True).start()


_joins = itertools.count()  # tells the groups that a process joins one after another apart in the store


class EnvironmentLike(Protocol):
    """What a cluster environment says of this process; `rankwise.ClusterEnvironment` is one."""

    @property
    def ranks(self) -> RankInfo: ...

    @property
    def main_address(self) -> str: ...

    @property
    def main_port(self) -> int: ...


def init_process_group(
    environment: EnvironmentLike,
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


def _store_of(environment: EnvironmentLike, ranks: RankInfo, timeout: timedelta) -> dist.Store:
    if ranks.world_size == 1:
        return dist.HashStore()
    is_hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    # Ranks on one node meet on loopback, whatever address they were given, unless somebody else hosts.
    host = environment.main_address if is_hosted or not ranks.is_one_node else "127.0.0.1"
    address = (host, environment.main_port)
    store = open_store(None, address, hosts=ranks.is_global_zero and not is_hosted, timeout=timeout)
    start = find_restart(address, store, ranks, timeout).number if is_hosted else 0
    return dist.PrefixStore(f"start{start}/join{next(_joins)}", store)


def _device_of(ranks: RankInfo) -> torch.device:
    count = torch.cuda.device_count()
    return torch.device("cuda", ranks.local_rank % count) if count else torch.device("cpu")
