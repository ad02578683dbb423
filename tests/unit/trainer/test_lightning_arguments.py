"""The Trainer's arguments that Lightning has: its defaults are accepted, and others have their effect."""

import inspect
import warnings
from collections import UserList
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import WeightedRandomSampler
from typing_extensions import override

from rankwise.callbacks import Callback, LambdaCallback, ModelCheckpoint, ModelSummary
from rankwise.errors import ConfigurationError
from rankwise.loggers import CSVLogger
from rankwise.trainer import Trainer
from rankwise.trainer.loops import evaluation
from tests.unit.trainer.helpers import Line, Recording, fitted, loader, saved, trainer

# The parameters of lightning.pytorch.Trainer.__init__ of version 2.6, and their defaults.
LIGHTNING_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("accelerator", "strategy", "devices"), "auto"),
    **dict.fromkeys(("num_nodes", "check_val_every_n_epoch", "accumulate_grad_batches"), 1),
    **dict.fromkeys(
        ("precision", "logger", "callbacks", "max_epochs", "min_epochs", "min_steps", "max_time")
    ),
    **dict.fromkeys(f"limit_{phase}_batches" for phase in ("train", "val", "test", "predict")),
    **dict.fromkeys(("val_check_interval", "num_sanity_val_steps", "log_every_n_steps")),
    **dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary")),
    **dict.fromkeys(("gradient_clip_val", "gradient_clip_algorithm", "deterministic", "benchmark")),
    **dict.fromkeys(("profiler", "plugins", "default_root_dir", "model_registry")),
    **dict.fromkeys(("fast_dev_run", "detect_anomaly", "barebones", "sync_batchnorm"), False),
    **dict.fromkeys(("inference_mode", "use_distributed_sampler", "enable_autolog_hparams"), True),
    "max_steps": -1,
    "overfit_batches": 0.0,
    "reload_dataloaders_every_n_epochs": 0,
}


@pytest.mark.parametrize("name", LIGHTNING_DEFAULTS)
def test_a_default_of_lightnings(tmp_path: Path, name: str) -> None:
    """Each parameter of Lightning's Trainer exists, and accepts the value that is its default there."""
    trainer(tmp_path, **{name: LIGHTNING_DEFAULTS[name]})


def test_the_defaults_are_lightnings() -> None:
    """Ours are the same, but for those whose difference is documented; together they do not contradict."""
    own = inspect.signature(Trainer).parameters
    others = {name for name, default in LIGHTNING_DEFAULTS.items() if own[name].default != default}
    assert others == {"num_nodes", "num_sanity_val_steps", "enable_model_summary"}
    train = Trainer(**LIGHTNING_DEFAULTS)
    assert (train.limit_train_batches, train.log_every_n_steps, train.deterministic) == (1.0, 50, False)


def test_sequences_that_are_no_lists(tmp_path: Path) -> None:
    """Callbacks, loggers, plugins and devices may be in any sequence."""
    callback, logger = Callback(), CSVLogger(tmp_path)
    options = {"callbacks": callback, "logger": logger, "plugins": "local", "devices": 0}
    train = trainer(tmp_path, **{name: UserList([value]) for name, value in options.items()})
    assert (train.callbacks, train.loggers) == ([callback], [logger])
    assert train.strategy.environment.name == "local"


@pytest.mark.parametrize(("given", "is_there"), [(None, True), (True, True), (False, False)])
def test_the_model_summary(tmp_path: Path, given: bool | None, is_there: bool) -> None:
    """`enable_model_summary` adds a `ModelSummary`, unless there is one."""
    assert [type(each) for each in trainer(tmp_path, enable_model_summary=given).callbacks] == (
        [ModelSummary] if is_there else []
    )
    own = ModelSummary(max_depth=2)
    assert trainer(tmp_path, callbacks=own, enable_model_summary=given).callbacks == [own]


