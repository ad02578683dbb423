"""Optimizers that compute gradients several times in a step, such as L-BFGS: they get a closure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.errors import ConfigurationError
from rankwise.precision import MasterWeightsPrecision
from rankwise.trainer.loops.optimizers import needs_closure

if TYPE_CHECKING:
    from rankwise.trainer.state import LoopContext


def takes_closures(context: LoopContext) -> bool:
    """Return whether the optimizer gets the closure, or steps after it.

    An optimizer that needs a closure gets it, such as L-BFGS, which computes gradients several times in a
    step. If the module defines `optimizer_step`, an optimizer that is not torch's gets it too, if precision
    and options allow that: it may call the closure twice. Raise ConfigurationError, on every rank, for
    options that exclude a needed closure.
    """
    needing = [type(each).__name__ for each in context.optimizers if needs_closure(each)]
    are_torchs = all(type(each).step.__module__.startswith("torch.") for each in context.optimizers)
    if not needing and (are_torchs or context.hooks.own("optimizer_step") is None):
        return False
    options, hook, precision = context.options, context.strategy.gradients.hook, context.strategy.precision
    is_16_bit = precision.scales_loss or isinstance(precision, MasterWeightsPrecision)
    excluding = (
        ("accumulate_grad_batches", options.accumulate_grad_batches > 1, "larger batches"),
        ("on_nonfinite", options.on_nonfinite is not None, "a check in training_step"),
        (f"precision={precision.name!r}", is_16_bit, '"bf16-mixed" or "32-true"'),
        ("comm_hook", hook is not None and hook.is_stateful, 'comm_hook="bf16_compress"'),
    )
    found = [(argument, remedy) for argument, is_set, remedy in excluding if is_set]
    if needing and found:
        (argument, remedy), name = found[0], needing[0]
        raise ConfigurationError(
            message=f"{argument} cannot be used with {name}, which computes several gradients in a step.",
            facts=f"{name}.step() needs a closure.",
            remedy=f"leave it out, or use {remedy} instead.",
        )
    return bool(needing) or not found
