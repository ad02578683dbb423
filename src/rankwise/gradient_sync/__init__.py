"""Gradient synchronisation: when gradients are averaged over the ranks, through what, and how weighted."""

from rankwise.gradient_sync.buckets import reduce_gradients
from rankwise.gradient_sync.comm_hook import register_ddp_comm_hook
from rankwise.gradient_sync.comm_hooks import CommHookRegistry, HookPlace
from rankwise.gradient_sync.modes import GradientSyncMode
from rankwise.gradient_sync.sync import GradientSync
from rankwise.gradient_sync.sync_context import gradient_sync_context

__all__ = [
    "CommHookRegistry",
    "GradientSync",
    "GradientSyncMode",
    "HookPlace",
    "gradient_sync_context",
    "reduce_gradients",
    "register_ddp_comm_hook",
]
