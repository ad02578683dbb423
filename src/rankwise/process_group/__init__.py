"""The process group: where the ranks meet, what carries it, and what they do together."""

from rankwise.process_group.backend import check_backend, default_backend
from rankwise.process_group.collectives import all_gather, all_gather_object, all_reduce, barrier, broadcast
from rankwise.process_group.group import gloo_on_loopback, init_process_group, process_group

__all__ = [
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "barrier",
    "broadcast",
    "check_backend",
    "default_backend",
    "gloo_on_loopback",
    "init_process_group",
    "process_group",
]
