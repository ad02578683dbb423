"""Ranks with different numbers of batches: the schedule of the batches, and padding steps.

In a zero-weight padding step a rank that has no batches left repeats one, which must change nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rankwise.data.batches import BatchSizes, sharded_sampler_of
from rankwise.errors import ConfigurationError, UnevenInputsError
from rankwise.gradient_sync import GradientSyncMode
from rankwise.gradient_sync.parameters import trained_parameters
from rankwise.process_group.interception import Call, own_calls_intercepted
from rankwise.seed import get_random_state, set_random_state
from rankwise.stores.waiting import StoreCounter
from rankwise.trainer.metrics.metric_objects import metric_objects, set_states, states_of

if TYPE_CHECKING:
    from rankwise.strategies import Strategy
    from rankwise.trainer.data.train_data import TrainData
    from rankwise.trainer.state import LoopContext

_LOADER = "The training loader"
_END: Any = object()
_NOTHING = nullcontext()
Batches = Iterator[tuple[Any, bool]]


@final
class BatchSchedule:
    """Yield this rank's training batches, the same number on every rank.

    If the numbers of batches are known, the ranks compare them once before the epoch. Otherwise (iterable
    data) they count before each step, in the store, how many ranks have a batch left. `policy` is the
    Trainer's `uneven_inputs`: what happens where the numbers differ.

    Attributes:
        loader: this rank's part of the loader.
        num_batches: the number of batches of the epoch on every rank, padding included; `inf` if unknown.
        is_counted: whether the ranks count before each step how many have a batch left.
        num_real: how many ranks have the last batch, where they are counted.
        is_padding: whether the last batch is a zero-weight padding step on this rank.
        has_padding: whether the last batch is a zero-weight padding step on any rank.
    """

    def __init__(self, strategy: Strategy, module: nn.Module, share: TrainData, policy: str) -> None:
        self._strategy = strategy
        self._policy = policy
        self._module = module
        self._share = share
        self._lengths: tuple[float, ...] = (share.num_batches,)
        self._shortest = share.num_batches
        self.is_counted = False
        self.num_real = 1
        self._counter: StoreCounter | None = None
        self.loader = share.loader
        self.num_batches = share.num_batches
        self.is_padding = self.has_padding = False

    @property
    def num_ranks(self) -> int:
        """The number of ranks that share the data."""
        return len(self._lengths)

    def ends_by_rank(self, end: int, num_replicas: int) -> list[int]:
        """Return for each rank the number after its last batch before batch `end`."""
        is_known = len(self._lengths) == num_replicas
        return [int(min(length, end)) for length in self._lengths] if is_known else [end] * num_replicas

    def use(self, share: TrainData) -> None:
        """Yield the batches of other data from the next epoch on."""
        self._share, self.loader = share, share.loader

    def agree(self) -> float:
        """Compare the ranks' numbers of batches of the next epoch, and return the common number.

        Collective: every rank must call this, and raises when the policy does not allow the numbers.
        """
        self._check_lengths_of_several()
        numbers = self._strategy.all_gather_object((self._share.num_batches, self._share.is_certain))
        self._lengths, certain = zip(*numbers, strict=True)
        is_uneven = len(set(self._lengths)) > 1 and (self._policy == "error" or 0 in self._lengths)
        if is_uneven if all(certain) else any(certain):
            raise UnevenInputsError(_LOADER, tuple(_shown(*number) for number in numbers))
        self.is_counted = not (all(certain) if len(numbers) > 1 else self._share.is_exact)
        if not all(certain) and len(numbers) > 1:
            self._counter = StoreCounter(self._strategy.data_parallel_group, self._strategy.timeout)
        self._shortest = min(self._lengths)
        self.num_batches = (min if self._policy == "truncate" else max)(self._lengths)
        return self.num_batches

    def _check_lengths_of_several(self) -> None:
        """Raise if one of several loaders has another length on another rank: batches would not match."""
        if not self._share.lengths:
            return
        by_rank = self._strategy.all_gather_object(self._share.lengths)
        for number, lengths in enumerate(zip(*by_rank, strict=True)):
            if len(set(lengths)) > 1:
                shown = tuple(_shown(length, is_certain=True) for length in lengths)
                raise UnevenInputsError(f"Training loader {number} of several", shown)

    def batch_sizes(self) -> BatchSizes | None:
        """Return the sizes of all ranks' batches; None if a rank cannot compute the others'."""
        return self._share.batch_sizes()

    def batches(self, own: Iterator[Any], done: int = 0) -> Batches:
        """Yield the batches that this rank takes, each with whether it is the last of the epoch.

        `own` are this rank's batches that are left, after the `done` batches of the epoch that it has run.
        """
        self.is_padding = self.has_padding = False
        return self._counted(own, done) if self.is_counted else self._known(own, done)

    def weight(self, first: int, end: int) -> float:
        """Return the factor that makes the ranks' average the mean over all real batches of a window.

        The window is from batch `first` to before `end`. The ranks' numbers of batches must be known.
        """
        if self.is_padding:
            return 0.0
        if end <= self._shortest:  # every rank has all of them
            return 1 / (end - first)
        real = sum(max(0.0, min(length, end) - first) for length in self._lengths)
        return self.num_ranks / real

    def preserve_state(self, block: AbstractContextManager[None]) -> AbstractContextManager[None]:
        """Return the block of a batch; after a padding step it also restores buffers and random state."""
        if not self.is_padding:
            return block
        return _nested(preserve_state(self._module, self._strategy.root_device), block)

    def call_with_batch(self, hook: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call a hook of training batches, unless this rank has none.

        Collectives are refused where another rank does not call it.
        """
        if self.is_padding:
            return None
        if not self.has_padding:
            return function(*args)
        with own_calls_intercepted(partial(self._refuse, hook), also_ours=True):
            return function(*args)

    def call_method(self, wrapped: nn.Module, step: str, *args: Any) -> Any:
        """Call a step in which some ranks repeat a batch; refuse collectives: they would exchange it."""
        with own_calls_intercepted(partial(self._refuse, step)):
            return self._strategy.call_method(wrapped, step, *args)

    def _refuse(self, where: str, call: Call) -> None:
        raise ConfigurationError(
            message=f"{call.name} in {where}, in a step in which some ranks have no batch left.",
            facts=f"{call.where}; with uneven_inputs='join' they repeat a batch at a weight of 0, and do not "
            "call hooks of batches.",
            remedy='uneven_inputs="error" or "truncate"; or call it in a hook of epochs.',
        )

    def _known(self, own: Iterator[Any], done: int) -> Batches:
        """Yield the batches where every rank's number of batches is known."""
        total, batch = int(self.num_batches), _END
        mine, shortest = min(total, int(self._share.num_batches)), self._shortest
        for number in range(done + 1, total + 1):
            if number > shortest:
                self.is_padding, self.has_padding = number > mine, True
            if not self.is_padding:
                batch = next(own, _END)
                if batch is _END:
                    length = f"{self._share.num_batches:g} batches"
                    raise ConfigurationError(
                        message=f"{_LOADER} has a length of {length}, but it ended after {number - 1}.",
                        remedy="return the number of batches from __len__ of its sampler or batch sampler.",
                    )
            elif batch is _END:
                batch = self._any_batch()
            yield batch, number == total
        self.is_padding = self.has_padding = False

    def _counted(self, own: Iterator[Any], done: int) -> Batches:
        """Yield the batches where the ranks count before each step how many have one; loads one ahead."""
        upcoming = next(own, _END)
        num_real = self._count(done, upcoming)
        if not num_real or (num_real < self.num_ranks and not (done and self._policy == "join")):
            if num_real:
                raise self._uneven_error(done, upcoming)
            raise no_batch_error(f"it gave no batch{f' after the {done} of an earlier run' * (done > 0)}.")
        batch, number, is_last, num_ranks = _END, done, False, self.num_ranks
        while not is_last:
            self.is_padding, self.num_real = upcoming is _END, num_real
            self.has_padding = num_real < num_ranks
            if not self.is_padding:
                batch = upcoming
            elif batch is _END:
                batch = self._any_batch()
            number += 1
            upcoming = next(own, _END)
            num_real = self._count(number, upcoming)
            if 0 < num_real < num_ranks and self._policy == "error":
                raise self._uneven_error(number, upcoming)
            is_last = num_real < (num_ranks if self._policy != "join" else 1)
            yield batch, is_last
        self.is_padding = self.has_padding = False

    def _count(self, number: int, upcoming: Any) -> int:
        """Return how many ranks have a batch left after `number` batches."""
        has_one = upcoming is not _END
        return int(has_one) if self._counter is None else self._counter.count(number, is_for=has_one)

    def _uneven_error(self, number: int, upcoming: Any) -> UnevenInputsError:
        """Return the error where only some ranks have a batch left after `number` batches. Collective."""
        found = str(number) if upcoming is _END else f"more than {number}"
        return UnevenInputsError(_LOADER, tuple(self._strategy.all_gather_object(found)))

    def _any_batch(self) -> Any:
        """Return a batch for a rank that continues from a checkpoint written during its padding steps."""
        if self._share.replayed is not None:
            return self._share.replayed
        sampler = sharded_sampler_of(self.loader)
        with preserve_state(self._module, self._strategy.root_device), ExitStack() as stack:
            if sampler is not None:  # its position is the end
                stack.callback(setattr, sampler, "skip", sampler.skip)
                sampler.skip = 0
            for batch in self.loader:
                return batch
        raise no_batch_error(f"global_rank={self._strategy.global_rank} has none, not even to repeat it.")