@pytest.mark.parametrize(
    ("options", "steps"), [({}, 1), ({"min_steps": 6}, 6), ({"min_steps": 2, "min_epochs": 2}, 8)]
)
def test_min_steps(tmp_path: Path, options: dict[str, Any], steps: int) -> None:
    """Training goes on until `min_steps` and `min_epochs` are done."""
    stopping = LambdaCallback(on_train_batch_end=lambda train, *_: setattr(train, "should_stop", True))
    assert fitted(tmp_path, callbacks=stopping, max_epochs=3, **options).global_step == steps


class SeesSamples(Line):
    """Notes the numbers of the samples, and whether tensors belong to inference mode."""

    def __init__(self) -> None:
        super().__init__()
        self.samples: list[list[int]] = []
        self.modes: list[tuple[str, bool]] = []

    def note(self, step: str, batch: list[Tensor], total: int = 8) -> None:
        self.samples.append([round(float(each) * total) for each in batch[0][:, 0]])
        self.modes.append((step, torch.is_inference_mode_enabled()))

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.note("train", batch)
        return self.loss(batch)

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.note("validate", batch)

    @override
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.note("test", batch)


def test_overfit_batches(tmp_path: Path) -> None:
    """Each epoch has the first batches of the data, in their order; a warning says so.

    A fraction is one of each loader; nothing is said where nothing changes. A sampler that selects samples
    stays, and a warning says that its batches may differ.
    """
    model, train = SeesSamples(), trainer(tmp_path, overfit_batches=2, max_epochs=2)
    with pytest.warns(UserWarning, match="training data in their order, without shuffling"):
        train.fit(model, loader(shuffle=True), loader())
    assert model.samples == [[0, 1], [2, 3], [0, 1], [2, 3]] * 2
    assert train.num_training_batches == 2
    model = SeesSamples()
    trainer(tmp_path, overfit_batches=0.25).fit(model, loader(), loader())
    assert model.samples == [[0, 1]] * 2
    sampler = WeightedRandomSampler([1.0] * 8, 8)
    with pytest.warns(UserWarning, match="overfit_batches keeps WeightedRandomSampler"):
        trainer(tmp_path, overfit_batches=1).fit(Line(), loader(sampler=sampler))


@pytest.mark.parametrize("is_on", [True, False])
def test_inference_mode(tmp_path: Path, is_on: bool) -> None:
    """Evaluation runs in inference mode; within a fit it does not, since training may use its tensors."""
    model, train = SeesSamples(), trainer(tmp_path, inference_mode=is_on, limit_train_batches=1)
    train.fit(model, loader(), loader(count=2))
    train.validate(model, loader(count=2))
    train.test(model, loader(count=2))
    assert model.modes == [("train", False), ("validate", False), ("validate", is_on), ("test", is_on)]


class DividesByZero(Line):
    """Has a gradient that is NaN."""

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        zero = self.layer.weight.sum() * 0
        return (zero / zero.detach() * 0).sqrt()


def test_detect_anomaly(tmp_path: Path) -> None:
    """A gradient that is NaN is an error, which names the operation; torch's flag is restored."""
    with (
        pytest.raises(RuntimeError, match="returned nan values"),
        pytest.warns(UserWarning, match="Error detected in"),
    ):
        trainer(tmp_path, detect_anomaly=True).fit(DividesByZero(), loader())
    assert not torch.is_anomaly_enabled()
    fitted(tmp_path, DividesByZero())


