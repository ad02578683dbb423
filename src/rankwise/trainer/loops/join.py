"""Zero-weight padding steps for ranks that have run out of batches."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rankwise.gradient_sync import GradientSyncMode
from rankwise.gradient_sync.parameters import trained_parameters
from rankwise.trainer.metrics import is_metric_object

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from rankwise.trainer.loops.batch_schedule import BatchSchedule
    from rankwise.trainer.loops.context import LoopContext

__all__ = ["PaddingGradients", "preserve_state", "discard_new_gradients"]


@contextmanager
def preserve_state(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Put buffers and metric objects of the module, and all random state, back after the block."""
    buffers = [
        (submodule, name, buffer, buffer.detach().clone())
        for submodule in module.modules()
        for name, buffer in submodule._buffers.items()
        if buffer is not None
    ]
    devices = [] if device.type == "cpu" else [device]
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"))
        stack.callback(random.setstate, random.getstate())
        if numpy := sys.modules.get("numpy"):
            stack.callback(numpy.random.set_state, numpy.random.get_state())
        metrics = [(metric, _metric_state(metric)) for metric in module.modules() if is_metric_object(metric)]
        yield
    for metric, state in metrics:
        for name, value in state.items():
            setattr(metric, name, value)
    with torch.no_grad():
        for submodule, name, buffer, before in buffers:
            submodule._buffers[name] = buffer  # it may have been replaced, not changed
            buffer.copy_(before)


def _metric_state(metric: Any) -> dict[str, Any]:
    """Return what an update of a metric object changes."""
    states = {
        name: state.clone() if isinstance(state, Tensor) else list(state)
        for name, state in metric.metric_state.items()
    }
    return {**states, "_update_count": metric.update_count, "_computed": None}


@contextmanager
def discard_new_gradients(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Let backward passes in the block give no gradient to parameters that have none before it."""
    bare = [parameter for parameter in parameters if parameter.grad is None]
    yield
    for parameter in bare:
        parameter.grad = None


@final
class PaddingGradients:
    """Tell, in windows with shadow steps, the gradients of real batches from those of repeated ones.

    The two differ where a model does not use all of its parameters for every batch: one process leaves a
    parameter that no batch has used without a gradient, and its optimizer passes it by; at a gradient of 0
    momentum and weight decay would move it. Where gradients are averaged after the backward passes, a rank
    simply does not keep what its shadow step has added. Where DDP averages them meanwhile, searching for
    unused parameters, the ranks agree after the window on which ones real batches have used: one small
    all-reduce, in windows with shadow steps only.

    Args:
        context: of this rank.
        turns: whether ranks repeat batches.
    """

    def __init__(self, context: LoopContext, schedule: BatchSchedule) -> None:
        strategy, wrapped = context.strategy, context.wrapped
        self._strategy = strategy
        self._schedule = schedule
        parameters_of = strategy.precision.model_parameters
        self._parameters = trained_parameters(wrapped, context.optimizers, parameters_of)
        is_reduced_here = strategy.gradients.mode is GradientSyncMode.FORCED_SYNC
        self._is_reduced_here = is_reduced_here or not isinstance(wrapped, DistributedDataParallel)
        self._must_agree = not self._is_reduced_here and bool(wrapped.find_unused_parameters)
        self._used: set[int] | None = None  # numbers of parameters; None while no rank has repeated a batch

    def begin_window(self) -> None:
        """Start anew: gradients are cleared."""
        self._used = None

    def set_apart(self) -> AbstractContextManager[None]:
        """Return the block for a batch's passes; what averages its gradients is around it."""
        if not self._schedule.has_shadows:
            return nullcontext()
        if self._is_reduced_here:
            return discard_new_gradients(self._parameters) if self._schedule.is_shadow else nullcontext()
        return self._noting() if self._must_agree else nullcontext()

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Note the parameters that this rank uses, unless for a repeated batch."""
        if self._used is None:  # so far all batches of the window were real, on all ranks
            self._used = {
                number for number, parameter in enumerate(self._parameters) if parameter.grad is not None
            }
        used = self._used
        handles: list[Any] = []
        if not self._schedule.is_shadow:
            for number, parameter in enumerate(self._parameters):
                handles.append(
                    parameter.register_post_accumulate_grad_hook(lambda _, number=number: used.add(number))
                )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def end_window(self) -> None:
        """Take averaged gradients back that only repeated batches have caused.

        Collective: every rank must call this.
        """
        if self._used is None:
            return
        flags = torch.zeros(len(self._parameters), device=self._strategy.root_device)
        flags[list(self._used)] = 1
        counts = self._strategy.all_reduce(flags, reduce_op="sum").tolist()
        for parameter, count in zip(self._parameters, counts, strict=True):
            if not count:
                parameter.grad = None
