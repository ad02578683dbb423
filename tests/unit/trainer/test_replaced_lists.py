"""Callbacks and loggers that a hook replaces within a stage."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rankwise.callbacks import LambdaCallback, ModelCheckpoint
from rankwise.trainer import Trainer
from tests.unit.trainer.helpers import Line, Recording, fitted, loader


class Replacing(Line):
    """Calls `replace` in the training step of batch 2."""

    def __init__(self, replace: Callable[[Trainer], None]) -> None:
        super().__init__()
        self.replace = replace

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2:
            self.replace(self.trainer)
        return super().training_step(batch, batch_idx)


def test_what_new_loggers_and_callbacks_get(tmp_path: Path) -> None:
    """New loggers get the metrics from then on, and the old ones are finalized too.

    Hooks of new callbacks are called from the next one on, and the old ones' no more.
    """
    old, new, batches = Recording(), Recording(), [list[int](), list[int]()]
    before, after = (
        LambdaCallback(on_train_batch_end=lambda *arguments, to=each: to.append(arguments[-1]))
        for each in batches
    )

    def replace(train: Trainer) -> None:
        train.loggers, train.callbacks = [new], [after]

    fitted(tmp_path, Replacing(replace), logger=old, callbacks=before, log_every_n_steps=1)
    assert [[step for step, _ in each.metrics] for each in (old, new)] == [[0, 1], [2, 3]]
    assert (old.ends, new.ends) == (["success"], ["success"])
    assert batches == [[0, 1], [2, 3]]


def test_a_new_checkpoint_callback_saves(tmp_path: Path) -> None:
    """A checkpoint holds the new callbacks' state, and `ckpt_path="best"` is theirs."""
    saving = ModelCheckpoint(dirpath=tmp_path / "new", filename="end")
    train = fitted(tmp_path, Replacing(lambda train: setattr(train, "callbacks", [saving])))
    assert saving.best_model_path == str(tmp_path / "new" / "end.ckpt")
    train.test(train.module, loader(), ckpt_path="best")
    assert train.ckpt_path == saving.best_model_path