def no_batch_error(facts: str) -> ConfigurationError:
    """Return the error for an epoch without a batch on any rank."""
    return ConfigurationError(
        message=f"{_LOADER} has no batch for this epoch.",
        facts=facts,
        remedy="give it data that can be read again in each epoch, which a generator cannot; or, for no "
        "training, limit_train_batches=0.",
    )


def _shown(length: float, is_certain: bool) -> str:
    if not is_certain:
        return "unknown"
    return "endless" if math.isinf(length) else str(int(length))


# ------------------------------------------------------------------ padding steps


@contextmanager
def preserve_state(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore the module's buffers and metric objects, and all random state, after the block."""
    buffers = [
        (submodule, name, buffer, buffer.detach().clone())
        for submodule in module.modules()
        for name, buffer in submodule._buffers.items()
        if buffer is not None
    ]
    metrics = metric_objects(module)
    states = states_of(metrics)
    random_state = get_random_state(device)
    yield
    set_random_state(random_state, device)
    set_states(metrics, states)
    with torch.no_grad():
        for submodule, name, buffer, before in buffers:
            submodule._buffers[name] = buffer  # the block may have replaced it
            buffer.copy_(before)


@contextmanager
def _nested(outer: AbstractContextManager[None], inner: AbstractContextManager[None]) -> Iterator[None]:
    with outer, inner:
        yield


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

    def __init__(self, context: LoopContext) -> None:
        self._context = context
        self._strategy = strategy = context.strategy
        is_forced = strategy.gradients.mode is GradientSyncMode.FORCED_SYNC
        is_by_ddp = not is_forced and isinstance(context.wrapped, DistributedDataParallel)
        self._must_agree = is_by_ddp and bool(context.wrapped.find_unused_parameters)
        self._parameters: list[Tensor] = []
        self._used: set[int] | None = None  # numbers of parameters; None until a rank pads in this window

    def separate(self, is_padding: bool) -> AbstractContextManager[None]:
        """Return the context for the backward pass of a batch that is a padding step on some rank.

        It is inside of the gradient synchronisation. `is_padding` is whether it is one on this rank.
        """
        if self._must_agree:
            return self._record_used(is_padding)
        return self._discard_new_gradients() if is_padding else _NOTHING

    @contextmanager
    def _discard_new_gradients(self) -> Iterator[None]:
        """Discard the gradients that the padding step creates, and which DDP does not average."""
        with discard_new_gradients(self._strategy.gradients.averaged_later(self._context.wrapped)):
            yield

    @contextmanager
    def _record_used(self, is_padding: bool) -> Iterator[None]:
        """Record the parameters that this rank uses for a real batch."""
        if self._used is None:  # no rank has padded in this window before
            parameters_of = self._strategy.precision.model_parameters
            context = self._context
            self._parameters = trained_parameters(context.wrapped, context.optimizers, parameters_of)
            numbered = enumerate(self._parameters)
            self._used = {number for number, parameter in numbered if parameter.grad is not None}
        used = self._used
        with ExitStack() as handles:
            for number, parameter in () if is_padding else enumerate(self._parameters):
                handles.enter_context(
                    parameter.register_post_accumulate_grad_hook(lambda _, number=number: used.add(number))
                )
            yield

    def end_window(self) -> None:
        """Remove averaged gradients that only padding steps caused. Collective: every rank must call this."""
        if self._used is None:
            return
        used, self._used = self._used, None
        flags = torch.zeros(len(self._parameters), device=self._strategy.root_device)
        flags[list(used)] = 1
        counts = self._strategy.all_reduce(flags, reduce_op="sum").tolist()
        for parameter, count in zip(self._parameters, counts, strict=True):
            if not count:
                parameter.grad = None
