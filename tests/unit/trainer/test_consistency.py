"""The comparison of the ranks before a fit; the test simulates the second rank."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Subset,
    random_split,
)

from rankwise.data.sharding import order_seed
from rankwise.errors import RankMismatchError
from rankwise.process_group.rank_comparison import differences
from rankwise.strategies import agreement
from rankwise.trainer.consistency import fingerprint_of_checkpoint
from tests.unit.gradient_sync.helpers import fit_on_ranks
from tests.unit.trainer.helpers import (
    Line,
    WithSecondRank,
    fitted,
    loader,
    samples,
    trainer,
    with_second_rank,
)


def another(digest: torch.Tensor) -> torch.Tensor:
    """Return what a rank with another digest sends: one and its complement."""
    return digest.flip(0, 1)


def test_equal_ranks_exchange_a_fingerprint_only() -> None:
    """If nothing differs, there is one small exchange."""
    sent: list[Any] = []

    def same(mine: Any) -> Any:
        sent.append(mine)
        return mine

    agreement.check_ranks_agree(with_second_rank(same), agreement.fingerprint_of(Line(), 1))
    [fingerprint] = sent
    assert fingerprint.nbytes == 32


def test_every_difference_is_named_and_grouped() -> None:
    """A shape, a frozen parameter, a parameter of one rank only, a version: all in one error."""

    def other(mine: Any) -> Any:
        if isinstance(mine, torch.Tensor):
            return another(mine)
        theirs = {**mine, "parameter 'layer.weight'": "float32, shape (1, 3)", "parameter 'extra'": "float32"}
        theirs["parameter 'layer.bias'"] += ", frozen"
        return {**theirs, "the version of torch": "1.0"}

    with pytest.raises(RankMismatchError) as caught:
        agreement.check_ranks_agree(with_second_rank(other), agreement.fingerprint_of(Line(), 1))
    text = str(caught.value)
    assert "'layer.weight': float32, shape (1, 2) on global_rank 0; float32, shape (1, 3) on" in text
    assert "parameter 'layer.bias': float32, shape (1,) on global_rank 0; float32, shape (1,), frozen" in text
    assert "parameter 'extra': absent on global_rank 0; float32 on global_rank 1" in text
    assert "the version of torch: " in text
    assert "order" not in text
    assert len(caught.value.differences) == 4


def test_ranks_are_grouped() -> None:
    """Ranks are grouped by value; of equal parameters the order counts; lazy ones can be compared, too."""
    facts = [{"the order of the parameters": order} for order in ("a, b", "b, a", "a, b", "b, a")]
    found = differences(dict(enumerate(facts)))
    assert found == {"the order of the parameters": {"a, b": (0, 2), "b, a": (1, 3)}}
    sent: list[Any] = []

    def other(mine: Any) -> Any:
        sent.append(mine)
        return another(mine) if isinstance(mine, torch.Tensor) else {}

    with pytest.raises(RankMismatchError):
        agreement.check_ranks_agree(with_second_rank(other), agreement.fingerprint_of(nn.LazyLinear(2), 1))
    assert sent[1]["parameter 'weight'"] == "float32, not initialised"


class Endless(IterableDataset[int]):
    """Data without indices."""

    def __iter__(self) -> Iterator[int]:
        yield 1


class Unsized(DataLoader[Any]):
    """A loader without a length."""

    def __len__(self) -> int:
        raise TypeError


def test_rank_zeros_generator_decides_the_order(tmp_path: Path) -> None:
    """Ranks may seed their generators differently, rank 0's is used; without one the run's seed is."""
    own = DataLoader(samples(), shuffle=True, generator=torch.Generator().manual_seed(5))
    fact = agreement.fingerprint_of_loaders("training", [own], True)["the training loader"]
    assert fact == "8 samples, 8 batches, in the order of its own generator"
    strategy, loaders = trainer(tmp_path).strategy, [own, loader()]
    for is_split, seeds in ((True, [order_seed(own), 7]), (False, [7, 7])):
        agreed = agreement.agree_on_loaders(strategy, "training", loaders, default=7, is_split_here=is_split)
        assert agreed == seeds


def test_ranks_that_do_not_find_the_same_checkpoint(tmp_path: Path) -> None:
    """With local disks "last" may exist on one node only: position, seed and id of the run are compared."""

    def other(mine: Any) -> Any:
        if mine is None:  # no error
            return None
        return another(mine) if isinstance(mine, torch.Tensor) else fingerprint_of_checkpoint(None)

    fitted(tmp_path).save_checkpoint(tmp_path / "last.ckpt")
    train = trainer(tmp_path, strategy=WithSecondRank(other), devices=2)
    with pytest.raises(RankMismatchError, match=r"global_step 4, .* on global_rank 0; none on global_rank 1"):
        train.fit(Line(), loader(), ckpt_path="last")
    contents = {"global_step": 4, "epoch": 1, "seed": 7, "run_id": "", "state_dict": {}}
    found = fingerprint_of_checkpoint(contents)
    assert found == {"the checkpoint": "global_step 4, epoch 1, seed 7, run_id "}
    assert fingerprint_of_checkpoint(None) == {"the checkpoint": "none"}
    other_programs = fingerprint_of_checkpoint({"state_dict": {}})
    assert other_programs["the checkpoint"].startswith("global_step None")


@pytest.mark.parametrize("is_nested", [False, True])
def test_ranks_that_split_their_data_otherwise(is_nested: bool) -> None:
    """Each rank of an unseeded script has another random split, which is an error before the first batch."""

    def data(rank: int) -> Any:
        subset: Any = random_split(samples(), [6, 2], generator=torch.Generator().manual_seed(rank))[0]
        return DataLoader(Subset(ConcatDataset([subset, subset]), range(8)) if is_nested else subset, 2)

    says = r"which samples the training loader has: indices .* on global_rank 0; (.|\n)*seed_everything\(1\)"
    with pytest.raises(RankMismatchError, match=says):
        fit_on_ranks([Line(), Line()], data)


def test_loaders_that_are_dealt_out_have_one_length() -> None:
    """Samples and batches are compared, except of loaders that the user has split and of iterable data."""
    data: Any = list(range(10))
    loader: DataLoader[Any] = DataLoader(data, batch_size=4)
    split: DataLoader[Any] = DataLoader(data, sampler=DistributedSampler(data, num_replicas=2, rank=0))
    assert agreement.fingerprint_of_loaders("training", [loader], True) == {
        "the number of training loaders": "1",
        "the training loader": "10 samples, 3 batches",
    }
    assert agreement.fingerprint_of_loaders("validation", [split, loader, DataLoader(Endless())], True) == {
        "the number of validation loaders": "3",
        "validation loader 1": "10 samples, 3 batches",
    }
    assert agreement.fingerprint_of_loaders("test", [loader], False) == {"the number of test loaders": "1"}
    assert agreement.fingerprint_of_loaders("prediction", [Unsized(data)], True)["the prediction loader"] == (
        "10 samples, inf batches"
    )
    for length in (1_000_001, 1_000_002):  # counted to the last batch
        long: DataLoader[Any] = DataLoader(range(length))  # type: ignore[arg-type]
        found = agreement.fingerprint_of_loaders("training", [long], True)["the training loader"]
        assert found == f"{length} samples, {length} batches"
