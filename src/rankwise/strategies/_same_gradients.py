"""Whether a wrapper's gradients are the same on every rank, which decides how much must be agreed."""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel

__all__ = ["averages_everywhere"]

_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks."
_AVERAGING = (_HOOKS + "default_hooks", _HOOKS + "powerSGD_hook")


def averages_everywhere(wrapper: DistributedDataParallel) -> bool:
    """Return whether every gradient is averaged over the wrapper's group, as far as can be known."""
    hooks: list[Any] = [hook for hook, _ in wrapper._comm_hooks]
    return not wrapper.parameters_to_ignore and all(_is_averaging(hook) for hook in hooks)


def _is_averaging(hook: Any) -> bool:
    if getattr(hook, "averages", False):  # rankwise's own
        return True
    module = getattr(hook, "__module__", "")
    is_wrapper = "<locals>" in getattr(hook, "__qualname__", "")  # around another hook, which may be anything
    return module in _AVERAGING and not is_wrapper
