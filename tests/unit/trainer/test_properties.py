"""What can be read off a Trainer, under Lightning's names."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from typing_extensions import override

from rankwise.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    LambdaCallback,
    ModelCheckpoint,
    TQDMProgressBar,
)
from rankwise.errors import InvalidArgumentError, MissingAttributeError
from rankwise.loggers import CSVLogger
from rankwise.trainer.state import RunningStage, TrainerFn
from tests.helpers.raising import raises
from tests.unit.trainer.helpers import Failing, Line, Stream, fitted, loader, samples, trainer


class Asks(Line):
    """Notes what the trainer says when optimizers are configured, and when its loader is asked for."""

    steps: float
    batches: float

    @override
    def configure_optimizers(self) -> Any:
        self.steps = self.trainer.estimated_stepping_batches
        self.batches = self.trainer.num_training_batches
        return super().configure_optimizers()

    @override
    def train_dataloader(self) -> Any:
        self.seen.append("loader")
        return loader()


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
    """They are known when optimizers are configured, without asking for the data twice, and are right."""
    model, train = Asks(), trainer(tmp_path, **{"max_epochs": 3, **options})
    train.fit(model)
    assert model.seen.count("loader") == 1
    assert (model.steps, train.global_step) == (steps, steps)
    assert model.batches == train.num_training_batches == options.get("limit_train_batches", 4)
    assert train.estimated_stepping_batches == steps


@pytest.mark.parametrize(("options", "steps"), [({}, math.inf), ({"max_steps": 1}, 1)])
def test_estimated_steps_of_a_stream(tmp_path: Path, options: dict[str, Any], steps: float) -> None:
    """Without a length of the data, or a limit of the fit, `max_steps` is all that is known."""
    train = trainer(tmp_path, max_epochs=-1)
    assert (train.estimated_stepping_batches, train.num_training_batches) == (math.inf, math.inf)
    model = Asks()
    trainer(tmp_path, **options).fit(model, DataLoader(Stream([samples()[0], samples()[1]])))
    assert (model.steps, model.batches) == (steps, math.inf)


def test_the_module(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`model` and `lightning_module` are the module, or None before a stage; `print` is the built-in one."""
    train, model = trainer(tmp_path), Line()
    assert (train.model, train.lightning_module) == (None, None)
    train.fit(model, loader())
    assert train.model is train.lightning_module is model
    train.print("a", "b", sep="-")
    assert capsys.readouterr().out == "a-b\n"


class Sees(Line):
    """Notes in its steps the last batch, and whether it is evaluated."""

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        runs = self.trainer
        self.seen.append(f"train {runs.is_last_batch} {runs.evaluating} {runs.enable_validation}")
        return self.loss(batch)

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(f"validate {self.trainer.evaluating}")


def test_the_last_batch(tmp_path: Path) -> None:
    """It is known in the step, and so is whether it is of an evaluation, and whether the fit has one."""
    model, train = Sees(), trainer(tmp_path, max_epochs=2, limit_train_batches=3)
    train.fit(model, loader(), loader(2))
    assert not train.evaluating
    trained = [f"train {is_last} False True" for is_last in (False, False, True)]
    assert model.seen == [*trained, "validate True"] * 2


def test_callbacks_by_kind(tmp_path: Path) -> None:
    """All of a kind, and the first of each."""
    stops, saves = [EarlyStopping("loss"), EarlyStopping("other")], [ModelCheckpoint(tmp_path)]
    bar = TQDMProgressBar()
    train = trainer(tmp_path, callbacks=[*stops, *saves, bar], enable_progress_bar=True)
    assert (train.early_stopping_callbacks, train.checkpoint_callbacks) == (stops, saves)
    assert train.progress_bar_callback is bar
    assert (trainer(tmp_path).early_stopping_callbacks, trainer(tmp_path).progress_bar_callback) == ([], None)


