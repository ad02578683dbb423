"""The default process group: made, verified and destroyed, everything around it left as it was."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from rankwise.errors import ProcessGroupError
from rankwise.process_group.letting_go import destroy_process_groups
from rankwise.process_group.meeting import Place, meet, place_of
from rankwise.ranks import RankInfo

__all__ = ["gloo_on_interface", "gloo_on_loopback", "join_process_group", "process_group"]

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
    once_met: Callable[[tuple[Place, ...]], object] = tuple,
) -> Iterator[tuple[Place, ...]]:
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
            destroy_process_groups()


def join_process_group(
    store: dist.Store,
    ranks: RankInfo,
    backend: str,
    device: torch.device,
    *,
    timeout: timedelta,
    init_timeout: timedelta | None = None,
    once_met: Callable[[tuple[Place, ...]], object] = tuple,
) -> tuple[Place, ...]:
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
    mine = place_of(ranks, backend, device, os.getpid())
    places = meet(store, mine, timeout if init_timeout is None else init_timeout)
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
