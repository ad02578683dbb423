"""Average gradients with weights that are known only at run time (`gradient_weighting="logged"`).

`WeightAccumulator` sums a rank's weights, for one module. They are averaged together with the gradients,
either by a `WeightCarrier` in DDP's own buckets, or by the communication hook `WeightedReduction`.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rankwise.checks import check_value
from rankwise.errors import ConfigurationError, ProcessGroupError
from rankwise.gradient_sync.buckets import FULL_PRECISION, FlatGradients
from rankwise.gradient_sync.hook_registry import averaged
from rankwise.gradient_sync.parameters import trained_parameters
from rankwise.gradient_sync.unused import check_finished
from rankwise.process_group.collectives import all_reduce

if TYPE_CHECKING:
    import torch.distributed as dist

    from rankwise.gradient_sync.hook_registry import CommHookFunction

_CARRIER = "_rankwise_weight"


@final
@dataclass(eq=False)
class WeightUnit:
    """The unit in which all modules of a strategy count weights.

    Bounded weights keep weighted gradients about as large as gradients: they are divided by a unit, the same
    on all ranks: about the mean of the last window, rounded to a power of two so that dividing by it is
    exact. It changes only where no window has begun.
    """

    is_bounded: bool  # set it before the first weight
    group: dist.ProcessGroup | None = None  # the ranks that agree on the first unit
    num_windows: int = 0  # that have begun, over all modules
    _size: float | None = field(default=None, init=False)  # None until the first bounded weight that is not 0

    def counted(self, weight: Any) -> float:
        """Return a weight in units; collective for the first of bounded weights."""
        number = float(weight)
        check_value("weight", number, math.isfinite(number) and number >= 0, "a finite number from 0 on")
        if self.is_bounded and self._size is None:
            mean = all_reduce(number, self.group)
            self._size = _power_of_two(mean) if mean else None
        return number / (self._size or 1.0)

    def follow(self, mean: float) -> None:
        """Change the unit after a window, the mean of whose weights was `mean` units."""
        if self._size is not None and mean and not self.num_windows:
            self._size *= _power_of_two(mean)


@final
class WeightAccumulator:
    """Accumulates this rank's weights over a window of microbatches of one module.

    Every loss is multiplied by its weight, so the averaged gradients are divided by the mean of the weights;
    the result is the weighted average over all microbatches of all ranks.
    """

    is_weighted: bool  # whether a loss got a weight in this microbatch
    is_used: bool  # whether a loss got a weight in this window
    averaged: float | Tensor  # the mean over the ranks of the weights that a hook has sent in this window
    num_reductions: int  # how many buckets the hook has reduced in this window
    _pending: float

    def __init__(self, unit: WeightUnit, carrier: WeightCarrier | None = None) -> None:
        self._unit = unit
        self.carrier = carrier
        self._start_window()

    def add(self, number: float) -> Tensor | None:
        """Add a microbatch's weight, in units; return the zero to add to the loss, if there is a carrier."""
        zero = None if self.carrier is None else self.carrier.add(number, is_first=not self.is_used)
        self._unit.num_windows += not self.is_used
        self._pending += number
        self.is_weighted = self.is_used = True
        return zero

    def take(self) -> float:
        """Return the sum of the weights since the last call."""
        weight, self._pending = self._pending, 0.0
        return weight

    def store_mean(self, mean: float | Tensor) -> None:
        """Store the mean of the window's weights, when they were averaged without a hook."""
        if self._unit.is_bounded:
            self.averaged = mean.clone() if isinstance(mean, Tensor) else mean

    def check_averaged(self, wrapped: DistributedDataParallel, before: Any) -> None:
        """Check that the last backward pass averaged all; `before` is from the carrier, from before it."""
        if self.carrier is not None and not self.is_weighted:
            raise ConfigurationError(
                message='gradient_weighting="logged", but the loss that was reduced has no weight.',
                facts="the other ranks wait for it.",
                remedy="strategy.weighted_loss(loss, weight).backward()",
            )
        check_finished(wrapped)
        if self.carrier is not None:
            self.carrier.check_after(before)

    def divide(self, wrapped: DistributedDataParallel, others: Sequence[Tensor]) -> None:
        """Divide the gradients of a wrapped module, and of `others`, by the mean of the window's weights."""
        if self.carrier is not None:
            mean = self.carrier.mean()
            self.store_mean(mean)
            _divide_tensors([*self.carrier.gradients.pieces(), *_gradients_of(others)], mean)
        elif self.is_used:
            if self.num_reductions == 0:
                raise _missing_gradient_error()
            unique = {id(each): each for each in (*trained_parameters(wrapped), *others)}
            divide(unique.values(), self.averaged)

    def close(self) -> None:
        """End the window and start the next one."""
        if self.is_used:
            self._unit.num_windows -= 1
        if self._unit.is_bounded:
            self._unit.follow(float(self.averaged))
        self._start_window()

    def _start_window(self) -> None:
        self._pending = self.averaged = 0.0
        self.is_weighted = self.is_used = False
        self.num_reductions = 0


