"""`ShardedSampler`: one rank's part of a stream of indices; `LimitedSampler`: a sampler that ends early."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, cycle, islice
from typing import Any, Literal, final

import torch
from torch.utils.data import Sampler

from rankwise.data.random_state import isolated_random_state, mixed_seed

__all__ = [
    "LimitedSampler",
    "ShardedSampler",
    "Uneven",
    "has_length",
    "own_generators",
    "own_seed",
    "set_epoch_of",
    "with_wrapped",
]

Uneven = Literal["pad", "drop", "keep"]
_PART = 1024  # items of an endless stream that are drawn at a time


@final
class ShardedSampler(Sampler[Any]):
    """Yield every `num_replicas`-th item of `sampler`, from number `rank` on.

    Every rank draws the whole stream, under the same seed and in a random state of its own, so the ranks
    agree on a shuffled order without talking to each other, and what else they draw is not disturbed. A
    base sampler with a `generator` of its own has it seeded likewise for the draw; `own_seed` is what the
    user seeded it with.

    Args:
        sampler: any sampler or batch sampler; what it yields is passed on as it is.
        num_replicas: over how many ranks the stream is split.
        rank: whose part this is.
        seed: with the epoch, gives the shuffled order; the same on all ranks.
        uneven: what happens to a stream that does not divide evenly. `"pad"` starts again from its beginning,
            `"drop"` leaves the rest out, `"keep"` lets the first ranks have one item more.

    Attributes:
        skip: how many items of the stream were taken already, by all ranks of an earlier run together.
    """

    def __init__(
        self, sampler: Any, num_replicas: int, rank: int, *, seed: int = 0, uneven: Uneven = "keep"
    ) -> None:
        self.sampler = sampler
        self.num_replicas = num_replicas
        self.rank = rank
        self.seed = seed
        self.uneven = uneven
        self.epoch = 0
        self.skip = 0
        self._drawn: list[Any] | None = None  # for the next pass, by `items_by_rank`

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, for another order; passed on to a base sampler that has epochs too."""
        self.epoch = epoch
        self._drawn = None
        set_epoch_of(epoch, self.sampler)

    def __iter__(self) -> Iterator[Any]:
        if self._drawn is None and not has_length(self.sampler):
            return self._dealt_one_by_one()
        stream = self._draw() if self._drawn is None else self._drawn
        self._drawn = None
        return self._dealt(stream, self.rank)

    def __len__(self) -> int:
        return self.length_of(self.rank)

    @property
    def is_exact(self) -> bool:
        """Whether the ranks together yield what the base sampler does, each item once."""
        return self.uneven == "keep"

    def length_of(self, rank: int) -> int:
        """Return how many items a rank takes."""
        return len(range(rank, self._padded(len(self.sampler)), self.num_replicas))

    def items_by_rank(self) -> list[list[Any]]:
        """Return what each rank takes in the next pass, which then yields exactly that."""
        self._drawn = self._draw()
        return [list(self._dealt(self._drawn, rank)) for rank in range(self.num_replicas)]

    def _dealt(self, stream: list[Any], rank: int) -> Iterator[Any]:
        padded = islice(cycle(stream), self.skip, self.skip + self._padded(len(stream)))
        return islice(padded, rank, None, self.num_replicas)

    def _draw(self) -> list[Any]:
        with isolated_random_state((self.seed + self.epoch) % 2**63, *own_generators(self.sampler)):
            return list(self.sampler)

    def _dealt_one_by_one(self) -> Iterator[Any]:
        """Deal out a stream of unknown length, which may be endless."""
        stream = islice(self._draw_in_parts(), self.skip, None)
        first: list[Any] = []
        while group := list(islice(stream, self.num_replicas)):
            first = first or group
            missing = self.num_replicas - len(group)
            if missing and self.uneven == "drop":
                return
            if missing and self.uneven == "pad":
                group += islice(cycle(first), missing)
            if self.rank < len(group):
                yield group[self.rank]

    def _draw_in_parts(self) -> Iterator[Any]:
        stream: Iterator[Any] | None = None
        for number in count():
            seed = mixed_seed(self.seed, self.epoch, number)
            with isolated_random_state(seed, *own_generators(self.sampler)):
                stream = iter(self.sampler) if stream is None else stream
                part = list(islice(stream, _PART))
            if not part:
                return
            yield from part

    def _padded(self, length: int) -> int:
        """Return how many items all ranks take together of what is left of a stream of `length`."""
        length = max(0, length - self.skip)
        rest = length % self.num_replicas
        if self.uneven == "keep" or rest == 0:
            return length
        return length - rest if self.uneven == "drop" else length - rest + self.num_replicas


def has_length(sampler: Any) -> bool:
    """Return whether a sampler knows how many items it yields."""
    try:
        len(sampler)
    except (TypeError, NotImplementedError):
        return False
    return True


def set_epoch_of(epoch: int, *samplers: Any) -> None:
    """Tell the epoch to samplers, and to those that they wrap, where they have epochs."""
    ddp_options: set[int] = set()
    for sampler in (inner for outer in samplers for inner in with_wrapped(outer)):
        if id(sampler) not in ddp_options and callable(set_epoch := getattr(sampler, "set_epoch", None)):
            set_epoch(epoch)
        ddp_options.add(id(sampler))


def with_wrapped(sampler: Any) -> Iterator[Any]:
    """Yield a sampler, the one that it wraps, and so on."""
    passed: set[int] = set()
    while sampler is not None and id(sampler) not in passed:
        passed.add(id(sampler))
        yield sampler
        sampler = getattr(sampler, "sampler", None)


def own_generators(sampler: Any) -> Iterator[torch.Generator]:
    """Yield the generators that a sampler, or the one that it wraps, draws from."""
    for inner in with_wrapped(sampler):
        if isinstance(generator := getattr(inner, "generator", None), torch.Generator):
            yield generator


def own_seed(sampler: Any) -> int | None:
    """Return the seed of a sampler's order, where the user has given it a generator; otherwise None."""
    seeds = [generator.initial_seed() for generator in own_generators(sampler)]
    return mixed_seed(*seeds) if seeds else None


@final
class LimitedSampler(Sampler[Any]):
    """Yield the first `count` items of `sampler`."""

    def __init__(self, sampler: Any, count: int) -> None:
        self.sampler = sampler
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        return islice(self.sampler, self.count)

    def __len__(self) -> int:
        return min(self.count, len(self.sampler))
