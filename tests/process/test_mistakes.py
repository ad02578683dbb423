"""Mistakes between ranks: one error on every rank, before anything hangs."""

import sys
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
    """Rank 1 has something else than rank 0."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    @property
    def differs(self) -> str:
        """What this rank has of its own."""
        return self.what if self.trainer.global_rank == 1 else ""

    def setup(self, stage: str) -> None:
        if self.differs == "version":
            rankwise.__version__ = "0.0.1"
        if self.differs == "frozen":
            self.net.requires_grad_(False)

    def train_dataloader(self) -> Any:
        return loader(20 if self.differs == "loader" else 16, 4)

    def val_dataloader(self) -> Any:
        return [loader(8, 4)] * (2 if self.differs == "loaders" else 1)


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("version", "the version of rankwise: "),
        ("frozen", "'net.0.bias': float64, shape (7,) on global_rank 0; float64, shape (7,), frozen on"),
        ("loader", "the training loader: 16 samples, 4 batches on global_rank 0; 20 samples, 5 batches on"),
        ("loaders", "the number of validation loaders: 1 on global_rank 0; 2 on global_rank 1"),
    ],
)
def test_ranks_that_differ(what: str, expected: str) -> None:
    """Versions, frozen parameters and loaders are compared before the first step; every rank raises."""
    trainer = quiet_trainer(ddp("fork", grace_period_s=10.0), 2, max_epochs=1)
    with pytest.raises(WorkerRaisedError) as caught:
        trainer.fit(Different(what))
    assert caught.value.exception_type == "RankMismatchError"
    assert expected in str(caught.value)
    assert caught.value.consequences == ()


SEED_DIFFERENTLY = """
from rankwise import seed_everything
from rankwise.ranks import rank_zero_only
from tests.process.training_tasks import Regression, loader, quiet_trainer

seed_everything(7 + rank_zero_only.rank)
module = Regression()
seed_everything(7 + rank_zero_only.rank)
quiet_trainer("ddp", 2, max_epochs=1).fit(module, loader(16, 4))
"""


def test_scripts_with_different_seeds(run_script: ScriptRunner) -> None:
    """Different seeds in the ranks' scripts are an error that explains per-rank random numbers."""
    result = run_script(SEED_DIFFERENTLY, env=with_tests(), siblings=1)
    assert result.returncode == 1, result
    assert "raised RankMismatchError: The ranks are not the same in 1 thing." in result.stderr, result
    assert "the seed: 7 on global_rank 0; 8 on global_rank 1" in result.stderr, result
    assert "seed_everything(1): each rank draws from a stream of its own" in result.stderr, result


def gather_on_rank_zero(strategy: Strategy) -> str:
    """Call a collective where rank 1 never comes; then where it does."""

    @rank_zero_only
    def only_here() -> None:
        strategy.all_gather_object("mine")

    try:
        only_here()
    except LifecycleError as error:
        return f"{error} {strategy.all_gather_object('all')}"
    return str(strategy.all_gather_object("all"))


@rank_zero_only
def launch_from_rank_zero() -> dict[int, str]:
    """Launch within such a function, before there is a job."""
    strategy = ddp("fork")
    strategy.launch(gather_on_rank_zero)
    return strategy.results


def test_a_collective_on_rank_zero_alone_is_refused() -> None:
    """It raises at once instead of waiting for the other ranks; a launch from there works."""
    results = launch_from_rank_zero()
    assert results is not None
    assert "all_gather_object was called in state 'in a function that only rank zero runs'" in results[0]
    assert results[0].endswith("['all', 'all']")
    assert results[1] == "['all', 'all']"


class Normalizing(Regression):
    """Normalises over its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 1)).double()


def test_a_last_batch_of_one_sample() -> None:
    """BatchNorm's error says what to do; on several ranks it comes with other numbers of samples."""
    quiet_trainer("single_device", 1, max_epochs=1).fit(Normalizing(), loader(14, 3))  # 3, 3, 3, 3, 2
    with pytest.raises(WorkerRaisedError, match=r"Fix: BatchNorm .*drop_last=True.* Or start from") as caught:
        quiet_trainer(ddp("fork"), 2, max_epochs=1).fit(Normalizing(), loader(14, 3))  # 3, 3, 1
    assert "Expected more than 1 value per channel" in str(caught.value)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
def test_a_last_batch_of_one_sample_on_one_process() -> None:
    """The error stays torch's own, with a note."""
    with pytest.raises(ValueError, match="Expected more than 1 value") as caught:
        quiet_trainer("single_device", 1, max_epochs=1).fit(Normalizing(), loader(7, 3))
    assert "drop_last=True" in getattr(caught.value, "__notes__", [""])[0]