def _power_of_two(number: float) -> float:
    return math.ldexp(1.0, math.frexp(number)[1])


@final
class WeightCarrier:
    """An extra parameter whose gradient is the sum of the weights, so that DDP averages it in its buckets.

    The gradient is written before the backward pass, which adds zero to it, so loss scaling does not change
    it. DDP averages it in the first bucket, without a hook; after the window the other gradients are
    divided by it. The parameter is part of the user's module only while DDP collects the parameters.
    """

    def __init__(self, like: Tensor) -> None:
        """Create the parameter, with the dtype and device of `like`."""
        self.total = nn.Parameter(torch.zeros((), dtype=like.dtype, device=like.device))
        self.total.grad = torch.zeros_like(self.total)
        self._zero = torch.zeros_like(self.total)

    @classmethod
    def of(cls, module: nn.Module) -> WeightCarrier | None:
        """Return a carrier for a module; None if it has 16-bit parameters only."""
        precise = (each for each in trained_parameters(module) if each.dtype in FULL_PRECISION)
        return next(map(cls, precise), None)

    @contextmanager
    def attached_to(self, module: nn.Module, apart: Container[int] = ()) -> Iterator[None]:
        """Add the parameter to the module, which is wrapped in the block, without parameters in `apart`."""
        averaged = [parameter for parameter in trained_parameters(module) if id(parameter) not in apart]
        self._averaged = averaged or [self.total]
        self._probe = self._averaged[-1]  # its gradient shows whether DDP has averaged
        self.gradients = FlatGradients([*self._averaged, self.total])
        child = nn.Module()
        child.total = self.total
        module.add_module(_CARRIER, child)  # the last child, so that DDP's indices of the others stay
        try:
            yield
        finally:
            del module._modules[_CARRIER]

    def add(self, weight: float, *, is_first: bool) -> Tensor:
        """Add a weight to the window, which the first weight starts; return the zero to add to the loss."""
        total: Any = self.total.grad
        weights = total.detach()  # a hook that multiplies gradients by parameters gives it a graph
        if is_first:
            weights.fill_(weight)
        else:
            weights.add_(weight)
        return torch.add(self._zero, self.total, alpha=0)

    def gradient_of_probe(self) -> Any:
        """Return the state that `check_after` compares with."""
        gradient = self._probe.grad
        return gradient, None if gradient is None else gradient._version

    def check_after(self, before: Any) -> None:
        """Raise if DDP has not averaged the gradients, and the weight with them, since `before`."""
        gradient, version = self.gradient_of_probe()
        if gradient is not before[0] or version != before[1]:
            return
        used = [parameter for parameter in self._averaged if parameter.grad is not None]
        if gradient is not None or not used:
            raise _missing_gradient_error()
        self._probe = used[-1]  # the loss does not use the previous one, as with static_graph=True

    def mean(self) -> float | Tensor:
        """Return the averaged weight; on an accelerator a tensor, to wait for nothing."""
        total: Any = self.total.grad
        mean: float | Tensor = total.item() if total.is_cpu else total.clone()
        return mean


