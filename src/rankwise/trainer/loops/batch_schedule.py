"""`BatchSchedule`: the training batches that a rank takes where the ranks have different numbers of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any, final

from torch import nn

from rankwise.data.batches import sharded_sampler_of
from rankwise.errors import ConfigurationError, UnevenInputsError
from rankwise.stores.waiting import StoreCounter
from rankwise.trainer.loops.join import preserve_state

if TYPE_CHECKING:
    from rankwise.strategies import Strategy
    from rankwise.trainer.data_loaders import TrainDataShard

_LOADER = "The training loader"
_END: Any = object()
Batches = Iterator[tuple[Any, bool]]


@final
class BatchSchedule:
    """Yield this rank's training batches, the same number on every rank.

    If the numbers of batches are known, the ranks compare them once before the epoch. Otherwise (iterable
    data) they count before each step, in the store, how many ranks have a batch left.

    Args:
        strategy: the strategy.
        module: the module, which padding steps leave unchanged.
        share: this rank's training batches.
        policy: what happens where the numbers differ: the Trainer's `uneven_inputs`.

    Attributes:
        loader: this rank's part of the loader.
        num_batches: the number of batches of the epoch on every rank, padding included; `inf` if unknown.
        is_padding: whether the last batch is a zero-weight padding step on this rank.
        has_padding: whether the last batch is a zero-weight padding step on any rank.
    """

    def __init__(self, strategy: Strategy, module: nn.Module, share: TrainDataShard, policy: str) -> None:
        self._strategy = strategy
        self._policy = policy
        self._module = module
        self._share = share
        self._lengths: tuple[float, ...] = (share.num_batches,)
        self._is_known = True
        self._num_real = 1
        self._counter: StoreCounter | None = None
        self.loader = share.loader
        self.num_batches = share.num_batches
        self.is_padding = self.has_padding = False

    def ends_by_rank(self, end: int, num_replicas: int) -> list[int]:
        """Return for each rank the number after its last batch before batch `end`."""
        is_known = len(self._lengths) == num_replicas
        return [int(min(length, end)) for length in self._lengths] if is_known else [end] * num_replicas

    def agree(self) -> float:
        """Compare the ranks' numbers of batches of the next epoch, and return the common number.

        Collective: every rank must call this, and raises when the policy does not allow the numbers.
        """
        numbers = self._strategy.all_gather_object((self._share.num_batches, self._share.is_certain))
        self._lengths = tuple(length for length, _ in numbers)
        is_certain = all(is_certain for _, is_certain in numbers)
        self._is_known = is_certain if len(numbers) > 1 else self._share.is_exact
        if not is_certain and len(numbers) > 1:
            self._counter = StoreCounter(self._strategy.data_parallel_group, self._strategy.timeout)
            if any(is_certain for _, is_certain in numbers):
                found = (str(length) if is_certain else "unknown" for length, is_certain in numbers)
                raise UnevenInputsError(_LOADER, tuple(found))
        elif len(set(self._lengths)) > 1 and (self._policy == "error" or 0 in self._lengths):
            found = ("endless" if math.isinf(length) else str(int(length)) for length in self._lengths)
            raise UnevenInputsError(_LOADER, tuple(found))
        self.num_batches = (min if self._policy == "truncate" else max)(self._lengths)
        return self.num_batches

    def batches(self, own: Iterator[Any], done: int = 0) -> Batches:
        """Yield the batches that this rank takes, each with whether it is the last of the epoch.

        `own` are this rank's batches that are left, after the `done` batches of the epoch that it has run.
        """
        return self._known(own, done) if self._is_known else self._counted(own, done)

    def weight(self, first: int, end: int) -> float:
        """Return the factor of the current batch's loss in the window from batch `first` to before `end`.

        The ranks' gradients are averaged; the factor makes that the mean over all real batches of the window.
        It is exact where the numbers of batches are known. Elsewhere, the number of ranks that have the
        current batch is taken for the whole window.
        """
        if self.is_padding:
            return 0.0
        world_size = len(self._lengths)
        if not self._is_known:
            return world_size / (self._num_real * (end - first))
        real = sum(max(0.0, min(length, end) - first) for length in self._lengths)
        return world_size / real if real else 1.0

    def preserve_state(self) -> AbstractContextManager[None]:
        """Return a context that restores buffers and random state after the passes of a padding step."""
        return preserve_state(self._module, self._strategy.root_device) if self.is_padding else nullcontext()

    def _known(self, own: Iterator[Any], done: int) -> Batches:
        """Yield the batches where every rank's number of batches is known."""
        total, batch = int(self.num_batches), _END
        mine, shortest = min(total, int(self._share.num_batches)), min(self._lengths)
        for number in range(done + 1, total + 1):
            self.is_padding, self.has_padding = number > mine, number > shortest
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
        if num_real < len(self._lengths):
            self._check_none_left(num_real, done, upcoming)
            return
        batch, number, is_last = _END, done, False
        while not is_last:
            self.is_padding, self._num_real = upcoming is _END, num_real
            self.has_padding = num_real < len(self._lengths)
            batch = batch if self.is_padding else upcoming
            number += 1
            upcoming = next(own, _END)
            num_real = self._count(number, upcoming)
            if self._policy == "error":
                self._check_none_left(num_real, number, upcoming)
            is_last = num_real < (len(self._lengths) if self._policy != "join" else 1)
            yield batch, is_last
        self.is_padding = self.has_padding = False

    def _count(self, number: int, upcoming: Any) -> int:
        """Return how many ranks have a batch left after `number` batches."""
        has_one = upcoming is not _END
        return int(has_one) if self._counter is None else self._counter.count(number, is_for=has_one)

    def _check_none_left(self, num_real: int, number: int, upcoming: Any) -> None:
        if 0 < num_real < len(self._lengths):
            found = str(number) if upcoming is _END else f"more than {number}"
            raise UnevenInputsError(_LOADER, tuple(self._strategy.all_gather_object(found)))

    def _any_batch(self) -> Any:
        """Return a batch for a rank that continues from a checkpoint written during its padding steps."""
        sampler = sharded_sampler_of(self.loader)
        with preserve_state(self._module, self._strategy.root_device), ExitStack() as stack:
            if sampler is not None:  # its position is the end
                stack.callback(setattr, sampler, "skip", sampler.skip)
                sampler.skip = 0
            return next(iter(self.loader))
