"""Select the parameters whose gradients are averaged, and share the buffers of a wrapped module."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeGuard

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.utils import _sync_params_and_buffers
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from rankwise.errors import ConfigurationError
from rankwise.monitoring.heartbeat import blocked_in

if TYPE_CHECKING:
    from torch.optim import Optimizer

_backward_hooks = attrgetter("_backward_hooks")
_BUCKET_BYTES = 250 * 2**20  # what DDP takes for the same broadcast
ParametersOf = Callable[["Optimizer"], Iterable[Tensor]]
"""Returns the model's parameters that an optimizer updates, directly or as copies."""


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters that an optimizer updates."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def all_parameters(
    module: nn.Module,
    optimizers: Iterable[Optimizer] | Optimizer = (),
    parameters_of: ParametersOf = parameters_of,
) -> list[Tensor]:
    """Return the module's and the optimizers' parameters, in an order that is the same on every rank.

    Those that DDP is configured to ignore are left out. Where optimizers update copies, `parameters_of`
    returns the originals, which get the gradients.
    """
    inner = module.module if isinstance(module, DistributedDataParallel) else module
    ignored_names = set(getattr(inner, "_ddp_params_and_buffers_to_ignore", ()))
    named = list(inner.named_parameters())
    ignored = {id(parameter) for name, parameter in named if name in ignored_names}
    given = optimizers if isinstance(optimizers, Iterable) else [optimizers]
    found = chain((parameter for _, parameter in named), *map(parameters_of, given))
    return list({id(parameter): parameter for parameter in found if id(parameter) not in ignored}.values())


def trained_parameters(
    module: nn.Module,
    optimizers: Iterable[Optimizer] | Optimizer = (),
    parameters_of: ParametersOf = parameters_of,
) -> list[Tensor]:
    """Return those of `all_parameters` that require a gradient, which are averaged."""
    found = all_parameters(module, optimizers, parameters_of)
    return [parameter for parameter in found if parameter.requires_grad]


def check_parameters(module: nn.Module) -> None:
    """Raise for a wrapper, and for parameters that cannot be averaged: sharded, or without values yet."""
    if isinstance(module, DistributedDataParallel):
        raise ConfigurationError(
            message=f"setup_module() got a {type(module).__name__} that it did not return in this job.",
            facts="it averages gradients already, without the strategy's options.",
            remedy="pass the module within it; for a wrapper of your own override configure_ddp().",
        )
    if names := [name for name, parameter in _averaged(module).items() if is_lazy(parameter)]:
        raise ConfigurationError(
            message=f"{type(module).__name__} has lazy parameters without a shape, which cannot be averaged.",
            facts=_listed(names),
            remedy="run a dummy batch through the module before it is wrapped, in setup() or "
            "configure_model(): self(torch.zeros(1, 8)).",
        )
    tensors = sys.modules.get("torch.distributed.tensor")  # without it no such parameter exists
    kinds = () if tensors is None else tensors.DTensor
    if names := [name for name, parameter in module.named_parameters() if isinstance(parameter, kinds)]:
        raise ConfigurationError(
            message=f"{type(module).__name__} has parameters that are DTensors, which cannot be averaged.",
            facts=f"{_listed(names)}. A DTensor is split in pieces "
            "over the ranks of a device mesh; each rank must have the whole parameter here.",
            remedy="average over the mesh itself: torch.distributed.fsdp.fully_shard, or replicate from "
            "torch.distributed._composable; or make them plain tensors with DTensor.full_tensor().",
        )


