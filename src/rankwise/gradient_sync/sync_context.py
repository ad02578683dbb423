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
from rankwise.gradient_sync.modes import GradientSyncMode, resolve_sync_mode
from rankwise.gradient_sync.parameters import (
    ParametersOf,
    parameters_of,
    share_buffers_next,
    trained_parameters,
)
from rankwise.gradient_sync.unused import check_finished
from rankwise.gradient_sync.weights import WeightAccumulator, WeightCarrier, divide, missing_gradient_error

if TYPE_CHECKING:
    from torch.optim import Optimizer

NoSync = Callable[[nn.Module, bool], AbstractContextManager[Any]]
"""`no_sync(module, enabled)`: a block in which DDP does not average gradients if enabled."""

# Modules whose static graph DDP has recorded.
_recorded_graphs: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def gradient_sync_context(
    module: nn.Module,
    optimizers: Iterable[Optimizer] | Optimizer = (),
    is_final_microbatch: bool = True,
    mode: GradientSyncMode | str = "auto",
    group: dist.ProcessGroup | None = None,
) -> AbstractContextManager[None]:
    """Compute gradients in the block, and average them over the ranks after the window's last microbatch.

    Works with any `DistributedDataParallel` in any training loop. It does nothing without a process group,
    and with `forced_sync` the module need not be wrapped. If the block raises, nothing is averaged after
    it.

    Collective: every rank must enter it, with the same mode and parameters. In the window's last microbatch
    (with `multi_auto_sync` in each one) the ranks wait for each other.

    Args:
        module: the wrapped module.
        optimizers: `forced_sync` also averages those of their parameters that the module does not list.
        is_final_microbatch: whether the optimizers step next.
        mode: when gradients are averaged.
        group: for a module that is not wrapped, the ranks to average over; all of them by default.

    Raises:
        UnknownNameError: for an unknown mode.
        InvalidTypeError: for a module that is not wrapped with DDP, in a mode that needs DDP.
        UnusedParametersError: when the loss does not depend on some parameters, and DDP does not look for
            unused ones.
    """
    finds_unused = bool(getattr(module, "find_unused_parameters", False))
    resolved = resolve_sync_mode(mode, finds_unused_parameters=finds_unused)
    return synchronised(module, optimizers, is_final_microbatch, resolved, no_sync=_no_sync, group=group)


@contextmanager
def synchronised(
    module: nn.Module,
    optimizers: Iterable[Optimizer] | Optimizer,
    is_final_microbatch: bool,
    mode: GradientSyncMode,
    *,
    no_sync: NoSync,
    group: dist.ProcessGroup | None = None,
    weights: WeightAccumulator | None = None,
    carrier: WeightCarrier | None = None,
    parameters_of: ParametersOf = parameters_of,
) -> Iterator[None]:
    """Implement `gradient_sync_context`, with weights and with the caller's own `no_sync`."""
    is_reducing = _is_ddp_reducing(module, mode, is_final_microbatch)
    if weights is not None:
        weights.is_weighted = False
    before = carrier.before() if carrier is not None else None
    with no_sync(module, not is_reducing):
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
    """Divide the gradients that DDP has averaged by the averaged weights."""
    if carrier is not None:
        carrier.divide()
    elif weights.is_used:
        if weights.num_reductions == 0:
            raise missing_gradient_error()
        divide(trained_parameters(module), weights.averaged)


def _no_sync(module: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
    return module.no_sync() if enabled and isinstance(module, DistributedDataParallel) else nullcontext()


def _is_ddp_reducing(module: nn.Module, mode: GradientSyncMode, is_final_microbatch: bool) -> bool:
    """Return whether DDP averages gradients in this microbatch."""
    if mode is GradientSyncMode.FORCED_SYNC:
        return False
    if is_final_microbatch or mode is GradientSyncMode.MULTI_AUTO_SYNC:
        return True
    # DDP records a static graph in its first backward pass, and fails if that one does not average.
    is_first = bool(getattr(module, "static_graph", False)) and module not in _recorded_graphs
    if is_first:
        _recorded_graphs.add(module)
    return is_first


def _reduce_now(
    module: nn.Module,
    optimizers: Iterable[Optimizer] | Optimizer,
    mode: GradientSyncMode,
    group: dist.ProcessGroup | None,
    weights: WeightAccumulator | None,
    parameters_of: ParametersOf,
) -> None:
    """Average the gradients that DDP has not averaged, and divide them by the weights."""
    parameters = trained_parameters(module, optimizers, parameters_of)
    group = module.process_group if isinstance(module, DistributedDataParallel) else group
    weight = None if weights is None or not weights.is_used else weights.take()
    if parameters and dist.is_initialized() and dist.get_world_size(group) > 1:
        if mode is not GradientSyncMode.FORCED_SYNC:
            raise InvalidTypeError(
                argument="module",
                value=type(module).__name__,
                expected="the module that setup_module() returned, wrapped with DDP",
                remedy='module = strategy.setup_module(module), or mode="forced_sync".',
            )
        weight = reduce_gradients(parameters, group, weight=weight)
    if weights is not None and weight is not None:
        weights.store_mean(weight)
        divide(parameters, weight)
