"""Which batches a rank sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rankwise.errors import ConfigurationError, UnshardableLoaderError
from rankwise.trainer import Trainer
from rankwise.trainer.loaders import LoaderShare, as_list, check_loaders, share_for
from tests.unit.trainer.helpers import loader, trainer, with_second_rank


def on_two_ranks(folder: Path, **options: Any) -> Trainer:
    """Return a trainer that believes to be rank 0 of two."""
    train = trainer(folder, **options)
    train.strategy = with_second_rank(lambda mine: mine)
    return train


def test_one_process_uses_the_loader_itself(tmp_path: Path) -> None:
    """Alone, nothing is split: the user's loader is used as it is."""
    mine = loader()
    assert share_for(trainer(tmp_path), "validate", mine, seed=0).loader is mine


@pytest.mark.parametrize(("phase", "batches"), [("train", 2), ("validate", 2), ("test", 2), ("predict", 2)])
def test_split_over_ranks(tmp_path: Path, phase: str, batches: int) -> None:
    """Of seven samples in four batches, each of two ranks runs two batches."""
    share = share_for(on_two_ranks(tmp_path), phase, loader(7), seed=0)
    assert share.num_batches == len(list(share)) == batches


def test_not_split_if_not_wanted(tmp_path: Path) -> None:
    """With use_distributed_sampler=False the user splits."""
    train = on_two_ranks(tmp_path, use_distributed_sampler=False)
    mine = [1, 2, 3]
    assert share_for(train, "train", mine, seed=0).loader is mine
    check_loaders(train, "train", mine)


def test_limit_of_predictions_is_of_the_whole(tmp_path: Path) -> None:
    """Three batches to predict are two for rank 0, and one for the other."""
    train = on_two_ranks(tmp_path, limit_predict_batches=3)
    assert share_for(train, "predict", loader(), seed=0).num_batches == 2


def test_checked_before_anything_starts(tmp_path: Path) -> None:
    """A loader that cannot be split is refused beforehand."""
    with pytest.raises(UnshardableLoaderError):
        check_loaders(on_two_ranks(tmp_path), "train", [1, 2])


def test_fraction_of_unknown_length(tmp_path: Path) -> None:
    """Half of nobody knows how much cannot be taken."""
    with pytest.raises(ConfigurationError, match=r"A fraction \(0.5\) of a loader without length"):
        share_for(trainer(tmp_path, limit_train_batches=0.5), "train", iter([1, 2]), seed=0)


def test_last_batch_is_known() -> None:
    """Each batch comes with whether it is the last, also where the length is not known."""
    expected = [(1, False), (2, False), (3, True)]
    assert list(LoaderShare([1, 2, 3], 3)) == expected
    assert list(LoaderShare([1, 2, 3], float("inf"))) == expected
    assert list(LoaderShare([1, 2, 3, 4], 3)) == expected
    assert list(LoaderShare([], 5)) == []
    assert list(LoaderShare([1], 0)) == []


def test_several_loaders() -> None:
    """A list of loaders is several; a list of batches is one."""
    mine = loader()
    assert as_list([mine, mine]) == [mine, mine]
    assert as_list(mine) == [mine]
    assert as_list([1, 2]) == [[1, 2]]
