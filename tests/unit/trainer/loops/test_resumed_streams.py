"""Runs that continue within an epoch on another number of ranks, without batches or indices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from rankwise.errors import ConfigurationError, UnevenInputsError
from tests.helpers.threaded import ThreadedStrategy, run_ranks
from tests.unit.trainer.helpers import Line, loader, samples, trainer


def stopped(folder: Path, data: Any, steps: int) -> Path:
    """Train one process for some steps, and return its checkpoint."""
    path = folder / "stopped.ckpt"
    train = trainer(folder, max_epochs=2, max_steps=steps)
    train.fit(Line(), data)
    train.save_checkpoint(path)
    return path


def resumed(folder: Path, path: Path, world_size: int, data: Any, **options: Any) -> list[tuple[Any, ...]]:
    def fit(rank: int) -> tuple[Any, ...]:
        model = Line()
        strategy = ThreadedStrategy(rank, world_size)
        train = trainer(folder, strategy=strategy, devices=world_size, max_epochs=1, **options)
        train.fit(model, data(), ckpt_path=path)
        return train.global_step, train.current_epoch, model.layer.weight.detach()

    return run_ranks(world_size, fit)


def test_join_where_nothing_is_left_for_a_rank(tmp_path: Path) -> None:
    """It repeats a batch with weight 0: the two samples that are left are one step."""
    path = stopped(tmp_path, loader(5, batch_size=1), 3)
    expected = Line()
    expected.load_state_dict(torch.load(path)["state_dict"])
    x, y = samples(5).tensors
    nn.functional.mse_loss(expected.layer(x[3:]), y[3:]).backward()
    with torch.no_grad():
        for parameter in expected.parameters():
            assert parameter.grad is not None
            parameter.sub_(0.1 * parameter.grad)
    found = resumed(tmp_path, path, 3, lambda: loader(5, batch_size=1), uneven_inputs="join")
    for steps, epochs, weight in found:
        assert (steps, epochs) == (4, 1)
        torch.testing.assert_close(weight, expected.layer.weight)


def test_join_where_a_rank_has_no_batch_at_all(tmp_path: Path) -> None:
    """It has nothing to repeat: refused on all ranks before the step, as at the beginning of an epoch."""
    path = stopped(tmp_path, loader(2, batch_size=1), 1)
    caught = []

    def data() -> Any:
        return loader(2, batch_size=1)

    def fit(rank: int) -> None:
        train = trainer(
            tmp_path, strategy=ThreadedStrategy(rank, 3), devices=3, max_epochs=1, uneven_inputs="join"
        )
        with pytest.raises(UnevenInputsError, match="global_rank=2: 0") as error:
            train.fit(Line(), data(), ckpt_path=path)
        caught.append(error)

    run_ranks(3, fit)
    assert len(caught) == 3


class Stream(IterableDataset[Any]):
    """Eight samples without indices, of which each rank takes every n-th."""

    def __init__(self, num_shards: int = 1, index: int = 0) -> None:
        self.part = num_shards, index

    def shard(self, num_shards: int, index: int) -> Stream:
        return Stream(num_shards, index)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        number, index = self.part
        return iter([samples()[place] for place in range(index, 8, number)])


def split_by_hand() -> Any:
    return loader(batch_size=1, sampler=DistributedSampler(samples(), shuffle=False))


@pytest.mark.parametrize("policy", ["error", "truncate", "join"])
@pytest.mark.parametrize("kind", ["stream", "list", "own sampler"])
def test_data_without_indices_on_another_number_of_ranks(tmp_path: Path, kind: str, policy: str) -> None:
    """Refused on all ranks: nothing tells which samples other ranks have seen."""
    own: dict[str, Any] = {"use_distributed_sampler": False} if kind != "stream" else {}

    def data() -> Any:
        if kind == "own sampler":
            return split_by_hand()
        return DataLoader(Stream(), batch_size=1) if kind == "stream" else list(loader(batch_size=1))

    alone = data() if kind != "own sampler" else loader(batch_size=1)
    path = stopped(tmp_path, alone, 3)
    caught = []

    def fit(rank: int) -> None:
        train = trainer(
            tmp_path, strategy=ThreadedStrategy(rank, 2), devices=2, max_epochs=1, uneven_inputs=policy, **own
        )
        with pytest.raises(ConfigurationError, match="within an epoch on another number of ranks") as error:
            train.fit(Line(), data(), ckpt_path=path)
        caught.append(error)

    run_ranks(2, fit)
    assert len(caught) == 2


def test_data_without_indices_between_epochs(tmp_path: Path) -> None:
    """At the end of an epoch another number of ranks may go on."""
    path = stopped(tmp_path, DataLoader(Stream(), batch_size=1), 8)

    def fit(rank: int) -> int:
        train = trainer(tmp_path, strategy=ThreadedStrategy(rank, 2), devices=2, max_epochs=2)
        train.fit(Line(), DataLoader(Stream(), batch_size=1), ckpt_path=path)
        return train.global_step

    assert run_ranks(2, fit) == [12, 12]