@final
@dataclass(eq=False)
class WeightedReduction:
    """A communication hook that averages buckets, and the ranks' weights with them.

    It serves wrappers that cannot use a `WeightCarrier`. The weight is one more element of the first bucket,
    which is sent in full precision, or is sent alone if that is sparse. Another hook, with `group` as its
    state, averages the other buckets.
    """

    weights: WeightAccumulator
    group: dist.ProcessGroup | None
    others: CommHookFunction

    def __call__(self, state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
        """Reduce a bucket of gradients."""
        weights = self.weights
        buffer: Tensor = bucket.buffer()
        weights.num_reductions += 1
        if bucket.index() == 0 and buffer.is_sparse:
            weights.averaged = weights.averaged + all_reduce(weights.take(), self.group)
        if bucket.index() > 0 or buffer.is_sparse:
            return self.others(self.group, bucket)
        length = buffer.numel()
        dtype = buffer.dtype if buffer.dtype in FULL_PRECISION else torch.float32
        sent = buffer.new_empty(length + 1, dtype=dtype)
        sent[:length] = buffer
        sent[length] = weights.take()

        def finish(done: torch.futures.Future[Tensor]) -> Tensor:
            weights.averaged = weights.averaged + sent[length]
            return buffer.copy_(sent[:length])

        return averaged(self.group, sent).then(finish)


def weighted(loss: Tensor, weight: float, zeros: Sequence[Tensor]) -> Tensor:
    """Return a loss times its weight, plus the zeros of the carriers that its backward pass must reach."""
    if not zeros:
        return loss * weight
    # Added last, so that the backward pass reaches them first: they are in DDP's first bucket.
    zero = sum(zeros[1:], zeros[0])
    return torch.add(zero if zero.device == loss.device else zero.to(loss.device), loss, alpha=weight)


@contextmanager
def local_gradients_kept(module: nn.Module, weights: WeightAccumulator | None) -> Iterator[None]:
    """Give parameters the gradients that they have in the block before DDP averages them."""
    carrier = None if weights is None else weights.carrier
    parameters = [*trained_parameters(module), *([] if carrier is None else [carrier.total])]
    local: dict[Tensor, Tensor] = {}

    def keep(parameter: Tensor) -> None:
        if parameter.grad is not None:
            local[parameter] = parameter.grad.clone()

    with ExitStack() as handles:
        for parameter in parameters:
            handles.enter_context(parameter.register_post_accumulate_grad_hook(keep))
        yield
    for parameter, gradient in local.items():
        if parameter.grad is not None:
            parameter.grad.copy_(gradient)


def divide(parameters: Iterable[Tensor], mean: float | Tensor) -> None:
    """Divide the averaged gradients of `parameters` by the mean of the window's weights, in place."""
    _divide_tensors(_gradients_of(parameters), mean)


def _gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients that exist."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _divide_tensors(gradients: list[Tensor], mean: float | Tensor) -> None:
    """Divide gradients in place; those of a mean of 0 are zeros, and stay.

    It waits for no device unless the gradients are on several.
    """
    is_there = isinstance(mean, Tensor) and all(gradient.device == mean.device for gradient in gradients)
    if isinstance(mean, Tensor) and is_there and not mean.is_cpu:
        divisor = mean.clamp_min(torch.finfo(mean.dtype).tiny)
        for dtype in {gradient.dtype for gradient in gradients}:  # torch has one kernel for each
            torch._foreach_div_([each for each in gradients if each.dtype == dtype], divisor)
    elif gradients and (number := float(mean)) != 0:
        torch._foreach_div_(gradients, number)


def _missing_gradient_error() -> ProcessGroupError:
    """Return the error for a window whose gradients, and the weights with them, were not averaged."""
    return ProcessGroupError(
        "A backward pass reached no parameter of the wrapped module, so this rank sent no weight; the "
        "others wait for it.",
        "compute the loss with what the wrapped module returns: loss = module(batch).",
    )