class WithHyperparameters(Line):
    """Saves one."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.save_hyperparameters()


@pytest.mark.parametrize("is_on", [True, False])
def test_enable_autolog_hparams(tmp_path: Path, is_on: bool) -> None:
    """Without it loggers do not get the hyperparameters."""
    logger = Recording()
    fitted(tmp_path, WithHyperparameters(), logger=logger, enable_autolog_hparams=is_on)
    assert logger.hyperparameters == [{"lr": 0.1}] * is_on


def test_barebones(tmp_path: Path) -> None:
    """Nothing is logged, saved or shown; training is the same."""
    with pytest.warns(UserWarning, match=r"self\.log\(\) has no effect"):
        train = Trainer(accelerator="cpu", devices=1, max_epochs=1, default_root_dir=tmp_path, barebones=True)
    assert (train.barebones, train.callbacks, train.loggers) == (True, [], [])
    model, expected = Line(), Line()
    train.fit(model, loader())
    plain = fitted(tmp_path, expected)
    assert torch.equal(model.layer.weight, expected.layer.weight)
    assert (train.callback_metrics, "loss" in plain.callback_metrics) == ({}, True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("logger", True), ("enable_checkpointing", True), ("enable_progress_bar", True)),
        *(("enable_model_summary", True), ("log_every_n_steps", 1), ("fast_dev_run", True)),
        *(("detect_anomaly", True), ("callbacks", ModelCheckpoint())),
    ],
)
def test_barebones_with_what_it_switches_off(name: str, value: Any) -> None:
    """That is a contradiction."""
    with warnings.catch_warnings(), pytest.raises(ConfigurationError):
        warnings.simplefilter("ignore")
        Trainer(barebones=True, accelerator="cpu", devices=1, **{name: value})


def batches_and_validations(folder: Path, **options: Any) -> str:
    """Return the numbers of the batches of a fit, and V for each validation."""
    model = Line()
    trainer(folder, **options).fit(model, loader(), loader(count=2))
    return " ".join(name[-1] if name.startswith("train") else "V" for name in model.seen)


@pytest.mark.parametrize(
    ("interval", "expected"), [(3, "0 1 2 V 3 0 1 V 2 3 0 V 1 2 3 V"), (10, "0 1 2 3 0 1 2 3 0 1 V 2 3")]
)
def test_validation_counted_over_epochs(tmp_path: Path, interval: int, expected: str) -> None:
    """With `check_val_every_n_epoch=None` the batches of all epochs count, also more than an epoch has."""
    options = {"check_val_every_n_epoch": None, "val_check_interval": interval}
    assert batches_and_validations(tmp_path, max_epochs=3, **options) == expected


def test_validation_counted_over_epochs_continues(tmp_path: Path) -> None:
    """A second fit goes on counting, from a checkpoint too."""
    options = {"check_val_every_n_epoch": None, "val_check_interval": 6}
    model, path = Line(), saved(tmp_path, None, loader(), loader(count=2), **options)
    trainer(tmp_path, max_epochs=2, **options).fit(model, loader(), loader(count=2), ckpt_path=path)
    assert model.seen == ["train 0", "train 1", "validate 0", "train 2", "train 3"]


@pytest.mark.parametrize(
    ("interval", "options", "expected"),
    [
        (timedelta(0), {}, "0 V 1 V 2 V 3 V 0 V 1 V 2 V 3 V"),
        ({"hours": 2}, {}, "0 1 2 3 0 1 2 3"),
        ("00:00:00:00", {"accumulate_grad_batches": 3, "check_val_every_n_epoch": 2}, "0 1 2 3 0 1 2 V 3 V"),
    ],
)
def test_validation_after_a_time(
    tmp_path: Path, interval: Any, options: dict[str, Any], expected: str
) -> None:
    """It comes where a window ends and the time has passed, in the epochs that are validated at all."""
    options = {"val_check_interval": interval, **options}
    assert batches_and_validations(tmp_path, max_epochs=2, **options) == expected


def test_the_time_counts_from_the_last_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of an epoch does not matter. Here a second passes in each training step, and only there."""
    model = Line()
    clock = SimpleNamespace(monotonic=lambda: sum(name.startswith("train") for name in model.seen))
    monkeypatch.setattr(evaluation, "time", clock)
    interval = timedelta(seconds=3)
    train = trainer(tmp_path, max_epochs=3, val_check_interval=interval, check_val_every_n_epoch=None)
    train.fit(model, loader(), loader(count=2))
    assert "".join("V" if name.startswith("validate") else "t" for name in model.seen) == "tttV" * 4
    assert train.val_check_interval == interval
