"""`gradient_sync_context`: the block around a microbatch's forward and backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rankwise.errors import InvalidTypeError
from rankwise.gradient_sync.buckets import reduce_gradients
from rankwise.gradient_sync.buffers import share_buffers_next
from rankwise.gradient_sync.modes import GradientSyncMode, resolve_sync_mode
from rankwise.gradient_sync.parameters import ParametersOf, parameters_of, trained_parameters
from rankwise.gradient_sync.unused import check_finished
from rankwise.gradient_sync.weight_carrier import WeightCarrier
from rankwise.gradient_sync.weights import WeightAccumulator, divide, no_gradient_came

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["gradient_sync_context", "synchronised"]

Pause = Callable[[nn.Module, bool], AbstractContextManager[Any]]

_begun: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # static graphs that torch has recorded


def gradient_sync_context(
    module: nn.Module,
    optimizers: Iterable[Optimizer] | Optimizer = (),
    is_final_microbatch: bool = True,
    mode: GradientSyncMode | str = "auto",
    group: dist.ProcessGroup | None = None,
) -> AbstractContextManager[None]:
    """Compute gradients in the block; after the window's last one they are averaged over the ranks.

    Works with any `DistributedDataParallel`, in any training loop; where nothing is distributed it does
    nothing, and with `forced_sync` the module need not be wrapped. When the block raises, nothing is reduced
    after it.

    Collective: every rank must enter it, with the same modes and parameters; in the window's last
    microbatch (with `multi_auto_sync` in each) the ranks wait for each other.

    Args:
        module: the wrapped module.
        optimizers: those of its parameters that the module does not list are averaged too by `forced_sync`.
        is_final_microbatch: whether the optimizers step next.
        mode: when gradients are averaged.
        group: for a module that is not wrapped, the ranks to average over; all of them by default.

    Raises:
        UnknownNameError: for a mode that there is not.
        InvalidTypeError: for a module that DDP should have wrapped, and has not.
        UnusedParametersError: when parameters had no part in the loss, though DDP counts on all.
    """
    finds_unused = bool(getattr(module, "find_unused_parameters", False))
    resolved = resolve_sync_mode(mode, finds_unused_parameters=finds_unused)
    return synchronised(module, optimizers, is_final_microbatch, resolved, pause=_paused, group=group)


@contextmanager
def synchronised(
    module: nn.Module,
    optimizers: Iterable[Optimizer] | Optimizer,
    is_final_microbatch: bool,
    mode: GradientSyncMode,
    *,
    pause: Pause,
    group: dist.ProcessGroup | None = None,
    weights: WeightAccumulator | None = None,
    carrier: WeightCarrier | None = None,
    parameters_of: ParametersOf = parameters_of,
) -> Iterator[None]:
    """Do what `gradient_sync_context` says, with weights, and with one's own way to hold DDP back."""
    is_reducing = _is_reducing(module, mode, is_final_microbatch)
    if weights is not None:
        weights.is_weighted = False
    before = carrier.before() if carrier is not None else None
    with pause(module, not is_reducing):
        yield
    if isinstance(module, DistributedDataParallel) and is_reducing:
        if carrier is not None:
            carrier.check_weighted()
        check_finished(module)
        if carrier is not None:
            carrier.check_after(before)
        if is_final_microbatch and weights is not None:
            _divide(module, weights, carrier)
    elif is_final_microbatch:
        _reduce_now(module, optimizers, mode, group, weights, parameters_of)
        share_buffers_next(module)
    if is_final_microbatch and weights is not None:
        weights.close()


def _divide(
    module: DistributedDataParallel, weights: WeightAccumulator, carrier: WeightCarrier | None
) -> None:
    """Divide what DDP has averaged by the weights that it has averaged with it."""
    if carrier is not None:
        carrier.divide()
    elif weights.is_used:
        if weights.num_reductions == 0:
            raise no_gradient_came()
        divide(trained_parameters(module), weights.averaged)


def _paused(module: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
    return module.no_sync() if enabled and isinstance(module, DistributedDataParallel) else nullcontext()


def _is_reducing(module: nn.Module, mode: GradientSyncMode, is_final_microbatch: bool) -> bool:
    """Return whether DDP is to reduce gradients in this microbatch."""
    if mode is GradientSyncMode.FORCED_SYNC:
        return False
    if is_final_microbatch or mode is GradientSyncMode.MULTI_AUTO_SYNC:
        return True
    # torch records a static graph in its first backward pass, and fails in one that reduces nothing.
    is_first = bool(getattr(module, "static_graph", False)) and module not in _begun
    if is_first:
        _begun.add(module)
    return is_first


def _reduce_now(
    module: nn.Module,
    optimizers: Iterable[Optimizer] | Optimizer,
    mode: GradientSyncMode,
    group: dist.ProcessGroup | None,
    weights: WeightAccumulator | None,
    parameters_of: ParametersOf,
) -> None:
    """Average what DDP has not, and divide it by its weights."""
    parameters = trained_parameters(module, optimizers, parameters_of)
    group = module.process_group if isinstance(module, DistributedDataParallel) else group
    weight = None if weights is None or not weights.is_used else weights.take()
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        if mode is not GradientSyncMode.FORCED_SYNC and parameters:
            raise InvalidTypeError(
                argument="module",
                value=type(module).__name__,
                expected="the module that setup_module() returned, which DDP has wrapped",
                remedy='module = strategy.setup_module(module), or mode="forced_sync".',
            )
        if parameters:
            weight = reduce_gradients(parameters, group, weight=weight)
    if weights is not None and weight is not None:
        weights.note(weight)
        divide(parameters, weight)
