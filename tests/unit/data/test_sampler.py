"""One rank's part of a sampler's items."""

import itertools
import pickle
import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler

from rankwise.data import ShardedIterable, ShardedSampler
from rankwise.data.sampler import Uneven, own_seed
from rankwise.errors import InvalidArgumentError


def shards(sampler: Any, world_size: int, uneven: Uneven, **options: Any) -> list[list[Any]]:
    return [
        list(ShardedSampler(sampler, world_size, rank, uneven=uneven, **options))
        for rank in range(world_size)
    ]


class Unsized:
    """A sampler without length, which may be endless."""

    def __init__(self, items: Any) -> None:
        self.items = items

    def __iter__(self) -> Iterator[int]:
        return iter(self.items())


@pytest.mark.parametrize(
    ("uneven", "expected"),
    [
        ("keep", [[0, 3, 6], [1, 4], [2, 5]]),
        ("drop", [[0, 3], [1, 4], [2, 5]]),
        ("pad", [[0, 3, 6], [1, 4, 0], [2, 5, 1]]),
    ],
)
def test_uneven_streams(uneven: Uneven, expected: list[list[int]]) -> None:
    """Seven items over three ranks are kept, dropped or repeated; a length, if there is one, is right."""
    for base in (SequentialSampler(range(7)), Unsized(lambda: range(7))):
        assert shards(base, 3, uneven) == expected
    for length, rank in itertools.product([0, 1, 2, 3, 4, 7, 8], range(4)):
        sampler = ShardedSampler(SequentialSampler(range(length)), 4, rank, uneven=uneven)
        assert len(sampler) == len(list(sampler))
    assert shards([5], 4, "pad") == [[5]] * 4  # an item may be repeated more than once


def test_order_depends_on_epoch_and_seed() -> None:
    """Another epoch or seed is another order, which is one for all ranks, whatever their random states."""
    sampler = ShardedSampler(RandomSampler(range(50)), 1, 0, seed=1)
    first = list(sampler)
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert list(sampler) != first
    assert list(ShardedSampler(RandomSampler(range(50)), 1, 0, seed=2)) == list(sampler)  # seed + epoch
    parts = []
    for rank in range(3):
        torch.manual_seed(rank)
        parts += list(ShardedSampler(RandomSampler(range(12)), 3, rank, seed=1))
    assert sorted(parts) == list(range(12))


@pytest.mark.parametrize("is_nested", [False, True])
def test_own_generators_agree(is_nested: bool) -> None:
    """Base samplers with generators in different states, nested too, still split one permutation."""
    parts: list[Any] = []
    for rank in range(3):
        random_sampler = RandomSampler(range(12), generator=torch.Generator().manual_seed(rank))
        sampler = BatchSampler(random_sampler, 1, drop_last=False) if is_nested else random_sampler
        parts += list(ShardedSampler(sampler, 3, rank))
    assert sorted(torch.tensor(parts).flatten().tolist()) == list(range(12))


class Drawing(Sampler[int]):
    """Shuffles eight numbers with a generator of its own."""

    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def __iter__(self) -> Iterator[int]:
        if isinstance(self.rng, torch.Generator):
            order = torch.randperm(8, generator=self.rng).tolist()
        else:
            order = list(range(8))
            self.rng.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return 8


GENERATORS: dict[str, Any] = {
    "numpy": np.random.default_rng,
    "numpy philox": lambda seed: np.random.Generator(np.random.Philox(seed)),
    "numpy legacy": np.random.RandomState,
    "python": random.Random,
    "torch": lambda seed: torch.Generator().manual_seed(seed),
}


def state_of(generator: Any) -> str:
    """Return the state of a generator of any kind."""
    is_torch = isinstance(generator, torch.Generator)
    return str(generator.get_state().tolist() if is_torch else pickle.dumps(generator))


