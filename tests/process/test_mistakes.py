"""Mistakes between ranks: one error on every rank, before anything hangs."""

from __future__ import annotations

import pytest
from torch import nn

from rankwise.errors import LifecycleError, WorkerRaisedError
from rankwise.ranks import rank_zero_only
from rankwise.strategies import Strategy
from tests.process.helpers import ddp
from tests.process.training_tasks import Regression, loader, quiet_trainer


class Uneven(Regression):
    """Rank 1 has a wider layer, and one more."""

    def setup(self, stage: str) -> None:
        if self.trainer.global_rank == 1:
            self.net[0] = nn.Linear(5, 8).double()
            self.extra = nn.Linear(1, 1).double()


def test_ranks_that_would_train_different_modules() -> None:
    """Which parameters differ is said before DDP sees them; one traceback stands for those of all ranks."""
    trainer = quiet_trainer(ddp("fork", grace_period_s=10.0), 2, max_epochs=1)
    with pytest.raises(WorkerRaisedError) as caught:
        trainer.fit(Uneven(), loader(16, 4))
    error = caught.value
    assert error.exception_type == "RankMismatchError"
    assert "float64, shape (7, 5) on global_rank 0; float64, shape (8, 5) on global_rank 1" in str(error)
    assert "parameter 'extra.bias': absent on global_rank 0" in str(error)
    assert error.consequences == ()
    assert str(error).count("Traceback (most recent call last)") == 1


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
    """Launch within such a function, as the one process that there is before."""
    strategy = ddp("fork")
    strategy.launch(gather_on_rank_zero)
    return strategy.results


def test_a_collective_on_rank_zero_alone_is_refused() -> None:
    """It raises at once instead of waiting for ranks that never come; to launch from there is fine."""
    results = launch_from_rank_zero()
    assert results is not None
    assert "all_gather_object was called in state 'in a function that only rank zero runs'" in results[0]
    assert results[0].endswith("['all', 'all']")
    assert results[1] == "['all', 'all']"