def test_the_state(tmp_path: Path) -> None:
    """The state says which stage ran, and how it ended."""
    seen: list[str] = []
    noting = LambdaCallback(
        on_train_start=lambda runs, _: seen.append(f"{runs.state.fn} {runs.state.status}")
    )
    train = trainer(tmp_path, callbacks=noting)
    assert (train.state.fn, train.state.status, train.state.stopped) == (None, "initializing", False)
    train.validate(Line(), loader())
    assert (train.state.fn, train.state.status, train.interrupted) == ("validate", "finished", False)
    raises(ValueError, "broken", train.fit, Failing(), loader())
    assert seen == ["fit running"]
    assert (train.state.fn, train.state.status, train.state.finished) == ("fit", "interrupted", False)
    assert (train.interrupted, train.state.stopped, train.received_sigterm) == (True, True, False)


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-true", "bf16-mixed", "16-master"])
def test_init_module(tmp_path: Path, precision: str) -> None:
    """Parameters are created in the dtype that training keeps, on the device; no values are refused."""
    dtype = {"64-true": torch.float64, "bf16-true": torch.bfloat16}.get(precision, torch.float32)
    train = trainer(tmp_path, precision=precision)
    with train.init_module():
        layer = nn.Linear(2, 2)
    assert (layer.weight.dtype, layer.weight.device) == (dtype, torch.device("cpu"))
    assert torch.get_default_dtype() == torch.float32
    with pytest.raises(InvalidArgumentError, match="empty_init=True"), train.init_module(empty_init=True):
        pass


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_weights_only(tmp_path: Path, stage: str) -> None:
    """Nothing in a checkpoint is run: False is refused, and says what to do."""
    getattr(trainer(tmp_path), stage)(Line(), loader(), weights_only=True)
    with pytest.raises(InvalidArgumentError, match=r"weights_only=False.*add_safe_globals"):
        getattr(trainer(tmp_path), stage)(Line(), loader(), weights_only=False)


@pytest.mark.parametrize(("given", "length"), [(None, 4), (True, 4), (False, 0)])
def test_return_predictions(tmp_path: Path, given: bool | None, length: int) -> None:
    """Without it outputs are not kept; the batches run all the same."""

    class Counts(Line):
        def predict_step(self, batch: Any) -> Any:  # type: ignore[override]  # batch_idx may be left out
            self.seen.append("predict")
            return batch[0]

    model = Counts()
    assert len(trainer(tmp_path).predict(model, loader(), return_predictions=given)) == length
    assert len(model.seen) == 4


# The public attributes of lightning.pytorch.Trainer of version 2.6, its methods included.
# fmt: off
LIGHTNINGS = [
    "accelerator", "accumulate_grad_batches", "barebones", "callback_metrics", "callbacks",
    "check_val_every_n_epoch", "checkpoint_callback", "checkpoint_callbacks", "ckpt_path",
    "current_epoch", "datamodule", "default_root_dir", "device_ids", "distributed_sampler_kwargs",
    "early_stopping_callback", "early_stopping_callbacks", "enable_autolog_hparams",
    "enable_validation", "estimated_stepping_batches", "evaluating", "fast_dev_run", "fit", "fit_loop",
    "global_rank", "global_step", "gradient_clip_algorithm", "gradient_clip_val", "init_module",
    "interrupted", "is_global_zero", "is_last_batch", "lightning_module", "limit_predict_batches",
    "limit_test_batches", "limit_train_batches", "limit_val_batches", "local_rank", "log_dir",
    "log_every_n_steps", "logged_metrics", "logger", "loggers", "lr_scheduler_configs", "max_epochs",
    "max_steps", "min_epochs", "min_steps", "model", "node_rank", "num_devices", "num_nodes",
    "num_predict_batches", "num_sanity_val_batches", "num_sanity_val_steps", "num_test_batches",
    "num_training_batches", "num_val_batches", "optimizers", "overfit_batches", "precision",
    "precision_plugin", "predict", "predict_dataloaders", "predict_loop", "predicting", "print",
    "profiler", "progress_bar_callback", "progress_bar_metrics", "received_sigterm",
    "reload_dataloaders_every_n_epochs", "sanity_checking", "save_checkpoint", "scaler", "should_stop",
    "state", "strategy", "test", "test_dataloaders", "test_loop", "testing", "train_dataloader",
    "training", "val_check_batch", "val_check_interval", "val_dataloaders", "validate",
    "validate_loop", "validating", "world_size",
]
# fmt: on


