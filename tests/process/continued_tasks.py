"""Fits that continue: with a second call of `fit`, or from a checkpoint that was saved between two fits."""

import json
import random
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from rankwise import Trainer, seed_everything
from tests.process.resume_tasks import Net, Noisy
from tests.process.training_tasks import quiet_trainer

Facts = dict[str, Any]
WHOLE, PART = {"max_epochs": 3}, {"max_epochs": 2}
WITHIN = {"max_steps": 8}  # within the second epoch


def sharded_adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer whose state each rank has a part of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of its older optimizers
        from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=0.01)


class Drawing(Net):
    """Draws random numbers in hooks, too, but not where a fit ends or continues within an epoch."""

    drawn: Tensor

    def __init__(self, sharded: bool) -> None:
        super().__init__()
        self.sharded = sharded
        self.register_buffer("drawn", torch.zeros(()))

    def on_train_epoch_start(self) -> None:
        if not self.trainer.progress.is_within_epoch:
            self.drawn += torch.rand(())

    def on_train_epoch_end(self) -> None:
        if self.trainer.progress.is_epoch_done:
            self.drawn += random.random()

    def configure_optimizers(self) -> Any:
        return sharded_adam(self.parameters()) if self.sharded else super().configure_optimizers()


class Runs:
    """Runs of one model on one strategy, all with the same seed."""

    def __init__(self, strategy: str, devices: int, sharded: bool) -> None:
        self.strategy, self.devices, self.sharded = strategy, devices, sharded

    def trainer(self) -> Trainer:
        seed_everything(1)
        return quiet_trainer(self.strategy, self.devices, max_epochs=1)

    def fit(self, trainer: Trainer, model: Drawing, limits: dict[str, int], **arguments: Any) -> Facts:
        """Train up to the limits; return weights, buffers and metrics."""
        trainer.max_epochs, trainer.max_steps = limits.get("max_epochs"), limits.get("max_steps", -1)
        trainer.fit(model, DataLoader(Noisy(), batch_size=4, shuffle=True), **arguments)
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        return {"state": {name: value.tolist() for name, value in model.state_dict().items()}, **metrics}

    def in_two(self, limits: dict[str, int], path: Path | None = None, seed: int | None = None) -> Facts:
        """Continue with a second call of `fit`, or with another trainer from a checkpoint at the path."""
        trainer, model = self.trainer(), Drawing(self.sharded)
        self.fit(trainer, model, limits)
        if path is not None:
            trainer.save_checkpoint(path)
            trainer, model = self.trainer(), Drawing(self.sharded)
        if seed is not None:
            seed_everything(seed)
        torch.rand(3)
        return self.fit(trainer, model, WHOLE, ckpt_path=path)


def differences(strategy: str, devices: int, folder: Path, sharded: bool) -> list[str]:
    """Return the ways to continue that end in another state than one long fit."""
    runs = Runs(strategy, devices, sharded)
    expected = runs.fit(runs.trainer(), Drawing(sharded), WHOLE)
    found = {
        "a second fit": runs.in_two(PART),
        "a second fit within an epoch": runs.in_two(WITHIN),
        "a checkpoint between fits": runs.in_two(PART, folder / "epochs.ckpt"),
        "a checkpoint between fits within an epoch": runs.in_two(WITHIN, folder / "steps.ckpt"),
    }
    different = [name for name, facts in found.items() if facts != expected]
    return different + ["the same for another seed"] * (runs.in_two(PART, seed=2) == expected)


if __name__ == "__main__":
    given, path, kind = sys.argv[1:]
    text = json.dumps(differences(given, 2, Path(path), kind == "sharded"))
    sys.stdout.write(f"{text}\n")  # in one piece
