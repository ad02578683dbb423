"""A fit that continues an epoch of which its limits, or its number of ranks, leave no batch."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.gradient_sync.helpers import fit_on_ranks
from tests.unit.trainer.helpers import Line, loader, saved, trainer

pytestmark = pytest.mark.timeout(60)  # where such an epoch never ends


class Scheduled(Line):
    """Has a scheduler of each kind that steps by epoch."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        schedulers = torch.optim.lr_scheduler
        return [optimizer], [
            schedulers.StepLR(optimizer, step_size=1, gamma=0.5),
            {"scheduler": schedulers.ReduceLROnPlateau(optimizer), "monitor": "val_loss", "strict": False},
        ]


@pytest.mark.parametrize("limit", [1, 2])
def test_a_lower_limit_ends_the_epoch(tmp_path: Path, limit: int) -> None:
    """The epoch ends: it is validated, its schedulers step, and the next one is trained."""
    train, model = trainer(tmp_path, max_epochs=2, max_steps=2), Scheduled()
    train.fit(model, loader(8), loader(2))
    model.seen.clear()
    train.max_steps, train.limit_train_batches = -1, limit
    train.fit(model, loader(8), loader(2))
    assert (train.current_epoch, train.global_step) == (2, 2 + limit)
    assert model.seen == ["validate 0", *[f"train {number}" for number in range(limit)], "validate 0"]
    assert train.optimizers[0].param_groups[0]["lr"] == 0.25


def test_validated_before_it_was_stopped(tmp_path: Path) -> None:
    """A validation that ran at the same batch does not run again."""
    train, model = trainer(tmp_path, max_epochs=1, max_steps=2, val_check_interval=2), Line()
    train.fit(model, loader(8), loader(2))
    train.max_steps, train.limit_train_batches = -1, 2
    train.fit(model, loader(8), loader(2))
    assert (train.current_epoch, model.seen.count("validate 0")) == (1, 1)


def test_too_few_samples_for_more_ranks(tmp_path: Path) -> None:
    """With `drop_last`, samples that are a batch of one rank, but no batch of each of two, are left out."""
    path = saved(tmp_path, None, loader(5, drop_last=True), max_epochs=2, max_steps=1)
    modules = [Line(), Line()]
    fit_on_ranks(modules, loader(5, drop_last=True), ckpt_path=path, max_epochs=2)
    assert [(module.current_epoch, module.global_step) for module in modules] == [(2, 2)] * 2
