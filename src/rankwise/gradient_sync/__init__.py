"""When gradients are averaged over the ranks, by which communication hook, and with which weights."""

from rankwise.gradient_sync.buckets import reduce_gradients
from rankwise.gradient_sync.comm_hook import register_ddp_comm_hook
from rankwise.gradient_sync.hook_registry import CommHookRegistry, HookPlace, NamedHook
from rankwise.gradient_sync.options import GradientSyncMode
from rankwise.gradient_sync.sync import GradientSync, gradient_sync_context

__all__ = [
    "CommHookRegistry",
    "GradientSync",
    "GradientSyncMode",
    "HookPlace",
    "NamedHook",
    "gradient_sync_context",
    "reduce_gradients",
    "register_ddp_comm_hook",
]
