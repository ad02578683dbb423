"""A run that resumes within an epoch has what the epoch's start hooks did, and does not run them again."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from rankwise import TrainingModule
from rankwise.callbacks import (
    Callback,
    GradientAccumulationScheduler,
    LambdaCallback,
    ModelCheckpoint,
    TQDMProgressBar,
)
from tests.helpers.parameters import first, in_turn
from tests.unit.gradient_sync.helpers import FEATURES, fit_alone, fit_on_ranks, loss_of

STEPS, EPOCHS = 4, 2
DATA = torch.randn(12 * STEPS, FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Tuned(TrainingModule):
    """A head on a layer that is frozen at first."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.backbone = nn.Linear(FEATURES, FEATURES).double().requires_grad_(False)
        self.head = nn.Linear(FEATURES, 1).double()
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=generator)

    def forward(self, samples: Tensor) -> Any:
        return self.head(self.backbone(samples))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return loss_of(self, batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.head.parameters(), lr=0.01)


class Switched(Tuned):
    """Optimises its layers in turn, and freezes the other one meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.backbone.requires_grad_(True)

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]  # by hand
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(loss_of(self, batch[0]))
            optimizer.step()
            if batch_idx % 2:
                self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.01) for part in (self.backbone, self.head)]


@torch.no_grad()
def anneal(trainer: Any, module: Any) -> None:
    """Change weights at the beginning of an epoch."""
    module.head.weight.mul_(0.5)


class Unfreeze(Callback):
    """The example of docs/gradients.md."""

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 1:
            module.backbone.requires_grad_(True)
            trainer.optimizers[0].add_param_group({"params": module.backbone.parameters(), "lr": 1e-2})


def refreeze(trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
    """Freeze a parameter within an epoch."""
    if (trainer.current_epoch, batch_idx) == (1, 1):
        module.head.bias.requires_grad_(False)


ANNEAL, REFREEZE = LambdaCallback(on_train_epoch_start=anneal), LambdaCallback(on_train_batch_start=refreeze)


def fit(
    module: TrainingModule,
    callback: Callback,
    ranks: int,
    folder: Path | None = None,
    path: Any = None,
    **more: Any,
) -> list[Tensor]:
    """Train; save after each step in `folder`; return the parameters."""
    modules = [copy.deepcopy(module) for _ in range(ranks)]
    saving = [ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=1)] if folder else []
    more = {"max_epochs": EPOCHS, "callbacks": [callback, *saving], "ckpt_path": path, **more}
    loader, has_checkpoints = DataLoader(TensorDataset(DATA), batch_size=12 // ranks), bool(saving)
    if ranks == 1:
        fit_alone(modules[0], loader, enable_checkpointing=has_checkpoints, **more)
    else:
        fit_on_ranks(modules, loader, enable_checkpointing=has_checkpoints, **more)
    return [each.detach() for each in modules[0].parameters()]


CASES: dict[str, tuple[type[Tuned], Callback]] = {
    "weights": (Tuned, ANNEAL),
    "unfrozen": (Tuned, Unfreeze()),
    "frozen": (Tuned, REFREEZE),
    "by hand": (Switched, ANNEAL),
    "schedule": (Tuned, GradientAccumulationScheduler({0: 1, 1: 2})),  # each epoch has its number of batches
}


@pytest.mark.full
@pytest.mark.parametrize(("case", "ranks"), first(5, in_turn(CASES, [1]) + in_turn(CASES, [2, 3])))
def test_resumed_after_each_step(case: str, ranks: int, tmp_path: Path) -> None:
    """The result is that of the run that was not interrupted, to the bit on one rank."""
    make, callback = CASES[case]
    whole = fit(make(), callback, ranks, tmp_path)
    paths = sorted(tmp_path.iterdir())
    for path in paths if ranks == 1 else paths[1::3]:
        found = fit(make(), callback, ranks, path=path)
        torch.testing.assert_close(found, whole, rtol=0, atol=0 if ranks == 1 else 1e-12)


def test_frozen_by_the_program_that_continues(tmp_path: Path) -> None:
    """A program that continues may freeze other parameters itself."""
    fit(Tuned(), ANNEAL, 1, tmp_path)
    module = Tuned()
    before = module.head.bias.requires_grad_(False).clone()
    saved = torch.load(tmp_path / "step=3.ckpt", weights_only=True)["state_dict"]["head.bias"]
    *_, bias = fit(module, ANNEAL, 1, path=tmp_path / "step=3.ckpt")
    assert not torch.equal(before, saved)
    torch.testing.assert_close(bias, saved, rtol=0, atol=0)


def test_hooks_of_each_epoch_run_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The next epoch's hooks run in the run that resumes, too; within an epoch it has its progress bar."""
    epochs: list[int] = []
    record = LambdaCallback(on_train_epoch_start=lambda trainer, _: epochs.append(trainer.current_epoch))
    fit(Tuned(), record, 1, tmp_path)
    fit(Tuned(), record, 1, path=tmp_path / "step=2.ckpt")
    fit(Tuned(), record, 1, path=tmp_path / "step=4.ckpt")
    assert epochs == [0, 1, 1, 1]
    capsys.readouterr()
    fit(Tuned(), TQDMProgressBar(), 1, path=tmp_path / "step=2.ckpt", max_epochs=1, enable_progress_bar=True)
    assert "Epoch 0" in capsys.readouterr().err
