"""Zero-weight padding steps: a rank that has no batches left repeats one, which must change nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rankwise.gradient_sync import GradientSyncMode
from rankwise.gradient_sync.parameters import trained_parameters
from rankwise.seed import get_random_state, set_random_state
from rankwise.trainer.metrics import is_metric_object

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from rankwise.trainer.state import StageContext


@contextmanager
def preserve_state(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore the module's buffers and metric objects, and all random state, after the block."""
    buffers = [
        (submodule, name, buffer, buffer.detach().clone())
        for submodule in module.modules()
        for name, buffer in submodule._buffers.items()
        if buffer is not None
    ]
    metrics = [(metric, _metric_state(metric)) for metric in module.modules() if is_metric_object(metric)]
    random_state = get_random_state(device)
    yield
    set_random_state(random_state, device)
    for metric, state in metrics:
        for name, value in state.items():
            setattr(metric, name, value)
    with torch.no_grad():
        for submodule, name, buffer, before in buffers:
            submodule._buffers[name] = buffer  # the block may have replaced it
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
    """After the block, remove the gradients of parameters that had none before it."""
    bare = [parameter for parameter in parameters if parameter.grad is None]
    yield
    for parameter in bare:
        parameter.grad = None


@final
class PaddingGradients:
    """Remove the gradients of parameters that only padding steps have used in a window.

    A model may use only some of its parameters for a batch. In one process, a parameter that no batch has
    used has no gradient, and the optimizer skips it. With a gradient of 0 instead, momentum and weight decay
    would still change the parameter.

    Where gradients are averaged after the backward passes, a rank discards the gradients that its padding
    step has created. Where DDP averages them during the backward pass and searches for unused parameters, the
    ranks agree after the window on the parameters that real batches have used. This takes one small
    all-reduce, in windows with padding steps only.
    """

    def __init__(self, context: StageContext) -> None:
        strategy, wrapped = context.strategy, context.wrapped
        self._strategy = strategy
        parameters_of = strategy.precision.model_parameters
        self._parameters = trained_parameters(wrapped, context.optimizers, parameters_of)
        is_forced = strategy.gradients.mode is GradientSyncMode.FORCED_SYNC
        self._is_averaged_later = is_forced or not isinstance(wrapped, DistributedDataParallel)
        self._must_agree = not self._is_averaged_later and bool(wrapped.find_unused_parameters)
        self._used: set[int] | None = None  # numbers of parameters; None until a rank pads in this window

    def begin_window(self) -> None:
        """Begin a window, after its gradients are cleared."""
        self._used = None

    def separate(self, *, is_padding: bool, has_padding: bool) -> AbstractContextManager[None]:
        """Return the context for a batch's forward and backward pass, inside of the gradient synchronisation.

        `is_padding` is whether the batch is a padding step on this rank, `has_padding` whether on any rank.
        """
        if has_padding and self._must_agree:
            return self._record_used(is_padding)
        if is_padding and self._is_averaged_later:
            return discard_new_gradients(self._parameters)
        return nullcontext()

    @contextmanager
    def _record_used(self, is_padding: bool) -> Iterator[None]:
        """Record the parameters that this rank uses for a real batch."""
        numbered = list(enumerate(self._parameters))
        if self._used is None:  # no rank has padded in this window before
            self._used = {number for number, parameter in numbered if parameter.grad is not None}
        used = self._used
        with ExitStack() as handles:
            for number, parameter in [] if is_padding else numbered:
                handles.enter_context(
                    parameter.register_post_accumulate_grad_hook(lambda _, number=number: used.add(number))
                )
            yield

    def end_window(self) -> None:
        """Remove the averaged gradients that only padding steps have caused.

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
