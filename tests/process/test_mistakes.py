"""Mistakes between ranks: one error on every rank, before anything hangs."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

import rankwise
from rankwise.errors import LifecycleError, WorkerRaisedError
from rankwise.ranks import rank_zero_only
from rankwise.strategies import Strategy
from tests.helpers.scripts import ScriptRunner
from tests.process.helpers import ddp, with_tests
from tests.process.training_tasks import Regression, loader, quiet_trainer


class Different(Regression):
    """Is changed on rank 1."""

    samples, loaders = 16, 1

    def __init__(self, change: Callable[[Any], Any]) -> None:
        super().__init__()
        self.change = change

    def setup(self, stage: str) -> None:
        if self.global_rank == 1:
            self.change(self)

    def train_dataloader(self) -> Any:
        return loader(self.samples, 4)

    def val_dataloader(self) -> Any:
        return [loader(8, 4)] * self.loaders


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda _: setattr(rankwise, "__version__", "0.0.1"), "the version of rankwise: "),
        (
            lambda module: module.net.requires_grad_(False),
            "'net.0.bias': float64, shape (7,) on global_rank 0; float64, shape (7,), frozen on",
        ),
        (
            lambda module: setattr(module, "samples", 20),
            "the training loader: 16 samples, 4 batches on global_rank 0; 20 samples, 5 batches on",
        ),
        (
            lambda module: setattr(module, "loaders", 2),
            "the number of validation loaders: 1 on global_rank 0; 2 on global_rank 1",
        ),
    ],
    ids=["version", "frozen", "loader", "loaders"],
)
def test_ranks_that_differ(change: Callable[[Any], Any], expected: str) -> None:
    """Versions, frozen parameters and loaders are compared before the first step; every rank raises."""
    trainer = quiet_trainer(ddp("fork", grace_period_s=10.0), 2, max_epochs=1)
    with pytest.raises(WorkerRaisedError) as caught:
        trainer.fit(Different(change))
    assert caught.value.exception_type == "RankMismatchError"
    assert expected in str(caught.value)
    assert caught.value.consequences == ()


SEED_DIFFERENTLY = """
from rankwise import seed_everything
from rankwise.ranks import rank_zero_only
from tests.process.training_tasks import fit_one_step

seed_everything(7 + rank_zero_only.rank)
fit_one_step("ddp")
"""


def test_scripts_with_different_seeds(run_script: ScriptRunner) -> None:
    """Different seeds in the ranks' scripts are an error that explains per-rank random numbers."""
    result = run_script(SEED_DIFFERENTLY, env=with_tests(), siblings=1)
    assert result.returncode == 1, result
    assert "raised RankMismatchError: The ranks are not the same in 1 thing." in result.stderr, result
    assert "the seed: 7 on global_rank 0; 8 on global_rank 1" in result.stderr, result
    assert "seed_everything(1): each rank draws from a stream of its own" in result.stderr, result


def gather_on_rank_zero(strategy: Strategy) -> list[Any]:
    """Call a collective where rank 1 never comes; then where it does."""
    try:
        rank_zero_only(strategy.all_gather_object)("mine")
        error = "no error"
    except LifecycleError as caught:
        error = str(caught)
    return [error, strategy.all_gather_object("all")]


def test_a_collective_on_rank_zero_alone_is_refused() -> None:
    """It raises at once instead of waiting for the other ranks; a launch from there works."""
    strategy = ddp("fork")
    rank_zero_only(strategy.launch)(gather_on_rank_zero)
    error, found = strategy.results[0]
    assert "all_gather_object was called in state 'in a function that only rank zero runs'" in error
    assert found == ["all", "all"]
    assert strategy.results[1] == ["no error", ["all", "all"]]


class Normalizing(Regression):
    """Normalises over its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 1)).double()


def test_a_last_batch_of_one_sample() -> None:
    """BatchNorm's error says what to do; on one process it is torch's own, with a note."""
    alone = quiet_trainer("single_device", 1, max_epochs=1)
    alone.fit(Normalizing(), loader(14, 3))  # 3, 3, 3, 3, 2
    with pytest.raises(ValueError, match="Expected more than 1 value") as on_one:
        alone.fit(Normalizing(), loader(7, 3))
    if sys.version_info >= (3, 11):
        assert "drop_last=True" in on_one.value.__notes__[0]
    with pytest.raises(WorkerRaisedError, match=r"Fix: BatchNorm .*drop_last=True.* Or start from") as caught:
        quiet_trainer(ddp("fork"), 2, max_epochs=1).fit(Normalizing(), loader(14, 3))  # 3, 3, 1
    assert "Expected more than 1 value per channel" in str(caught.value)
