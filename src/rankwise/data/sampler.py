"""`ShardedSampler`: one rank's part of a sampler's items; `LimitedSampler`: a sampler's first items."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from itertools import count, cycle, islice
from typing import Any, Literal, final

from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler

from rankwise.checks import check_minimum, check_value
from rankwise.seed import isolated_random_state, mixed_seed, random_generators_in, seed_of

Uneven = Literal["pad", "drop", "keep"]
_CHUNK = 1024  # number of items of an endless stream that are drawn at a time


def check_part(num_replicas: int, rank: int) -> None:
    """Raise InvalidArgumentError unless `rank` is one of `num_replicas` parts of the data."""
    check_minimum("num_replicas", num_replicas, 1)
    expected = f"a part from 0 to {num_replicas - 1}: there are num_replicas={num_replicas}"
    check_value("rank", rank, 0 <= rank < num_replicas, expected)


@final
class ShardedSampler(Sampler[Any]):
    """Yield every `num_replicas`-th item of `sampler`, starting at item `rank`.

    Every rank draws all items with the same seed, in an isolated random state. So all ranks get the same
    shuffled order without communication, and other random numbers do not change. Generators of torch, NumPy
    and Python that are attributes of the base sampler are seeded in the same way while drawing. `own_seed` is
    the user's seed.

    Args:
        sampler: any sampler or batch sampler; its items are yielded unchanged.
        num_replicas: the number of ranks.
        rank: the rank that gets this part.
        seed: determines the shuffled order, together with the epoch; the same on all ranks.
        uneven: what happens if the items do not divide evenly. `"pad"` repeats the first items, `"drop"`
            leaves out the last ones, `"keep"` gives the first ranks one item more.

    Attributes:
        skip: the number of items that all ranks of an earlier run have taken together.
        variant: numbers that change the order too; none by default.

    Raises:
        InvalidArgumentError: when there is no part `rank` of `num_replicas`.
    """

    def __init__(
        self, sampler: Any, num_replicas: int, rank: int, *, seed: int = 0, uneven: Uneven = "keep"
    ) -> None:
        check_part(num_replicas, rank)
        self.sampler = sampler
        self.num_replicas = num_replicas
        self.rank = rank
        self.seed = seed
        self.uneven = uneven
        self.epoch = 0
        self.skip = 0
        self.variant: tuple[int, ...] = ()
        self._drawn: Sequence[Any] | None = None  # before the next pass

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which changes the order; also in a base sampler that has `set_epoch`."""
        if epoch != self.epoch:
            self._drawn = None
        self.epoch = epoch
        set_epoch_of(epoch, self.sampler)

    def set_variant(self, variant: tuple[int, ...]) -> None:
        """Set the numbers that change the order in addition to the epoch."""
        if variant != self.variant:
            self._drawn = None
        self.variant = variant

    def __iter__(self) -> Iterator[Any]:
        if self._drawn is None and math.isinf(length_of(self.sampler)):
            return self._part_of_stream()
        items, self._drawn = self._drawn_ahead(), None
        return self._part_of(items, self.rank)

    def __len__(self) -> int:
        return self.length_of(self.rank)

    @property
    def is_exact(self) -> bool:
        """Whether the ranks together yield each item of the base sampler once."""
        return self.uneven == "keep"

    def length_of(self, rank: int) -> int:
        """Return the number of items of a rank."""
        return len(range(rank, self._total_length(len(self.sampler)), self.num_replicas))

    def items_by_rank(self) -> list[list[Any]]:
        """Return each rank's items in the next pass, which then yields exactly these."""
        items = self._drawn_ahead()
        return [list(self._part_of(items, rank)) for rank in range(self.num_replicas)]

    def order_digest(self) -> str | None:
        """Return a digest of all items of the next pass, which must be the same on every rank.

        None if the order cannot differ, as with torch's random and sequential samplers, or has no end.
        """
        inner = self.sampler
        while type(inner) in (BatchSampler, LimitedSampler):
            inner = inner.sampler
        if type(inner) in (RandomSampler, SequentialSampler) or math.isinf(length_of(self.sampler)):
            return None
        return hashlib.blake2b(repr(self._drawn_ahead()).encode(), digest_size=8).hexdigest()

    def _drawn_ahead(self) -> Sequence[Any]:
        """Draw the items of the next pass, unless that is done; those in sequence need no memory."""
        if self._drawn is None and type(self.sampler) is SequentialSampler:
            self._drawn = range(len(self.sampler))
        if self._drawn is None:
            seed = (self.seed + self.epoch) % 2**63
            seed = mixed_seed(seed, *self.variant) if self.variant else seed
            with isolated_random_state(seed, *own_generators(self.sampler)):
                self._drawn = list(self.sampler)
        return self._drawn

    def _part_of(self, items: Sequence[Any], rank: int) -> Iterator[Any]:
        """Yield a rank's items, in time that does not depend on the other ranks'."""
        places = range(self.skip + rank, self.skip + self._total_length(len(items)), self.num_replicas)
        return (items[place % len(items)] for place in places)

    def _part_of_stream(self) -> Iterator[Any]:
        """Yield this rank's items of a sampler without length, which may be endless."""
        stream = islice(self._draw_in_chunks(), self.skip, None)
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

    def _draw_in_chunks(self) -> Iterator[Any]:
        stream: Iterator[Any] | None = None
        for number in count():
            seed = mixed_seed(self.seed, self.epoch, number, *self.variant)
            with isolated_random_state(seed, *own_generators(self.sampler)):
                stream = iter(self.sampler) if stream is None else stream
                chunk = list(islice(stream, _CHUNK))
            if not chunk:
                return
            yield from chunk

    def _total_length(self, length: int) -> int:
        """Return the number of items that all ranks yield, of a sampler of `length` items."""
        length = max(0, length - self.skip)
        rest = length % self.num_replicas
        if self.uneven == "keep" or rest == 0:
            return length
        return length - rest if self.uneven == "drop" else length - rest + self.num_replicas


def length_of(items: Any) -> float:
    """Return the length of a sampler or loader; `inf` if it has none, as iterable data and generators."""
    try:
        return len(items)
    except (TypeError, NotImplementedError):
        return math.inf


def set_epoch_of(epoch: int, *samplers: Any) -> None:
    """Call `set_epoch`, once each, of the samplers and the samplers in them that have it."""
    unique = {id(inner): inner for outer in samplers for inner in with_wrapped(outer)}
    for sampler in unique.values():
        if callable(set_epoch := getattr(sampler, "set_epoch", None)):
            set_epoch(epoch)


def with_wrapped(sampler: Any) -> list[Any]:
    """Return a sampler, the sampler in it, and so on."""
    found: dict[int, Any] = {}
    while sampler is not None and id(sampler) not in found:
        found[id(sampler)] = sampler
        sampler = getattr(sampler, "sampler", None)
    return list(found.values())


def own_generators(sampler: Any) -> list[Any]:
    """Return the random generators among the attributes of a sampler, its class and the samplers in it."""
    attributes: list[Any] = []
    for inner in with_wrapped(sampler):
        for owner in (inner, *type(inner).__mro__):
            attributes += getattr(owner, "__dict__", {}).values()
    return random_generators_in(attributes)


def own_seed(sampler: Any) -> int | None:
    """Return a seed made of the seeds of a sampler's generators; None if it has none."""
    seeds = [seed_of(generator) for generator in own_generators(sampler)]
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
