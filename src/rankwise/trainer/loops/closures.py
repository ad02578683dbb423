"""Optimizers that compute gradients several times in a step, such as L-BFGS: they get a closure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.errors import ConfigurationError
from rankwise.precision import MasterWeightsPrecision
from rankwise.trainer.loops.optimizers import needs_closure

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankwise.trainer.state import LoopContext


def takes_closures(context: LoopContext) -> bool:
    """Return whether the optimizer gets the closure in automatic optimisation, or steps after it.

    An optimizer that needs a closure gets it. If the module defines `optimizer_step`, an optimizer that is
    not torch's gets it too, if precision and options allow that: it may call the closure twice.

    Raises:
        ConfigurationError: with options that cannot be used where a closure is needed; on every rank.
    """
    if any(needs_closure(optimizer) for optimizer in context.optimizers):
        _check_options(context)
        return True
    if context.hooks.own("optimizer_step") is None:
        return False
    are_torchs = all(type(each).step.__module__.startswith("torch.") for each in context.optimizers)
    return not (are_torchs or any(is_set for _, is_set, _ in _excluding(context)))


def _is_16_bit(context: LoopContext) -> bool:
    precision = context.strategy.precision
    return precision.scales_loss or isinstance(precision, MasterWeightsPrecision)


def _excluding(context: LoopContext) -> Iterator[tuple[str, bool, str]]:
    """Yield the arguments that exclude several backward passes in a step: name, whether it is set, remedy."""
    options, hook, precision = context.options, context.strategy.gradients.hook, context.strategy.precision
    yield from (
        ("accumulate_grad_batches", options.accumulate_grad_batches > 1, "larger batches"),
        ("on_nonfinite", options.on_nonfinite is not None, "a check in training_step"),
        (f"precision={precision.name!r}", _is_16_bit(context), '"bf16-mixed" or "32-true"'),
        ("comm_hook", hook is not None and hook.is_stateful, 'comm_hook="bf16_compress"'),
    )


def _check_options(context: LoopContext) -> None:
    name = next(type(optimizer).__name__ for optimizer in context.optimizers if needs_closure(optimizer))
    for argument, is_set, remedy in _excluding(context):
        if is_set:
            raise ConfigurationError(
                message=f"{argument} cannot be used with {name}, which computes several gradients in a step.",
                facts=f"{name}.step() needs a closure.",
                remedy=f"leave it out, or use {remedy} instead.",
            )