@pytest.mark.parametrize("kind", GENERATORS)
@pytest.mark.parametrize("is_of_class", [False, True])
def test_generators_of_any_kind_agree(kind: str, is_of_class: bool) -> None:
    """A sampler's own generator, whatever its name and kind, is seeded for drawing and put back after it."""
    parts: list[int] = []
    for rank in range(2):
        generator = GENERATORS[kind](rank)
        sampler: Any = Drawing(generator)
        if is_of_class:
            del sampler.rng
            sampler = type(
                "WithClassAttribute", (Drawing,), {"rng": generator, "__init__": object.__init__}
            )()
        before = state_of(generator)
        parts += ShardedSampler(sampler, 2, rank)
        assert state_of(generator) == before
    assert sorted(parts) == list(range(8))


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_generators_seed_is_its_own(kind: str) -> None:
    """The seed of a generator of any kind can be told from it, and telling it changes nothing."""
    first, other = (Drawing(GENERATORS[kind](seed)) for seed in (5, 6))
    before = state_of(first.rng)
    assert own_seed(first) == own_seed(first) == own_seed(Drawing(GENERATORS[kind](5))) != own_seed(other)
    assert state_of(first.rng) == before


def test_what_is_no_generator_of_the_samplers() -> None:
    """Without a generator that can be seeded, there is no seed."""
    assert own_seed(Drawing(random.SystemRandom())) is None
    assert own_seed(Drawing(np.random)) is None
    assert own_seed(RandomSampler(range(3))) is None


def test_digest_of_the_order() -> None:
    """What a sampler of the user's own draws next, and then yields; torch's orders cannot differ, so none."""
    orders = [Drawing(GENERATORS["numpy"](seed)) for seed in (1, 2)]
    digests = [ShardedSampler(sampler, 1, 0).order_digest() for sampler in orders]
    assert digests[0] == digests[1] is not None  # seeded by the ShardedSampler

    ahead = ShardedSampler(Drawing(random.SystemRandom()), 1, 0)
    digest, order = ahead.order_digest(), list(ahead)
    assert digest == ShardedSampler(order, 1, 0).order_digest()
    in_batches = BatchSampler(SequentialSampler(range(8)), 2, drop_last=False)
    undrawn: list[Any] = [RandomSampler(range(8)), in_batches, Unsized(lambda: range(7))]  # may be endless
    for each in undrawn:
        assert ShardedSampler(each, 2, 0).order_digest() is None


@pytest.mark.parametrize(("num_replicas", "rank"), [(2, 5), (2, 2), (2, -1), (0, 0), (-2, 0)])
@pytest.mark.parametrize("make", [ShardedSampler, ShardedIterable])
def test_a_part_that_does_not_exist(make: Any, num_replicas: int, rank: int) -> None:
    """A rank out of range is refused: it would skip samples, and read others twice."""
    with pytest.raises(InvalidArgumentError, match="num_replicas=" if num_replicas > 0 else "1 or more"):
        make(SequentialSampler(range(7)), num_replicas, rank)


def test_random_states_do_not_change() -> None:
    """Drawing changes none: torch's, Python's, NumPy's or the generator's; all give each rank the same."""
    generator = torch.Generator()

    def states() -> list[Any]:
        of_torch = [torch.get_rng_state().tolist(), generator.get_state().tolist()]
        return [*of_torch, random.getstate(), str(np.random.get_state(legacy=False))]

    before = states()
    list(ShardedSampler(RandomSampler(range(10), generator=generator), 2, 0))
    assert states() == before

    class Mixed(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            order = list(range(6))
            random.shuffle(order)
            return iter(np.random.permutation(order).tolist())

    assert sorted(itertools.chain(*zip(*shards(Mixed(), 2, "keep"), strict=True))) == list(range(6))


def test_epoch_is_passed_on() -> None:
    """The base sampler's `set_epoch` is called."""

    class WithEpochs(Sampler[int]):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            return iter([self.epoch] * 2)

    sampler = ShardedSampler(WithEpochs(), 2, 0)
    sampler.set_epoch(7)
    assert list(sampler) == [7]


def test_endless_stream() -> None:
    """An endless random stream is split item by item, the same on every rank."""

    def endless() -> Iterator[int]:
        while True:
            yield int(torch.randint(10**6, ()))

    whole = list(islice(ShardedSampler(Unsized(endless), 1, 0, seed=4), 3000))
    torch.manual_seed(1)
    state = torch.get_rng_state()
    second = list(islice(ShardedSampler(Unsized(endless), 2, 1, seed=4), 1500))
    assert torch.equal(torch.get_rng_state(), state)
    assert second == whole[1::2]
    assert len(set(whole)) > 2900  # parts of the stream are seeded differently
