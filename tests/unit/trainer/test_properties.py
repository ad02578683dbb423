"""What can be read off a Trainer, under Lightning's names."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset
from typing_extensions import override

from rankwise.callbacks import EarlyStopping, GradientAccumulationScheduler, ModelCheckpoint, TQDMProgressBar
from rankwise.errors import InvalidArgumentError
from rankwise.loggers import CSVLogger
from rankwise.trainer import Trainer
from tests.unit.trainer.helpers import Line, loader, samples, trainer


class Asks(Line):
    """Notes what the trainer says when optimizers are configured."""

    steps: float
    batches: float

    @override
    def configure_optimizers(self) -> Any:
        self.steps = self.trainer.estimated_stepping_batches
        self.batches = self.trainer.num_training_batches
        return super().configure_optimizers()


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, 12),
        ({"accumulate_grad_batches": 3}, 6),
        ({"max_steps": 5}, 5),
        ({"max_steps": 50}, 12),
        ({"limit_train_batches": 3, "accumulate_grad_batches": 3}, 3),
        ({"max_epochs": -1, "max_steps": 5}, 5),
        ({"callbacks": GradientAccumulationScheduler({1: 2, 2: 4})}, 4 + 2 + 1),
    ],
)
def test_estimated_steps(tmp_path: Path, options: dict[str, Any], steps: int) -> None:
    """They are known when optimizers are configured, and are those that the fit takes."""
    model, train = Asks(), trainer(tmp_path, **{"max_epochs": 3, **options})
    train.fit(model, loader())
    assert (model.steps, train.global_step) == (steps, steps)
    assert model.batches == train.num_training_batches == options.get("limit_train_batches", 4)
    assert train.estimated_stepping_batches == steps


def test_estimated_steps_without_an_end(tmp_path: Path) -> None:
    """Without a limit they are infinite; before a fit the number of batches is unknown."""
    train = trainer(tmp_path, max_epochs=-1)
    assert (train.estimated_stepping_batches, train.num_training_batches) == (math.inf, math.inf)


class Stream(IterableDataset[Any]):
    """Has no length."""

    def __iter__(self) -> Any:
        data = samples()
        return iter([data[0], data[1]])


@pytest.mark.parametrize(("options", "steps"), [({}, math.inf), ({"max_steps": 1}, 1)])
def test_estimated_steps_of_a_stream(tmp_path: Path, options: dict[str, Any], steps: float) -> None:
    """Without a length of the data `max_steps` is all that is known."""
    model = Asks()
    trainer(tmp_path, **options).fit(model, torch.utils.data.DataLoader(Stream()))
    assert (model.steps, model.batches) == (steps, math.inf)


def test_the_loaders_hook_is_called_once(tmp_path: Path) -> None:
    """Asking for the number of steps does not ask for the data twice."""

    class Own(Asks):
        @override
        def train_dataloader(self) -> Any:
            self.seen.append("loader")
            return loader()

    model = Own()
    trainer(tmp_path).fit(model)
    assert (model.seen.count("loader"), model.steps) == (1, 4)


def test_the_module(tmp_path: Path) -> None:
    """`model` and `lightning_module` are the module; before a stage there is none."""
    train, model = trainer(tmp_path), Line()
    assert (train.model, train.lightning_module) == (None, None)
    train.fit(model, loader())
    assert train.model is train.lightning_module is model


class SeesEnd(Line):
    """Notes `is_last_batch` in its steps."""

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(str(self.trainer.is_last_batch))
        return self.loss(batch)


def test_the_last_batch(tmp_path: Path) -> None:
    """It is known in the step."""
    model = SeesEnd()
    trainer(tmp_path, max_epochs=2, limit_train_batches=3).fit(model, loader())
    assert model.seen == ["False", "False", "True"] * 2


def test_the_machine(tmp_path: Path) -> None:
    """Numbers of devices and nodes, this one's, and the precision."""
    train = trainer(tmp_path, precision="bf16-true")
    assert (train.num_devices, train.device_ids, train.num_nodes, train.node_rank) == (1, [0], 1, 0)
    assert train.precision == "bf16-true"


