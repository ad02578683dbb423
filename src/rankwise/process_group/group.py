"""The default process group: made, verified and destroyed, everything around it left as it was."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from rankwise.errors import ProcessGroupError, RendezvousTimeoutError
from rankwise.ranks import RankInfo

__all__ = ["gloo_on_loopback", "join_process_group", "process_group"]

_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


@contextmanager
def process_group(
    store: dist.Store,
    ranks: RankInfo,
    backend: str,
    device: torch.device,
    *,
    timeout: timedelta,
    init_timeout: timedelta,
) -> Iterator[None]:
    """Have the default process group while the block runs; one that existed before is used and left.

    Collective: every rank must call this, in the same order.

    Raises:
        ProcessGroupError: when a group exists that does not fit.
    """
    is_ours = not dist.is_initialized()
    join_process_group(store, ranks, backend, device, timeout=timeout, init_timeout=init_timeout)
    try:
        yield
    finally:
        if is_ours and dist.is_initialized():
            dist.destroy_process_group()


def join_process_group(
    store: dist.Store,
    ranks: RankInfo,
    backend: str,
    device: torch.device,
    *,
    timeout: timedelta,
    init_timeout: timedelta,
) -> None:
    """Make the default process group, or check that the one which exists is the same.

    Collective: every rank must call this, in the same order.

    Args:
        store: where the ranks meet.
        ranks: who this process is.
        backend: `"gloo"`, `"nccl"`, ...
        device: this rank's device; a group on NCCL is bound to it.
        timeout: how long a collective may take.
        init_timeout: how long to wait for the other ranks to come here.

    Raises:
        RendezvousTimeoutError: when some did not come in time; it names them.
        ProcessGroupError: when torch has no distributed package, or a group exists that does not fit.
    """
    if not dist.is_available():
        raise ProcessGroupError("This build of torch has no torch.distributed.", "install one that has.")
    if dist.is_initialized():
        _check_existing(ranks, backend)
        return
    hook = sys.excepthook  # torch wraps it each time and never unwraps it
    groups = _group_count()
    _wait_for_all(store, ranks, init_timeout)
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


def _group_count(restored: int | None = None) -> int | None:
    """Return (or put back) torch's count of groups: it names a group's keys, so the ranks must agree on it.

    torch counts a group before it is made, and does not take it back when that fails.
    """
    world = getattr(dist.distributed_c10d, "_world", None)
    if world is not None and restored is not None:
        world.group_count = restored
    return getattr(world, "group_count", None)


def _wait_for_all(store: dist.Store, ranks: RankInfo, timeout: timedelta) -> None:
    keys = [f"here{rank}" for rank in range(ranks.world_size)]
    store.set(keys[ranks.global_rank], "1")
    try:
        store.wait(keys, timeout)
    except dist.DistStoreError:
        missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        if not missing:
            raise
        waiting_for = f"global_rank {', '.join(missing)} to come to the process group"
        raise RendezvousTimeoutError(waiting_for, timeout.total_seconds()) from None


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


@contextmanager
def gloo_on_loopback() -> Iterator[None]:
    """Keep gloo on the loopback interface while the block runs, for groups made later in it too.

    Mutates: `os.environ["GLOO_SOCKET_IFNAME"]`, restored on exit; left alone where the user has set it.
    """
    if _GLOO_INTERFACE in os.environ:
        yield
        return
    os.environ[_GLOO_INTERFACE] = "lo" if sys.platform == "linux" else "lo0"
    try:
        yield
    finally:
        os.environ.pop(_GLOO_INTERFACE, None)
