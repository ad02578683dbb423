"""Which batches a rank gets."""

from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DistributedSampler

from rankwise.data import CombinedLoader, shard_for_prediction
from rankwise.errors import ConfigurationError, InvalidTypeError, UnshardableLoaderError
from rankwise.trainer import Trainer
from rankwise.trainer.data.loader_shard import LoaderShard
from rankwise.trainer.data.stage_loaders import (
    check_can_be_gathered,
    check_loaders,
    loaders_in,
    shard_for_phase,
)
from tests.helpers.raising import raises
from tests.unit.trainer.helpers import Line, WithSecondRank, loader, samples, trainer, with_second_rank


def on_two_ranks(folder: Path, **options: Any) -> Trainer:
    """Return a trainer with a strategy that is rank 0 of two."""
    train = trainer(folder, **options)
    train.strategy = with_second_rank(lambda mine: mine)
    return train


def shard(train: Trainer, phase: str, mine: Any) -> LoaderShard:
    """Return the batches of this trainer's rank."""
    return shard_for_phase(phase, mine, 0, train.options, train.strategy)


SPLIT: Any = loader(sampler=DistributedSampler(samples(), 2, 0))


@pytest.mark.parametrize("phase", ["train", "validate", "test", "predict"])
def test_split_over_ranks(tmp_path: Path, phase: str) -> None:
    """Of seven samples in four batches, each of two ranks runs two; one process uses the loader itself."""
    own, mine = shard(on_two_ranks(tmp_path), phase, loader(7)), loader()
    assert own.num_batches == len(list(own)) == 2
    assert shard(trainer(tmp_path), "validate", mine).loader is mine


def test_not_split_if_not_wanted(tmp_path: Path) -> None:
    """With use_distributed_sampler=False the user splits."""
    train = on_two_ranks(tmp_path, use_distributed_sampler=False)
    mine = [1, 2, 3]
    assert shard(train, "train", mine).loader is mine
    check_loaders("fit", "train", mine, train.options, 2)


def predicted(train: Trainer, mine: Any) -> list[int]:
    """Return the numbers of the samples that a rank predicts, in order."""
    own = shard(train, "predict", mine)
    return [round(float(number) * 8) for batch, _ in own for number in batch[:, 0]]


def test_shuffled_loaders_are_predicted_in_the_order_of_the_data(tmp_path: Path) -> None:
    """On one rank and on several, unless the user splits; a `DistributedSampler`'s split is replaced.

    A loader that is split by batches is not split again.
    """
    mine = loader(shuffle=True)
    assert predicted(trainer(tmp_path), mine) == list(range(8))
    train = trainer(tmp_path, use_distributed_sampler=False)
    assert shard(train, "predict", mine).loader is mine
    for each in (mine, SPLIT, shard_for_prediction(loader(), 2, 0)):
        assert predicted(on_two_ranks(tmp_path), each) == [0, 1, 4, 5]


def test_samples_that_the_user_splits_cannot_be_gathered() -> None:
    """Their order cannot be restored; loaders split by batches, or in an unknown way, are gathered."""
    check_can_be_gathered([LoaderShard([1], 1), LoaderShard(shard_for_prediction(loader(), 2, 0), 2)], 2)
    raises(UnshardableLoaderError, "DistributedSampler", check_can_be_gathered, [LoaderShard(SPLIT, 2)], 2)


@pytest.mark.parametrize("phase", ["train", "validate", "test"])
def test_a_part_of_more_ranks_than_there_are_is_refused(tmp_path: Path, phase: str) -> None:
    """A part of two is refused with one process, which would miss the other part."""
    with pytest.raises(UnshardableLoaderError, match="part 0 of 2 already, but this rank's is part 0 of 1"):
        shard(trainer(tmp_path), phase, SPLIT)


class Shuffling(WithSecondRank):
    """Returns another argument of torch's sampler too."""

    @property
    def distributed_sampler_kwargs(self) -> Any:
        return {**super().distributed_sampler_kwargs, "shuffle": False}


def test_other_arguments_of_a_sampler(tmp_path: Path) -> None:
    """A strategy that overrides how the data are split gives number and rank only: others have no effect."""
    train = on_two_ranks(tmp_path)
    train.strategy = Shuffling(lambda mine: mine)
    train.strategy.bind()
    with pytest.raises(ConfigurationError, match=r"Shuffling\.distributed_sampler_kwargs .*'shuffle'"):
        shard(train, "train", loader())


