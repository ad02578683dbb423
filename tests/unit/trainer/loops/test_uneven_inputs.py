"""The batches that ranks take together, from one rank that is given the other's number of batches."""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

from rankwise.data.batches import sharded_sampler_of
from rankwise.errors import ConfigurationError, UnevenInputsError
from rankwise.launchers.context import WorkerContext
from rankwise.ranks import RankInfo
from rankwise.trainer.data.loader_shard import LoaderShard, TrainData
from rankwise.trainer.data.stage_loaders import shard_for_phase
from rankwise.trainer.loops.uneven_inputs import BatchSchedule, preserve_state
from rankwise.trainer.state import Progress
from tests.unit.test_seed import draws
from tests.unit.trainer.helpers import Line, loader, samples, trainer, with_second_rank


def schedule(
    folder: Path, policy: str, mine: float, other: float, *, other_is_certain: bool = True
) -> BatchSchedule:
    """Return this rank's schedule, with `mine` batches where the other rank has `other`."""
    train = trainer(folder, uneven_inputs=policy)
    train.strategy = with_second_rank(lambda fact: (other, other_is_certain))
    batches = list(range(int(mine)))
    share = TrainData([LoaderShard(batches, mine)], 0, 1.0, train.strategy)
    return BatchSchedule(train.strategy, nn.BatchNorm1d(1), share, policy)


def taken(folder: Path, policy: str, mine: int, other: int) -> list[tuple[int, bool, bool]]:
    """Return the batches that this rank takes, each with whether it is the last, and a padding step."""
    found = schedule(folder, policy, mine, other)
    found.agree()
    return [
        (batch, is_last, found.is_padding) for batch, is_last in found.batches(found.share.start(Progress()))
    ]


def test_error(tmp_path: Path) -> None:
    """Different numbers of batches are an error before the epoch, which lists each rank's number."""
    with pytest.raises(UnevenInputsError, match="global_rank=0: 4, global_rank=1: 5"):
        schedule(tmp_path, "error", 4, 5).agree()


def test_a_loader_that_ends_before_its_length(tmp_path: Path) -> None:
    """It is an error, as the other ranks would wait for the missing batch."""
    found = schedule(tmp_path, "error", 4, 4)
    found.agree()
    with pytest.raises(ConfigurationError, match="a length of 4 batches, but it ended after 2"):
        list(found.batches(iter([0, 1])))


@pytest.mark.parametrize("policy", ["error", "truncate", "join"])
def test_even(policy: str, tmp_path: Path) -> None:
    """Ranks with the same number of batches take all of them, with every policy."""
    assert taken(tmp_path, policy, 2, 2) == [(0, False, False), (1, True, False)]


def test_truncate(tmp_path: Path) -> None:
    """All stop with the shortest."""
    assert taken(tmp_path, "truncate", 3, 2) == [(0, False, False), (1, True, False)]
    assert taken(tmp_path, "truncate", 1, 2) == [(0, True, False)]


def test_join(tmp_path: Path) -> None:
    """A rank that has run out repeats its last batch in padding steps, until the others have no more."""
    assert taken(tmp_path, "join", 1, 3) == [(0, False, False), (0, False, True), (0, True, True)]
    assert taken(tmp_path, "join", 2, 1) == [(0, False, False), (1, True, False)]


def test_join_goes_on(tmp_path: Path) -> None:
    """A rank that continues from within its padding steps uses any batch for them."""
    found = schedule(tmp_path, "join", 2, 4)
    found.agree()
    assert list(found.batches(iter(()), done=3)) == [(0, True)]
    assert not found.is_padding  # the epoch is over


