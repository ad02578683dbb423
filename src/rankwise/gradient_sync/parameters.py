"""Which parameters' gradients are averaged, and which cannot be."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["ParametersOf", "check_parameters", "parameters_of", "trained_parameters"]

ParametersOf = Callable[["Optimizer"], Iterable[Tensor]]


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters that an optimizer updates."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def trained_parameters(
    module: nn.Module,
    optimizers: Iterable[Optimizer] | Optimizer = (),
    parameters_of: ParametersOf = parameters_of,
) -> list[Tensor]:
    """Return all parameters to average, in an order that is the same on every rank.

    Left out are those that require no gradient, and those that DDP was told to ignore. Where optimizers
    update copies, `parameters_of` returns the originals, which get the gradients.
    """
    inner = module.module if isinstance(module, DistributedDataParallel) else module
    ignored = set(getattr(inner, "_ddp_params_and_buffers_to_ignore", ()))
    found: dict[int, Tensor] = {}
    left_out: set[int] = set()
    for name, parameter in inner.named_parameters():
        if name in ignored:
            left_out.add(id(parameter))
        else:
            found[id(parameter)] = parameter
    for optimizer in [optimizers] if not isinstance(optimizers, Iterable) else optimizers:
        for parameter in parameters_of(optimizer):
            if id(parameter) not in left_out:
                found.setdefault(id(parameter), parameter)
    return [parameter for parameter in found.values() if parameter.requires_grad]


def check_parameters(module: nn.Module) -> None:
    """Make sure that DDP can average the gradients of a module.

    Raises:
        ConfigurationError: for parameters that are split over several ranks already.
    """
    tensors = sys.modules.get("torch.distributed.tensor")  # nobody has such a parameter without it
    if tensors is None:
        return
    names = [name for name, parameter in module.named_parameters() if isinstance(parameter, tensors.DTensor)]
    if names:
        raise ConfigurationError(
            message=f"{type(module).__name__} has parameters that are DTensors, which DDP cannot average.",
            facts=f"{', '.join(names[:5])}{', ...' if len(names) > 5 else ''}. A DTensor lies in pieces on "
            "the ranks of a device mesh, while DDP takes every rank to have the whole parameter.",
            remedy="average over the mesh itself: torch.distributed.fsdp.fully_shard, or replicate from "
            "torch.distributed._composable; or make them plain tensors with DTensor.full_tensor().",
        )
