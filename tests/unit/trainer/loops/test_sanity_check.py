"""`num_sanity_val_steps`: some validation before training, of which nothing stays."""

from pathlib import Path
from typing import Any

import pytest
import torch
from typing_extensions import override

from rankwise.callbacks import Callback, EarlyStopping, ModelCheckpoint
from rankwise.errors import ConfigurationError
from rankwise.loggers import CSVLogger
from tests.unit.trainer.helpers import Line, fitted, loader, saved, trainer


class Notes(Callback):
    """Notes what is known in the check."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    @override
    def on_sanity_check_start(self, trainer: Any, module: Any) -> None:
        self.seen.append(("start", trainer.sanity_checking, trainer.validating))

    @override
    def on_sanity_check_end(self, trainer: Any, module: Any) -> None:
        self.seen.append(("end", trainer.num_sanity_val_batches, sorted(trainer.callback_metrics)))

    @override
    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.seen.append(("train", trainer.sanity_checking, dict(trainer.callback_metrics)))


class Draws(Line):
    """Draws a random number in each step."""

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step([batch[0] + torch.rand(()), batch[1]], batch_idx)

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        torch.rand(3)
        super().validation_step(batch, batch_idx)


def test_steps_before_training(tmp_path: Path) -> None:
    """The batches run before the first epoch, between two hooks; their metrics are thrown away."""
    model, notes = Line(), Notes()
    train = fitted(tmp_path, model, loader(count=2), loader(), num_sanity_val_steps=2, callbacks=notes)
    validated = [f"validate {number}" for number in range(4)]
    assert model.seen == [*validated[:2], "train 0", *validated]
    assert notes.seen == [("start", True, False), ("end", [2], ["val_loss"]), ("train", False, {})]
    assert not train.sanity_checking


@pytest.mark.parametrize(("steps", "expected"), [(0, 0), (None, 2), (-1, 4), (9, 4)])
def test_how_many(tmp_path: Path, steps: int | None, expected: int) -> None:
    """-1 means all, None Lightning's 2; there are no more than the loader has."""
    model, notes = Line(), Notes()
    train = trainer(tmp_path, num_sanity_val_steps=steps, limit_train_batches=0, callbacks=notes)
    train.fit(model, loader(), loader())
    assert model.seen == [f"validate {number}" for number in range(expected)]
    assert [note[1] for note in notes.seen if note[0] == "end"] == [[expected]] * (expected > 0)


def test_each_loader(tmp_path: Path) -> None:
    """The number is that of each loader; all their batches run afterwards."""

    class Two(Line):
        @override
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.seen.append(f"{dataloader_idx}:{batch_idx}")

    model, notes = Two(), Notes()
    train = trainer(tmp_path, num_sanity_val_steps=2, callbacks=notes)
    train.fit(model, loader(count=2), [loader(count=2), loader(count=6)])
    assert model.seen == ["0:0", "1:0", "1:1", "train 0", "0:0", "1:0", "1:1", "1:2"]
    assert notes.seen[1] == ("end", [1, 2], [])
    assert train.num_val_batches == [1, 3]


def test_training_is_the_same(tmp_path: Path) -> None:
    """Weights, metrics and random numbers do not depend on the check."""
    results = []
    for steps in (0, -1):
        torch.manual_seed(1)
        model, train = Draws(), trainer(tmp_path, num_sanity_val_steps=steps, max_epochs=2)
        train.fit(model, loader(shuffle=True), loader(shuffle=True))
        results.append(
            (model.layer.weight.tolist(), train.callback_metrics["val_loss"], float(torch.rand(())))
        )
    assert results[0] == results[1]


def test_nothing_is_saved_logged_or_stopped(tmp_path: Path) -> None:
    """Checkpoints, early stopping and loggers do not see the check."""
    stopping = EarlyStopping("val_loss", patience=0, mode="max")
    saving = ModelCheckpoint(monitor="val_loss", save_top_k=-1)
    logger = CSVLogger(tmp_path)
    train = trainer(
        tmp_path, num_sanity_val_steps=1, callbacks=[stopping, saving], logger=logger, log_every_n_steps=1
    )
    train.fit(Line(), loader(), loader())
    assert len(list(tmp_path.rglob("*.ckpt"))) == 1
    rows = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    assert sum(bool(row.split(",")[rows[0].split(",").index("val_loss")]) for row in rows[1:]) == 1
    assert stopping.wait_count == 0


@pytest.mark.parametrize("steps", [2, 3])
def test_a_run_that_continues(tmp_path: Path, steps: int) -> None:
    """As in Lightning, it is checked, unless it continues within an epoch; it ends as without the check."""
    path = saved(tmp_path, Draws(), loader(count=4, batch_size=2), max_epochs=2, max_steps=steps)
    ends = []
    for checked in (0, 1):
        model, train = Draws(), trainer(tmp_path, max_epochs=2, num_sanity_val_steps=checked)
        train.fit(model, loader(count=4, batch_size=2), loader(count=2), ckpt_path=path)
        ends.append(model.layer.weight.tolist())
        assert model.seen.count("validate 0") == 1 + (checked and steps == 2)
    assert ends[0] == ends[1]


def test_metric_objects(tmp_path: Path) -> None:
    """The check leaves them as they were; those that the user updates, too."""
    torchmetrics = pytest.importorskip("torchmetrics")

    class Counts(Line):
        def __init__(self) -> None:
            super().__init__()
            self.total = torchmetrics.SumMetric()

        @override
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.total.update(1)

    model = Counts()
    trainer(tmp_path, num_sanity_val_steps=1).fit(model, loader(), loader(count=2))
    assert model.total.compute() == 1


def test_an_error_comes_before_training(tmp_path: Path) -> None:
    """That is what the check is for; the trainer is in no check afterwards."""

    class Breaks(Line):
        @override
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            raise ValueError("no such metric")

    model, train = Breaks(), trainer(tmp_path, num_sanity_val_steps=1)
    with pytest.raises(ValueError, match="no such metric"):
        train.fit(model, loader(), loader())
    assert (model.seen, train.sanity_checking) == ([], False)


def test_without_validation(tmp_path: Path) -> None:
    """A fit without validation has no check, and its hooks are not called."""
    notes = Notes()
    trainer(tmp_path, num_sanity_val_steps=2, callbacks=notes).fit(Line(), loader())
    assert [entry[0] for entry in notes.seen] == ["train"]


def test_the_hooks_are_callbacks_own(tmp_path: Path) -> None:
    """A module that defines one is told what to define instead."""

    class Defines(Line):
        def on_sanity_check_start(self) -> None:
            """Would never be called."""

    with pytest.raises(
        ConfigurationError, match=r"on_validation_start, where self\.trainer\.sanity_checking"
    ):
        trainer(tmp_path).fit(Defines(), loader())
