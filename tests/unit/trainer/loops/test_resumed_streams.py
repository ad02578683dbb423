"""Runs that continue within an epoch on another number of ranks, without batches or indices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from rankwise.errors import ConfigurationError, UnevenInputsError
from tests.unit.gradient_sync.helpers import fit_on_ranks, refused_on_ranks
from tests.unit.trainer.helpers import Line, Stream, loader, samples, saved


def test_join_where_nothing_is_left_for_a_rank(tmp_path: Path) -> None:
    """It repeats a batch with weight 0: the two samples that are left are one step."""
    path = saved(tmp_path, None, loader(5, batch_size=1), max_epochs=2, max_steps=3)
    expected = Line()
    expected.load_state_dict(torch.load(path)["state_dict"])
    x, y = samples(5).tensors
    nn.functional.mse_loss(expected.layer(x[3:]), y[3:]).backward()
    with torch.no_grad():
        for parameter in expected.parameters():
            assert parameter.grad is not None
            parameter.sub_(0.1 * parameter.grad)
    modules = [Line() for _ in range(3)]
    fit_on_ranks(modules, loader(5, batch_size=1), ckpt_path=path, uneven_inputs="join")
    for module in modules:
        assert (module.global_step, module.current_epoch) == (4, 1)
        torch.testing.assert_close(module.layer.weight, expected.layer.weight)


def test_join_where_a_rank_has_no_batch_at_all(tmp_path: Path) -> None:
    """It has nothing to repeat: refused on all ranks before the step, as at the beginning of an epoch."""
    data = loader(2, batch_size=1)
    path, modules = saved(tmp_path, None, data, max_epochs=2, max_steps=1), [Line() for _ in range(3)]
    options: dict[str, Any] = {"ckpt_path": path, "uneven_inputs": "join"}
    refused_on_ranks(UnevenInputsError, "global_rank=2: 0", modules, data, **options)


class Split(Stream):
    """Samples without indices, of which each rank takes every n-th."""

    def shard(self, num_shards: int, index: int) -> Split:
        return Split(self.items[index::num_shards])


STREAM = DataLoader(Split(samples()), batch_size=1)


@pytest.mark.full
@pytest.mark.parametrize("policy", ["error", "truncate", "join"])
@pytest.mark.parametrize("kind", ["stream", "list", "own sampler"])
def test_data_without_indices_on_another_number_of_ranks(tmp_path: Path, kind: str, policy: str) -> None:
    """Refused on all ranks: nothing tells which samples other ranks have seen."""
    data: Any = {
        "stream": STREAM,
        "list": list(loader(batch_size=1)),
        "own sampler": lambda rank: loader(
            batch_size=1, sampler=DistributedSampler(samples(), 2, rank, shuffle=False)
        ),
    }[kind]
    alone = loader(batch_size=1) if kind == "own sampler" else data
    path = saved(tmp_path, None, alone, max_epochs=2, max_steps=3)
    options = {"uneven_inputs": policy, "use_distributed_sampler": kind == "stream", "ckpt_path": path}
    words = "within an epoch on another number of ranks"
    refused_on_ranks(ConfigurationError, words, [Line(), Line()], data, **options)


def test_data_without_indices_between_epochs(tmp_path: Path) -> None:
    """At the end of an epoch another number of ranks may go on."""
    path = saved(tmp_path, None, STREAM, max_epochs=2, max_steps=8)
    modules = [Line(), Line()]
    fit_on_ranks(modules, STREAM, ckpt_path=path, max_epochs=2)
    assert [module.global_step for module in modules] == [12, 12]
