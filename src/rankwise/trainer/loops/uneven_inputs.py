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

from rankwise.data.batches import sharded_sampler_of
from rankwise.errors import ConfigurationError, UnevenInputsError
from rankwise.gradient_sync import GradientSyncMode
from rankwise.gradient_sync.parameters import trained_parameters
from rankwise.process_group.interception import Call, own_calls_intercepted
from rankwise.seed import random_state_kept
from rankwise.stores.waiting import StoreCounter
from rankwise.trainer.metrics.metric_objects import states_kept

if TYPE_CHECKING:
    from rankwise.strategies import Strategy
    from rankwise.trainer.data.loader_shard import TrainData
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
    """

    def __init__(self, strategy: Strategy, module: nn.Module, share: TrainData, policy: str) -> None:
        self._strategy = strategy
        self._policy = policy
        self._module = module
        self.share = share  # may be replaced between epochs
        self.num_batches = share.num_batches  # of the epoch, on every rank, with padding; `inf` if unknown
        self.lengths: tuple[float, ...] = (share.num_batches,)  # of the epoch, on each rank
        self._shortest = share.num_batches
        self.is_counted = False  # whether the ranks count before each step how many have a batch left
        self.num_real = 1  # how many ranks have the last batch, where they are counted
        self._counter: StoreCounter | None = None
        # Whether the last batch is a zero-weight padding step on this rank, and on any rank:
        self.is_padding = self.has_padding = False

    def agree(self) -> float:
        """Return the next epoch's number of batches, or raise by the policy, on every rank. Collective."""
        self._check_lengths_of_several()
        numbers = self._strategy.all_gather_object((self.share.num_batches, self.share.is_certain))
        self.lengths, certain = zip(*numbers, strict=True)
        is_uneven = len(set(self.lengths)) > 1 and (self._policy == "error" or 0 in self.lengths)
        if is_uneven if all(certain) else any(certain):
            raise UnevenInputsError(_LOADER, tuple(_shown(*number) for number in numbers))
        self.is_counted = not (all(certain) if len(numbers) > 1 else self.share.is_exact)
        if not all(certain) and len(numbers) > 1:
            self._counter = StoreCounter(self._strategy.data_parallel_group, self._strategy.timeout)
        self._shortest = min(self.lengths)
        self.num_batches = (min if self._policy == "truncate" else max)(self.lengths)
        return self.num_batches

    def _check_lengths_of_several(self) -> None:
        """Raise if one of several loaders has another length on another rank: batches would not match."""
        if not self.share.lengths:
            return
        by_rank = self._strategy.all_gather_object(self.share.lengths)
        for number, lengths in enumerate(zip(*by_rank, strict=True)):
            if len(set(lengths)) > 1:
                shown = tuple(_shown(length, is_certain=True) for length in lengths)
                raise UnevenInputsError(f"Training loader {number} of several", shown)

    def batches(self, own: Iterator[Any], done: int = 0) -> Batches:
        """Yield what this rank takes of `own`, its batches after `done`, each with whether it is the last."""
        self.is_padding = self.has_padding = False
        return self._counted(own, done) if self.is_counted else self._known(own, done)

    def weight(self, first: int, end: int) -> float:
        """Return the factor that makes the ranks' average the mean of real batches, `first` to `end` - 1.

        The ranks' numbers of batches must be known.
        """
        if self.is_padding:
            return 0.0
        if end <= self._shortest:  # every rank has all of them
            return 1 / (end - first)
        real = sum(max(0.0, min(length, end) - first) for length in self.lengths)
        return len(self.lengths) / real

    def preserve_state(self) -> AbstractContextManager[None]:
        """Return a block of a batch that restores buffers and random state after a padding step."""
        return preserve_state(self._module, self._strategy.root_device) if self.is_padding else _NOTHING

    def call_with_batch(self, hook: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call a hook of training batches if this rank has one; refuse collectives if another has none."""
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
        mine, shortest = min(total, int(self.share.num_batches)), self._shortest
        for number in range(done + 1, total + 1):
            if number > shortest:
                self.is_padding, self.has_padding = number > mine, True
            if not self.is_padding:
                batch = next(own, _END)
                if batch is _END:
                    length = f"{self.share.num_batches:g} batches"
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
        if not num_real or (num_real < len(self.lengths) and not (done and self._policy == "join")):
            if num_real:
                raise self._uneven_error(done, upcoming)
            raise no_batch_error(f"it gave no batch{f' after the {done} of an earlier run' * (done > 0)}.")
        batch, number, is_last, num_ranks = _END, done, False, len(self.lengths)
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
        if self.share.replayed is not None:
            return self.share.replayed
        sampler = sharded_sampler_of(self.share.loader)
        with preserve_state(self._module, self._strategy.root_device), ExitStack() as stack:
            if sampler is not None:  # its position is the end
                stack.callback(setattr, sampler, "skip", sampler.skip)
                sampler.skip = 0
            for batch in self.share.loader:
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
    with random_state_kept(device), states_kept(module):
        yield
    with torch.no_grad():
        for submodule, name, buffer, before in buffers:
            submodule._buffers[name] = buffer  # the block may have replaced it
            buffer.copy_(before)


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

    Where gradients are averaged after the backward passes, a rank discards what its padding step has created.
    Where DDP averages them within, and searches for unused parameters, the ranks agree after a window with
    padding steps on the parameters that real batches have used. This takes one small all-reduce.
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
        """Return the block of a backward pass of a batch that is padding on some rank.

        It is inside of the gradient synchronisation. `is_padding`: whether it is padding on this rank.
        """
        if self._must_agree:
            return self._record_used(is_padding)
        if not is_padding:
            return _NOTHING
        return discard_new_gradients(self._strategy.gradients.averaged_later(self._context.wrapped))

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
