"""The order in which a backward pass reaches the parameters, recorded once and replayed when a run resumes.

`DistributedDataParallel` guesses the buckets of the first step, and makes the buckets of later steps by the
recorded order. The last bit of floating-point sums over three or more ranks depends on the buckets, so a
resumed run must use the later buckets from its first step on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rankwise.gradient_sync.parameters import sparse_layers

if TYPE_CHECKING:
    from rankwise.strategies import Strategy
    from rankwise.trainer.state import LoopContext

_ATTRIBUTE = "_rankwise_gradients_in_order"


def record_gradient_order(context: LoopContext) -> None:
    """Record the order of the next backward pass in `context.state.gradient_order`, unless it is known.

    In manual optimisation the wrapper does not average gradients, and needs no order.
    """
    module, order = context.module, context.state.gradient_order
    if context.strategy.world_size == 1 or order or not module.automatic_optimization:
        return
    for number, parameter in enumerate(_trainable(module)):
        _record_once(parameter, number, order)


def _record_once(parameter: Tensor, number: int, order: list[int]) -> None:
    def record(_: Tensor) -> None:
        order.append(number)
        handle.remove()

    handle = parameter.register_post_accumulate_grad_hook(record)


def replay_gradient_order(strategy: Strategy, wrapped: nn.Module, order: list[int]) -> None:
    """Run a backward pass with gradients of 0 that reaches the parameters in `order`. Collective."""
    module = strategy.unwrap_module(wrapped)
    parameters = _trainable(module)
    is_static = getattr(wrapped, "static_graph", False)  # later steps must have the graph of the first pass
    is_complete = sorted(order) == list(range(len(parameters)))
    if module is wrapped or is_static or not is_complete:
        return
    sparse = {id(one) for name in sparse_layers(module) for one in module.get_submodule(name).parameters()}

    def touch() -> Tensor:
        total = torch.zeros((), device=strategy.root_device)
        for number in reversed(order):  # the backward pass reaches the last term first
            parameter: Tensor = parameters[number]
            if id(parameter) in sparse:  # its gradient must be sparse here, too
                row = torch.zeros(1, dtype=torch.long, device=parameter.device)
                parameter = nn.functional.embedding(row, parameter, sparse=True)
            total = total + parameter.sum().abs().float() * 0
        return total

    module.__dict__[_ATTRIBUTE] = touch  # call_method takes a name; not in nn.Module's registries
    try:
        touched = strategy.call_method(wrapped, _ATTRIBUTE)
        strategy.gradients.reach_carrier(wrapped, touched).backward()
    finally:
        del module.__dict__[_ATTRIBUTE]
    for parameter in parameters:
        parameter.grad = None


def _trainable(module: Any) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]
