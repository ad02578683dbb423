"""`GradientSyncMode`: in which backward passes gradients are averaged over the ranks."""

from __future__ import annotations

from enum import Enum
from typing import final

from rankwise.named_options import check_name


@final
class GradientSyncMode(Enum):
    """When the gradients of a window of microbatches are averaged; the values are the names to use.

    Attributes:
        SINGLE_AUTO_SYNC: by DDP, during the window's last backward pass.
        MULTI_AUTO_SYNC: by DDP, during every backward pass of the window.
        FORCED_SYNC: by rankwise, in a few large buckets after the window's last backward pass. A parameter
            that has a gradient on some ranks only counts as zero on the others.
    """

    SINGLE_AUTO_SYNC = "single_auto_sync"
    MULTI_AUTO_SYNC = "multi_auto_sync"
    FORCED_SYNC = "forced_sync"


def resolve_sync_mode(mode: object = "auto", *, finds_unused_parameters: bool = False) -> GradientSyncMode:
    """Return a mode, or the mode of that name, in any case.

    `"auto"` is `multi_auto_sync` where DDP looks for unused parameters, `single_auto_sync` otherwise.
    """
    if isinstance(mode, GradientSyncMode):
        return mode
    names = ("auto", *(mode.value for mode in GradientSyncMode))
    name = check_name("sync_mode", mode, names, "a GradientSyncMode or its name")
    if name == "auto":
        name = "multi_auto_sync" if finds_unused_parameters else "single_auto_sync"
    return GradientSyncMode(name)