def _averaged(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters by name, except those that DDP is configured to ignore."""
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    return {name: parameter for name, parameter in module.named_parameters() if name not in ignored}


def _listed(names: list[str]) -> str:
    return f"{', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"


def check_local_changes(module: nn.Module, strategy: object) -> None:
    """Raise for layers and hooks, other than the strategy's, that change parameters by a rank's own batch."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, kinds)}
    if names := [name for name, layer in layers.items() if layer.max_norm is not None]:
        raise ConfigurationError(
            message="max_norm of an embedding cannot work on several ranks.",
            facts=f"the forward pass of {_listed(names)} changes the rows of this rank's own batch only.",
            remedy="max_norm=None, and limit all rows in on_train_batch_start, under torch.no_grad(): "
            "layer.weight.copy_(torch.renorm(layer.weight, 2, 0, max_norm)).",
        )
    averaged = _averaged(module).items()
    if hooked := [name for name, parameter in averaged if _has_accumulate_hooks(parameter, strategy)]:
        raise ConfigurationError(
            message="register_post_accumulate_grad_hook() of a parameter cannot work on several ranks.",
            facts=f"hooks of {_listed(hooked)} get the gradients of this rank's batch, before the average.",
            remedy="use averaged gradients: in on_before_optimizer_step, configure_gradient_clipping or "
            "optimizer_step of the module.",
        )


def _has_accumulate_hooks(parameter: Tensor, strategy: object) -> bool:
    # Hooks that are methods of the strategy are its own way to average.
    hooks: Any = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return bool(hooks) and any(
        not str(getattr(hook, "__module__", "")).startswith("rankwise.")
        and getattr(hook, "__self__", None) is not strategy
        for hook in hooks.values()
    )


def hooked_parameters(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters with tensor hooks, which get the gradients of this rank's batch."""
    return list(filter(_backward_hooks, parameters))


def sparse_layers(module: nn.Module) -> list[str]:
    """Return the names of the layers whose gradients are sparse, as in `nn.Embedding(sparse=True)`."""
    return [
        name
        for name, layer in module.named_modules()
        if getattr(layer, "sparse", False) is True and any(one.requires_grad for one in layer.parameters())
    ]


def check_dense(module: nn.Module, averager: str) -> None:
    """Raise for layers with sparse gradients, which `averager` does not average."""
    if names := sparse_layers(module):
        raise ConfigurationError(
            message=f"{averager} cannot average sparse gradients over several ranks.",
            facts=f"of the layers {', '.join(names)}, which have sparse=True.",
            remedy='sparse=False; or automatic optimisation with DDPStrategy(sync_mode="single_auto_sync").',
        )


def share_buffers_next(module: nn.Module) -> None:
    """Make DDP broadcast rank 0's buffers before the next forward pass.

    DDP does so itself after it averaged gradients, but not after `no_sync`.
    """
    if isinstance(module, DistributedDataParallel):
        module.require_forward_param_sync = True


def gives_buffers(module: nn.Module) -> TypeGuard[DistributedDataParallel]:
    """Return whether DDP is configured to give all ranks rank 0's buffers, if there are any."""
    old: bool = getattr(module, "broadcast_buffers", False)  # until torch 2.12
    return isinstance(module, DistributedDataParallel) and bool(getattr(module, "forward_sync_buffers", old))


def shares_buffers(module: nn.Module) -> TypeGuard[DistributedDataParallel]:
    """Return whether DDP gives all ranks rank 0's buffers before the next forward pass."""
    return isinstance(module, DistributedDataParallel) and bool(module.will_sync_module_buffers())


def share_buffers(module: nn.Module) -> None:
    """Broadcast rank 0's buffers now, on every rank, unless DDP is configured not to."""
    share_buffers_next(module)
    if shares_buffers(module):
        with blocked_in("share_buffers"):
            module._sync_buffers()


def share_module(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Give every rank of a group the first one's buffers, and parameters that are averaged. Collective."""
    share_tensors((*_averaged(module).values(), *module.buffers()), group)


def share_tensors(tensors: Iterable[Tensor], group: dist.ProcessGroup | None) -> None:
    """Give every rank of a group the first one's values, except of lazy parameters. Collective."""
    shared = [tensor.detach() for tensor in tensors if not is_lazy(tensor)]
    every: Any = dist.group.WORLD
    with blocked_in("share_tensors"):
        _sync_params_and_buffers(every if group is None else group, shared, _BUCKET_BYTES, 0)