def test_join_goes_on_behind_the_end(tmp_path: Path) -> None:
    """A rank whose sharded sampler is at its end uses a batch from the beginning."""
    train = trainer(tmp_path, uneven_inputs="join")
    train.strategy = with_second_rank(lambda fact: (3, True))
    shard = shard_for_phase("train", loader(3, batch_size=1), 0, train.options, train.strategy)
    share = TrainData([shard], 0, 1.0, train.strategy)
    progress = Progress(batches_done=2, samples_done=4)
    share.place(progress)
    found = BatchSchedule(train.strategy, nn.Identity(), share, "join")
    assert found.agree() == 3
    (batch, is_last), *others = found.batches(share.start(progress), done=2)
    assert (len(batch[0]), is_last, others) == (1, True, [])
    sampler = sharded_sampler_of(share.loader)
    assert sampler is not None
    assert sampler.skip == 4


@pytest.mark.parametrize("policy", ["error", "truncate", "join"])
def test_a_rank_without_batches(policy: str, tmp_path: Path) -> None:
    """A rank that has none at all cannot take part."""
    with pytest.raises(UnevenInputsError, match="global_rank=0: 0, global_rank=1: 2") as caught:
        schedule(tmp_path, policy, 0, 2).agree()
    assert "at least one batch" in caught.value.fix()


@pytest.mark.parametrize("policy", ["error", "truncate", "join"])
def test_no_batches_at_all(policy: str, tmp_path: Path) -> None:
    """Where no rank has any, there is nothing to do."""
    assert schedule(tmp_path, policy, 0, 0).agree() == 0


def test_weights(tmp_path: Path) -> None:
    """Every real batch has the same weight after DDP's average over ranks; padding has weight 0."""
    found = schedule(tmp_path, "join", 4, 2)
    found.agree()
    assert [found.weight(first, first + 1) for first in range(4)] == [1, 1, 2, 2]
    assert found.weight(0, 4) == 2 / 6
    found.is_padding = True
    assert found.weight(3, 4) == 0


def test_weights_alone(tmp_path: Path) -> None:
    """One process alone averages over its window, endless data included."""
    train = trainer(tmp_path)
    share = TrainData([LoaderShard([], float("inf"))], 0, 1.0, train.strategy)
    assert BatchSchedule(train.strategy, nn.Identity(), share, "error").weight(4, 8) == 1 / 4


@pytest.mark.parametrize(("policy", "count"), [("error", 4), ("join", 3)])
def test_shards_for_joining_are_not_padded(policy: str, count: int, tmp_path: Path) -> None:
    """With join every sample is seen once; otherwise shards are padded."""
    train = trainer(tmp_path, uneven_inputs=policy)
    train.strategy = with_second_rank(lambda fact: fact)
    train.strategy.attach(WorkerContext(RankInfo(1, 1, 0, 2, 2, 1)))
    shard = shard_for_phase("train", loader(7, batch_size=1), 0, train.options, train.strategy)
    assert shard.num_batches == count


def test_padding_steps_leave_state_unchanged() -> None:
    """Buffers, changed in place or replaced, and every random state are put back."""
    module: Any = nn.BatchNorm1d(1)
    module.register_buffer("count", torch.zeros(1))
    module.register_buffer("unset", None)
    count, mean = module.count, module.running_mean.clone()
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    expected = draws()
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])
    with preserve_state(module, torch.device("cpu")):
        module(torch.randn(4, 1))
        module.count = module.count + draws()[0]
    assert module.count is count
    assert torch.equal(module.running_mean, mean)
    assert module.num_batches_tracked == 0
    assert draws() == expected


class Recorded(Dataset[Any]):
    """Counts the samples that are read."""

    def __init__(self) -> None:
        self.count = 0

    def __getitem__(self, index: int) -> Any:
        self.count += 1
        return samples()[index]


class Endless(Sampler[int]):
    """Has no length."""

    def __iter__(self) -> Iterator[int]:
        return itertools.cycle(range(8))


def test_one_process_loads_nothing_ahead(tmp_path: Path) -> None:
    """The random numbers of a batch come after those of the step before it, also of an endless sampler."""
    data, read = Recorded(), []

    class Reading(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            read.append(data.count)
            return super().training_step(batch, batch_idx)

    train = trainer(tmp_path, limit_train_batches=3)
    train.fit(Reading(), DataLoader(data, batch_size=2, sampler=Endless()))
    assert read == [2, 4, 6]
    assert data.count == 6