@pytest.mark.parametrize("limit", [2, 0.5])
def test_limit_of_predictions_is_of_the_whole(tmp_path: Path, limit: float) -> None:
    """Two batches to predict are one for each rank, also if the user has split them.

    With use_distributed_sampler=False a loader is read as it is.
    """
    train, parts = on_two_ranks(tmp_path, limit_predict_batches=limit), shard_for_prediction(loader(), 2, 0)
    for mine in (loader(), parts):
        own = shard(train, "predict", mine)
        assert own.num_batches == len(list(own)) == 1
    train = on_two_ranks(tmp_path, limit_predict_batches=1, use_distributed_sampler=False)
    assert shard(train, "predict", parts).num_batches == 1


def test_checked_before_anything_starts(tmp_path: Path) -> None:
    """A loader that cannot be split is refused beforehand."""
    raises(UnshardableLoaderError, None, check_loaders, "fit", "train", [1, 2], trainer(tmp_path).options, 2)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("phase", ["train", "validate", "predict"])
def test_a_data_set_in_place_of_a_loader(tmp_path: Path, phase: str, world_size: int) -> None:
    """The error says what is expected, on any number of ranks."""
    dataset = loader().dataset
    with pytest.raises(InvalidTypeError, match="expected a DataLoader") as caught:
        check_loaders("fit", phase, dataset, trainer(tmp_path).options, world_size)
    assert "torch.utils.data.DataLoader(dataset, batch_size=32)" in str(caught.value)


def test_several_loaders() -> None:
    """A list of loaders is several; a list of batches is one, of which no more come than run."""
    mine = loader()
    assert loaders_in([mine, mine]) == [mine, mine]
    assert loaders_in(mine) == [mine]
    assert loaders_in([1, 2]) == [[1, 2]]
    assert loaders_in(None) == loaders_in([]) == []
    assert loaders_in([mine, [1, 2]]) == [mine, [1, 2]]
    assert loaders_in({"a": mine, "b": [mine, [1]]}) == [mine, mine, [1]]
    assert loaders_in(CombinedLoader((mine, [1]), "sequential")) == [mine, [1]]
    for batches, limit in (([1, 2, 3], 3), ([1, 2, 3], float("inf")), ([1, 2, 3, 4], 3)):
        assert list(LoaderShard(batches, limit)) == [1, 2, 3]
    assert list(LoaderShard([], 5)) == list(LoaderShard([1], 0)) == []


class Data:
    """Has a loader, but is no data module."""

    def train_dataloader(self) -> Any:
        return loader()


@pytest.mark.parametrize("given", [5, object(), [loader(), 5]])
def test_what_is_no_loader(tmp_path: Path, given: Any) -> None:
    """What cannot be iterated over is refused before anything starts; so is an object with loaders."""
    with pytest.raises(InvalidTypeError, match="expected a DataLoader, an iterable over batches"):
        trainer(tmp_path).test(Line(), given)
    raises(InvalidTypeError, r"derive it from rankwise\.DataModule", trainer(tmp_path).fit, Line(), Data())


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
@pytest.mark.parametrize("given", [[], None])
def test_nothing_to_evaluate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, given: Any) -> None:
    """An evaluation without any loader is refused, whether the list is empty or a hook returns None."""
    monkeypatch.setattr(Line, f"{stage.removesuffix('idate')}_dataloader", lambda _: None)
    with pytest.raises(ConfigurationError, match=rf"{stage}\(\) has 0 \w+ loaders"):
        getattr(trainer(tmp_path), stage)(Line(), given)


@pytest.mark.parametrize("limit", [0.1, 0.24])
@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_a_fraction_that_leaves_nothing(tmp_path: Path, stage: str, limit: float) -> None:
    """A fraction of less than one batch is refused for each loader, and one of a loader without length."""
    limits = {f"limit_{name}_batches": limit for name in ("val", "test", "predict")}
    train, few = trainer(tmp_path, **limits), [loader(40), loader()]
    with pytest.raises(ConfigurationError, match=rf"A limit of {limit} leaves no batch of \w+ loader 1"):
        train.fit(Line(), loader(), few) if stage == "fit" else getattr(train, stage)(Line(), few)
    with pytest.raises(ConfigurationError, match=rf"A fraction \({limit}\) of a loader without length"):
        shard(trainer(tmp_path, limit_train_batches=limit), "train", iter([1, 2]))


def test_an_empty_loader_is_evaluated(tmp_path: Path) -> None:
    """Data without samples have no metrics and no predictions, whatever the limit; a warning says so."""
    train = trainer(tmp_path, limit_predict_batches=0.5)
    with pytest.warns(UserWarning, match="The test loader is empty: its length is 0"):
        assert train.test(Line(), loader(0)) == [{}]
    with pytest.warns(UserWarning, match="The prediction loader is empty: its length is 0"):
        assert train.predict(Line(), loader(0)) == []