def test_attributes_of_lightnings(tmp_path: Path) -> None:
    """Each exists before a stage and after it, or is refused, read and assigned, with what to write."""
    absent = ["fit_loop", "predict_loop", "test_loop", "val_check_batch", "validate_loop"]
    for train in (trainer(tmp_path), fitted(tmp_path, None, loader(), loader())):
        assert [name for name in LIGHTNINGS if not hasattr(train, name)] == absent
        for name in absent:
            with pytest.raises(MissingAttributeError, match=rf"^Trainer has no {name}\.\n  Fix: trainer\."):
                getattr(train, name)
            raises(MissingAttributeError, name, setattr, train, name, 1)
    for name in ("devices", "_accelerator_connector", "_data_connector", "_logger_connector", "_results"):
        raises(MissingAttributeError, rf"(?s)Trainer has no {name}\..*Fix: trainer\.", getattr, train, name)


def test_values_of_the_strategy(tmp_path: Path) -> None:
    """What belongs to the strategy can be read at the trainer: devices, nodes and the precision, too."""
    train = trainer(tmp_path, precision="bf16-true")
    assert (train.accelerator, train.precision) == ("cpu", "bf16-true")
    assert (train.num_devices, train.device_ids, train.num_nodes, train.node_rank) == (1, [0], 1, 0)
    assert train.precision_plugin is train.strategy.precision
    assert train.distributed_sampler_kwargs == {"num_replicas": 1, "rank": 0}
    assert train.scaler is None
    assert fitted(tmp_path, precision="16-mixed").scaler.get_scale() > 1


def test_one_logger_is_assigned(tmp_path: Path) -> None:
    """An assigned logger replaces all, None removes them; `log_dir` is the logger's, then the Trainer's."""
    train, logger = trainer(tmp_path, logger=[CSVLogger(tmp_path), CSVLogger(tmp_path)]), CSVLogger(tmp_path)
    assert trainer(tmp_path, logger=logger).log_dir == logger.log_dir
    train.logger = logger
    assert (train.loggers, train.logger, train.log_dir) == ([logger], logger, logger.log_dir)
    train.logger = None
    assert (train.loggers, train.logger, train.log_dir) == ([], None, str(tmp_path))
    assert trainer(tmp_path).log_dir == str(tmp_path)


def test_arguments_of_save_checkpoint(tmp_path: Path) -> None:
    """They have Lightning's names; options for storage are refused, and a path that is assigned."""
    train = fitted(tmp_path)
    train.save_checkpoint(filepath=tmp_path / "a.ckpt", weights_only=None, storage_options=None)
    assert "optimizer_states" in torch.load(tmp_path / "a.ckpt", weights_only=True)
    with pytest.raises(InvalidArgumentError, match=r"storage_options=.*CheckpointIO"):
        train.save_checkpoint(tmp_path / "b.ckpt", storage_options={"ttl": 3})
    with pytest.raises(MissingAttributeError, match=r"trainer\.fit\(model, ckpt_path='last'\)"):
        train.ckpt_path = "last"  # would have no effect
    assert train.ckpt_path is None


def test_the_running_stage(tmp_path: Path) -> None:
    """`state.stage` is what runs now, as in Lightning; members equal their values."""
    seen: list[tuple[TrainerFn | None, RunningStage | None]] = []
    names = ("on_sanity_check_start", "on_train_start", "on_validation_start", "on_fit_end", "on_test_start")
    noting = dict.fromkeys(names, lambda runs, _: seen.append((runs.state.fn, runs.state.stage)))
    options = {"callbacks": LambdaCallback(**noting), "num_sanity_val_steps": 1}
    train = fitted(tmp_path, None, loader(), loader(), **options)
    fit, check = TrainerFn.FITTING, RunningStage.SANITY_CHECKING
    training, validating = RunningStage.TRAINING, RunningStage.VALIDATING
    assert seen == [(fit, each) for each in (check, check, training, validating, training)]
    assert (train.state.fn, train.state.stage) == ("fit", None)
    train.test(Line(), loader())
    assert seen[5:] == [("test", "test")]
    assert f"{TrainerFn.TESTING} {train.state.status}" == "test finished"
    assert RunningStage.VALIDATING.evaluating
    assert not RunningStage.PREDICTING.evaluating
