"""The process group: creating it, its back end, and its collectives."""

from rankwise.process_group.collectives import (
    AllGatherGrad,
    all_gather,
    all_gather_ddp_if_available,
    all_reduce,
    barrier,
    gather_all_tensors,
    sync_ddp,
    sync_ddp_if_available,
)
from rankwise.process_group.group import (
    check_backend,
    check_interface,
    default_backend,
    gloo_on_interface,
    init_process_group,
    join_process_group,
    process_group,
)
from rankwise.process_group.lone_calls import rank_zero_first
from rankwise.process_group.objects import all_gather_object, broadcast, gather_object
from rankwise.stores.tcp import default_store

__all__ = [
    "AllGatherGrad",
    "all_gather",
    "all_gather_ddp_if_available",
    "all_gather_object",
    "all_reduce",
    "barrier",
    "broadcast",
    "check_backend",
    "check_interface",
    "default_backend",
    "default_store",
    "gather_all_tensors",
    "gather_object",
    "gloo_on_interface",
    "init_process_group",
    "join_process_group",
    "process_group",
    "rank_zero_first",
    "sync_ddp",
    "sync_ddp_if_available",
]
