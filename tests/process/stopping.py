"""What is trained while signals come: importable, so that spawned workers find it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from rankwise import Trainer
from rankwise.callbacks import Callback
from tests.process.training_tasks import Regression, dataset, quiet_trainer


class Slow(Regression):
    """Takes its time for a step, so that signals come in the middle."""

    pause_s = 0.005
    hangs_at = -1

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        time.sleep(self.pause_s)
        if batch_idx == self.hangs_at:
            print("hanging", flush=True)
            time.sleep(60)
        return super().training_step(batch, batch_idx)


class Notes(Callback):
    """Each rank writes down its process id, that it trains, and with what it ends."""

    def __init__(self, folder: str, stops_at: int | None) -> None:
        self.folder = Path(folder)
        self.stops_at = stops_at

    @override
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 3 and batch_idx < 12:
            (self.folder / f"pid{trainer.global_rank}").write_text(str(os.getpid()))
            print("training", flush=True)
        if trainer.global_rank == 1 and trainer.global_step == self.stops_at:
            trainer.should_stop = True

    @override
    def on_exception(self, trainer: Any, module: Any, error: BaseException) -> None:
        if isinstance(error, SystemExit):
            self.note(trainer, module)

    @override
    def on_fit_end(self, trainer: Any, module: Any) -> None:
        self.note(trainer, module)

    def note(self, trainer: Any, module: Any) -> None:
        """Write down the step and a few weights."""
        facts = {"step": trainer.global_step, "bias": module.net[0].bias.tolist()}
        (self.folder / f"end{trainer.global_rank}").write_text(json.dumps(facts))


def train(strategy: str, folder: str, options: str = "") -> None:
    """Train for very long; `options`: accumulate, validate, workers, should_stop."""
    arguments: dict[str, Any] = {}
    if options == "accumulate":
        arguments["accumulate_grad_batches"] = 3
    notes = Notes(folder, 7 if options == "should_stop" else None)
    trainer = trainer_of(strategy, folder, notes, **arguments, val_check_interval=5)
    workers = 2 if options == "workers" else 0
    loader: DataLoader[Any] = DataLoader(dataset(100_000), batch_size=4, num_workers=workers)
    validation = DataLoader(dataset(33), batch_size=4) if options == "validate" else None
    module = Slow()
    trainer.fit(module, loader, validation)
    print("fit has returned", flush=True)
    if options == "should_stop":
        module.hangs_at = 5
        trainer_of(strategy, folder, Notes(folder, None)).fit(module, loader)


def trainer_of(strategy: str, folder: str, notes: Notes, **arguments: Any) -> Trainer:
    """Return a trainer on two ranks that saves nothing by itself."""
    return quiet_trainer(strategy, 2, max_epochs=1, callbacks=[notes], default_root_dir=folder, **arguments)
