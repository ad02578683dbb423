"""`BatchSchedule`: which batches the ranks take in an epoch, where some have more than others."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any, final

from torch import nn

from rankwise.data import sharded_sampler_of
from rankwise.errors import UnevenInputsError
from rankwise.stores.voting import StoreCounter
from rankwise.trainer.data_loaders import ended_early
from rankwise.trainer.loops.join import preserve_state

if TYPE_CHECKING:
    from rankwise.strategies import Strategy
    from rankwise.trainer.data_loaders import TrainDataShard

__all__ = ["BatchSchedule"]

_LOADER = "The training loader"
_END: Any = object()
Batches = Iterator[tuple[Any, bool]]


@final
class BatchSchedule:
    """Hand out this rank's training batches, as many as all ranks take: what differs is settled by a policy.

    Where numbers of batches are certain, the ranks agree on them before the epoch, and nothing is asked
    after that. Where they are not (iterable data), the ranks vote before each step, at the store.

    Args:
        module: what shadow steps leave as it is.
        share: this rank's training batches.
        policy: `uneven_inputs`.

    Attributes:
        num_batches: how many batches the epoch has on every rank, shadow steps included; `inf` for unknown.
        is_shadow: whether the batch handed out last is one that this rank repeats, to be weighted by 0.
        has_shadows: whether any rank's batch handed out last is such a one.
    """

    def __init__(self, strategy: Strategy, module: nn.Module, share: TrainDataShard, policy: str) -> None:
        self._strategy = strategy
        self._policy = policy
        self._module = module
        self._share = share
        self._lengths: tuple[float, ...] = (share.num_batches,)
        self._is_certain = True
        self._num_real = 1
        self._counter: StoreCounter | None = None
        self.num_batches = share.num_batches
        self.is_shadow = self.has_shadows = False

    @property
    def loader(self) -> Any:
        """This rank's part of the loader."""
        return self._share.loader

    def ends_by_rank(self, batch: int, num_replicas: int) -> list[int]:
        """Return for each rank the number behind its last batch before `batch`."""
        is_known = len(self._lengths) == num_replicas
        return [int(min(length, batch)) for length in self._lengths] if is_known else [batch] * num_replicas

    def agree(self) -> float:
        """Agree on the next epoch's number of batches, and return it.

        Collective: every rank must call this.

        Raises:
            UnevenInputsError: on every rank, when the policy does not allow for what there is.
        """
        facts = self._strategy.all_gather_object((self._share.num_batches, self._share.is_certain))
        self._lengths = tuple(length for length, _ in facts)
        self._is_certain = all(is_certain for _, is_certain in facts)
        if not self._is_certain and len(facts) > 1:
            self._counter = StoreCounter(self._strategy)
            _check_all_uncertain(facts)
        elif len(set(self._lengths)) > 1 and (self._policy == "error" or 0 in self._lengths):
            raise _uneven(self._lengths)
        self.num_batches = (min if self._policy == "truncate" else max)(self._lengths)
        return self.num_batches

    def batches(self, own: Batches, done: int = 0) -> Batches:
        """Yield the batches that this rank takes, each with whether it is the last of the epoch.

        Args:
            own: this rank's own.
            done: how many of the epoch's batches are done already.

        Raises:
            UnevenInputsError: on every rank, when some run out and the policy does not allow it.
            ConfigurationError: when this rank's loader has fewer batches than it says.
        """
        if len(self._lengths) == 1:
            return own
        return (
            self._counted(own, done) if self._counter is None or self._is_certain else self._voted(own, done)
        )

    def weight(self, first: int, ends_by_rank: int) -> float:
        """Return by what to multiply the current batch's loss, so that its window's batches count alike.

        Args:
            first: the window's first batch.
            ends_by_rank: the batch behind its last one.

        Returns:
            0 in a shadow step; otherwise what gives, once the ranks' gradients are averaged, the mean over
            all batches that ranks have in the window. Exact, but that numbers which are not certain are
            taken to be the current batch's for the whole window.
        """
        if self.is_shadow:
            return 0.0
        world_size = len(self._lengths)
        if world_size > 1 and not self._is_certain:
            return world_size / (self._num_real * (ends_by_rank - first))
        real = sum(max(0.0, min(length, ends_by_rank) - first) for length in self._lengths)
        return world_size / real if real else 1.0

    def preserve_state(self) -> AbstractContextManager[None]:
        """Return a context that puts buffers and random state back after a shadow step's passes."""
        return preserve_state(self._module, self._strategy.root_device) if self.is_shadow else nullcontext()

    # ------------------------------------------------------------------ internals

    def _counted(self, own: Batches, done: int) -> Batches:
        total, batch = int(self.num_batches), _END
        mine, shortest = min(total, int(self._share.num_batches)), min(self._lengths)
        for number in range(done + 1, total + 1):
            self.is_shadow, self.has_shadows = number > mine, number > shortest
            if not self.is_shadow:
                batch = next(own, (_END,))[0]
                if batch is _END:
                    raise ended_early(self._share.num_batches, number - 1)
            elif batch is _END:
                batch = self._any_batch()
            yield batch, number == total
        self.is_shadow = self.has_shadows = False

    def _voted(self, own: Batches, done: int) -> Batches:
        upcoming = next(own, (_END, True))[0]
        num_real = self._vote(done, upcoming)
        if num_real < len(self._lengths):
            self._check_none_left(num_real, done, upcoming)
            return
        batch, number, is_last = _END, done, False
        while not is_last:
            self.is_shadow, self._num_real = upcoming is _END, num_real
            self.has_shadows = num_real < len(self._lengths)
            batch = batch if self.is_shadow else upcoming
            number += 1
            upcoming = next(own, (_END, True))[0]
            num_real = self._vote(number, upcoming)
            if self._policy == "error":
                self._check_none_left(num_real, number, upcoming)
            is_last = num_real < (len(self._lengths) if self._policy != "join" else 1)
            yield batch, is_last
        self.is_shadow = self.has_shadows = False

    def _vote(self, number: int, upcoming: Any) -> int:
        """Return how many ranks have a batch of that number."""
        if self._counter is None:
            return 0 if upcoming is _END else 1
        return self._counter.count(number, is_for=upcoming is not _END)

    def _check_none_left(self, num_real: int, number: int, upcoming: Any) -> None:
        if 0 < num_real < len(self._lengths):
            found = str(number) if upcoming is _END else f"more than {number}"
            raise UnevenInputsError(_LOADER, tuple(self._strategy.all_gather_object(found)))

    def _any_batch(self) -> Any:
        """Return a batch for the shadow steps of a rank that goes on from a checkpoint written in them."""
        sampler = sharded_sampler_of(self.loader)
        with preserve_state(self._module, self._strategy.root_device), ExitStack() as stack:
            if sampler is not None:  # it stands behind its last item
                stack.callback(setattr, sampler, "skip", sampler.skip)
                sampler.skip = 0
            return next(iter(self.loader))


def _check_all_uncertain(facts: list[tuple[float, bool]]) -> None:
    if any(is_certain for _, is_certain in facts):
        found = tuple(str(length) if is_certain else "unknown" for length, is_certain in facts)
        raise UnevenInputsError(_LOADER, found)


def _uneven(lengths: tuple[float, ...]) -> UnevenInputsError:
    return UnevenInputsError(
        _LOADER, tuple("endless" if math.isinf(length) else str(int(length)) for length in lengths)
    )
