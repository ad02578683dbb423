"""The order in which a backward pass reaches the parameters: noted once, and gone through again on resuming.

`DistributedDataParallel` sums its first step's gradients in the buckets that it guessed, and later ones' in
buckets made after that order. Sums of three or more numbers depend on the buckets, in the last bit: so a run
that goes on must have the later ones from its first step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from rankwise.strategies import Strategy
    from rankwise.trainer.loops.context import LoopContext

__all__ = ["record_gradient_order", "replay_gradient_order"]

_ATTRIBUTE = "_rankwise_gradients_in_order"


def record_gradient_order(context: LoopContext) -> None:
    """Note the order of the next backward pass in `context.gradient_order`, unless it is known.

    In manual optimisation the wrapper averages nothing, and needs no order.
    """
    module, order = context.module, context.gradient_order
    if context.strategy.world_size == 1 or order or not module.automatic_optimization:
        return
    for number, parameter in enumerate(_trainable(module)):
        _note_once(parameter, number, order)


def _note_once(parameter: Tensor, number: int, order: list[int]) -> None:
    def note(_: Tensor) -> None:
        order.append(number)
        handle.remove()

    handle = parameter.register_post_accumulate_grad_hook(note)


def replay_gradient_order(strategy: Strategy, wrapped: nn.Module, order: list[int]) -> None:
    """Reach the parameters in that order once, with gradients of zero, so that the wrapper knows it.

    Collective: every rank must call this, with the same order.
    """
    module = strategy.unwrap_module(wrapped)
    parameters = _trainable(module)
    is_static = getattr(wrapped, "static_graph", False)  # then the first step is taken for what all are like
    if (
        module is wrapped
        or is_static
        or _has_special_gradients(module)
        or sorted(order) != list(range(len(parameters)))
    ):
        return
    in_order = [parameters[number] for number in order]

    def touch() -> Tensor:
        total = torch.zeros((), device=strategy.root_device)
        for parameter in reversed(in_order):  # what is added last is reached first
            total = total + parameter.sum().float() * 0
        return total

    module.__dict__[_ATTRIBUTE] = touch  # call_method takes a name; past nn.Module's own registry
    try:
        touched = strategy.call_method(wrapped, _ATTRIBUTE)
        strategy.gradients.with_weights_of(wrapped, touched).backward()
    finally:
        del module.__dict__[_ATTRIBUTE]
    for parameter in parameters:
        parameter.grad = None


def _has_special_gradients(module: nn.Module) -> bool:
    is_sparse = any(getattr(submodule, "sparse", False) for submodule in module.modules())
    return is_sparse or any(parameter.is_complex() for parameter in module.parameters())


def _trainable(module: Any) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]
