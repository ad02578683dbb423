"""The options of gradient synchronisation: their values, and which work together."""

from __future__ import annotations

from enum import Enum
from typing import final

from rankwise.checks import check_is_a, check_minimum, check_name
from rankwise.errors import ConfigurationError
from rankwise.gradient_sync.comm_hook import CommHook

WEIGHTINGS = ("samples", "logged")


@final
class GradientSyncMode(Enum):
    """When the gradients of a window of microbatches are averaged; the values are the names, in any case.

    Attributes:
        SINGLE_AUTO_SYNC: by DDP, during the window's last backward pass.
        MULTI_AUTO_SYNC: by DDP, during every backward pass of the window.
        FORCED_SYNC: by rankwise, in a few large buckets after the window's last backward pass. A parameter
            that has a gradient on some ranks only counts as zero on the others.
    """

    SINGLE_AUTO_SYNC = "single_auto_sync"
    MULTI_AUTO_SYNC = "multi_auto_sync"
    FORCED_SYNC = "forced_sync"

    @classmethod
    def _missing_(cls, value: object) -> GradientSyncMode | None:
        return next((mode for mode in cls if mode.value == str(value).lower()), None)


def resolve_sync_mode(mode: object = "auto", *, finds_unused_parameters: bool = False) -> GradientSyncMode:
    """Return the mode of a name; `"auto"` depends on whether DDP looks for unused parameters."""
    if isinstance(mode, GradientSyncMode):
        return mode
    names = ("auto", *(mode.value for mode in GradientSyncMode))
    name = check_name("sync_mode", mode, names, "a GradientSyncMode or its name")
    if name == "auto":
        name = "multi_auto_sync" if finds_unused_parameters else "single_auto_sync"
    return GradientSyncMode(name)


def check_weighting(weighting: object) -> str | None:
    """Return the name of a gradient weighting; None for no weighting."""
    expected = "'samples', 'logged' or None"
    return None if weighting is None else check_name("gradient_weighting", weighting, WEIGHTINGS, expected)


def check_sync_options(
    mode: GradientSyncMode,
    hook: CommHook | None,
    period: int | None,
    weighting: str | None,
    *,
    is_static: bool,
) -> None:
    """Refuse a wrong period, and options that cannot work together; `is_static` is DDP's `static_graph`."""
    if period is not None:
        check_is_a("model_averaging_period", period, int, "a number of steps")
        check_minimum("model_averaging_period", period, 1)
    if (period is None) == (hook is not None and hook.is_local_sgd):
        raise ConfigurationError(
            message="model_averaging_period is needed for post-local SGD, and for nothing else.",
            facts=f"comm_hook is {None if hook is None else hook.name!r}, model_averaging_period {period!r}.",
            remedy='DDPStrategy(comm_hook="post_localsgd", model_averaging_period=4), or neither of the two.',
        )
    needs_ddp = "static_graph=True" if is_static else None
    if hook is not None:
        needs_ddp = f"comm_hook {hook.name!r}"
    if needs_ddp and mode is GradientSyncMode.FORCED_SYNC:
        raise ConfigurationError(
            message=f'{needs_ddp} cannot work with sync_mode="forced_sync".',
            facts="DDP calls hooks and records static graphs where it averages gradients itself.",
            remedy='leave out one of them, or use sync_mode="single_auto_sync".',
        )
    if period is not None and mode is GradientSyncMode.MULTI_AUTO_SYNC:
        raise ConfigurationError(
            message='Post-local SGD cannot work with sync_mode="multi_auto_sync".',
            facts="its hook counts averages of gradients, and this mode averages in each microbatch; "
            "model averaging counts optimizer steps, so the two would start at different times. "
            '"auto" means this mode if find_unused_parameters=True.',
            remedy='DDPStrategy(sync_mode="single_auto_sync", ...).',
        )
    if weighting == "logged" and hook is not None and not hook.is_linear:
        raise ConfigurationError(
            message=f'gradient_weighting="logged" cannot work with comm_hook {hook.name!r}'
            f"{'' if hook.wrapper is None else ' and this comm_wrapper'}.",
            facts="the ranks average sums of gradients times weights, which are divided by the weights "
            "afterwards. Only a plain average, compressed or not, gives the right result; PowerSGD, for "
            "example, would keep errors in units of weights that differ in the next step.",
            remedy='gradient_weighting="samples", which works with every hook; or '
            'comm_hook="fp16_compress" or "bf16_compress".',
        )
