"""A module that fails on one rank, and callbacks with hooks that follow: importable from a script."""

import time
from pathlib import Path
from typing import Any

from torch import Tensor

from rankwise.callbacks import Callback
from tests.process.training_tasks import Regression

FAILS_AT = 2


class Fails(Regression):
    def __init__(self, who: int, optimizer: str = "adam") -> None:
        super().__init__(optimizer)
        self.who = who

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if self.global_rank == self.who and batch_idx == FAILS_AT:
            raise ValueError("the first failure")
        return super().training_step(batch, batch_idx)


class Saves(Callback):
    """What docs/migrating recommends instead of `OnExceptionCheckpoint`."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.path, self.options = path, options

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        trainer.save_checkpoint(self.path, **self.options)


class Hangs(Callback):
    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        if trainer.strategy.is_in_job:
            time.sleep(600)