def test_callbacks_by_kind(tmp_path: Path) -> None:
    """All of a kind, and the first of each."""
    stops, saves = [EarlyStopping("loss"), EarlyStopping("other")], [ModelCheckpoint(tmp_path)]
    bar = TQDMProgressBar()
    train = trainer(
        tmp_path, callbacks=[*stops, *saves, bar], enable_checkpointing=True, enable_progress_bar=True
    )
    assert (train.early_stopping_callbacks, train.checkpoint_callbacks) == (stops, saves)
    assert train.progress_bar_callback is bar
    assert (trainer(tmp_path).early_stopping_callbacks, trainer(tmp_path).progress_bar_callback) == ([], None)


def test_the_folder(tmp_path: Path) -> None:
    """`log_dir` is the logger's; without one it is the Trainer's."""
    logger = CSVLogger(tmp_path)
    assert trainer(tmp_path, logger=logger).log_dir == logger.log_dir
    assert trainer(tmp_path).log_dir == str(tmp_path)


def test_print(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It takes what `print` takes."""
    trainer(tmp_path).print("a", "b", sep="-")
    assert capsys.readouterr().out == "a-b\n"


class Breaks(Line):
    """Fails in a step."""

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(f"{self.trainer.state.fn} {self.trainer.state.status}")
        raise ValueError("broken")


def test_the_state(tmp_path: Path) -> None:
    """The state says which stage ran, and how it ended."""
    train = trainer(tmp_path)
    assert (train.state.fn, train.state.status, train.state.stopped) == (None, "initializing", False)
    train.validate(Line(), loader())
    assert (train.state.fn, train.state.status, train.interrupted) == ("validate", "finished", False)
    model = Breaks()
    with pytest.raises(ValueError, match="broken"):
        train.fit(model, loader())
    assert model.seen == ["fit running"]
    assert (train.state.fn, train.state.status, train.state.finished) == ("fit", "interrupted", False)
    assert (train.interrupted, train.state.stopped, train.received_sigterm) == (True, True, False)


@pytest.mark.parametrize(("precision", "dtype"), [("32-true", torch.float32), ("64-true", torch.float64)])
def test_init_module(tmp_path: Path, precision: str, dtype: torch.dtype) -> None:
    """Parameters are created in the precision's dtype, on the device."""
    with trainer(tmp_path, precision=precision).init_module():
        layer = nn.Linear(2, 2)
    assert (layer.weight.dtype, layer.weight.device) == (dtype, torch.device("cpu"))
    assert torch.get_default_dtype() == torch.float32


def test_init_module_without_values(tmp_path: Path) -> None:
    """Parameters without values are refused."""
    train = trainer(tmp_path)
    with pytest.raises(InvalidArgumentError, match="empty_init=True"), train.init_module(empty_init=True):
        pass


def run(train: Trainer, stage: str, **options: Any) -> Any:
    """Run a stage."""
    return getattr(train, stage)(Line(), loader(), **options)


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_weights_only(tmp_path: Path, stage: str) -> None:
    """Nothing in a checkpoint is run: False is refused, and says what to do."""
    run(trainer(tmp_path), stage, weights_only=True)
    with pytest.raises(InvalidArgumentError, match=r"weights_only=False.*add_safe_globals"):
        run(trainer(tmp_path), stage, weights_only=False)


@pytest.mark.parametrize(("given", "length"), [(None, 4), (True, 4), (False, 0)])
def test_return_predictions(tmp_path: Path, given: bool | None, length: int) -> None:
    """Without it outputs are not kept; the batches run all the same."""

    class Counts(Line):
        @override
        def predict_step(self, batch: Any) -> Any:  # type: ignore[override]  # batch_idx may be left out
            self.seen.append("predict")
            return batch[0]

    model = Counts()
    assert len(trainer(tmp_path).predict(model, loader(), return_predictions=given)) == length
    assert len(model.seen) == 4
