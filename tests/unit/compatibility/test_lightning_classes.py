"""Modules, data modules and callbacks of Lightning's own classes in a rankwise Trainer of one process."""

import copy
import importlib
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rankwise.errors import ConfigurationError, InvalidTypeError, MissingAttributeError
from rankwise.trainer import DataModule, TrainingModule
from tests.helpers.needs import need_installed
from tests.helpers.raising import raises
from tests.unit.trainer.helpers import loader, trainer

need_installed("lightning")
pytestmark = pytest.mark.filterwarnings("ignore")  # what Lightning and its dependencies warn of


@pytest.fixture(scope="module")
def pl() -> Any:
    """Return `lightning.pytorch`."""
    return importlib.import_module("lightning.pytorch")


@pytest.fixture(scope="module")
def make(pl: Any) -> Callable[..., Any]:
    """Return what makes a module of Lightning's, with further methods."""

    class Line(pl.LightningModule):
        def __init__(self, width: int = 2, loss: Any = abs) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layer = nn.Linear(width, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = nn.functional.mse_loss(self.layer(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def make(**methods: Any) -> Any:
        return type("Own", (Line,), methods)()

    return make


def fit(folder: Path, module: Any, *data: Any, **options: Any) -> Any:
    """Fit, and return the trainer."""
    made = trainer(folder, max_epochs=1, **options)
    made.fit(module, *(data or (loader(),)))
    return made


def test_the_classes_are_lent(tmp_path: Path, pl: Any, make: Callable[..., Any]) -> None:
    """In a stage a module is of both libraries; afterwards it is Lightning's, and has no trainer."""
    seen: list[Any] = []

    def on_fit_start(self: Any) -> None:
        seen.extend([isinstance(self, TrainingModule), isinstance(self, pl.LightningModule)])
        seen.extend([self.trainer.world_size, self.inner.trainer is self.trainer, type(self).__name__])
        batch = torch.ones(1)
        seen.append(self._on_before_batch_transfer(batch) is batch)  # as `to_onnx` calls it
        seen.append(type(self.optimizers(use_pl_optimizer=False)))

    module = make(on_fit_start=on_fit_start)
    module.inner, kind = make(), type(module)
    made = fit(tmp_path, module)
    assert seen == [True, True, 1, True, "Own", True, torch.optim.SGD]
    assert type(module) is kind
    assert not isinstance(module.inner, TrainingModule)
    assert module.current_epoch == 0
    with pytest.raises(RuntimeError, match="not attached"):
        module.trainer  # noqa: B018  it raises
    assert made.lightning_module is module


def test_copied_while_lent(tmp_path: Path, make: Callable[..., Any]) -> None:
    """A copy and a pickle have both classes, too: these go to other processes."""
    copies: list[Any] = []

    def on_fit_start(self: Any) -> None:
        copies.append(copy.deepcopy(self))
        copies.append(pickle.loads(pickle.dumps(self)))

    module = make(on_fit_start=on_fit_start)
    globals()["Own"], type(module).__qualname__, type(module).__module__ = type(module), "Own", __name__
    try:
        fit(tmp_path, module)
    finally:
        del globals()["Own"]
    for each in copies:
        assert isinstance(each, TrainingModule)
        assert isinstance(each, type(module))
        assert each.hparams.width == 2
        assert each.layer.weight is not module.layer.weight


def test_hyperparameters(tmp_path: Path, make: Callable[..., Any]) -> None:
    """Those that Lightning has saved are in checkpoints, but for what these cannot hold: that is said."""
    module = make(on_save_checkpoint=lambda self, checkpoint: None)
    with pytest.warns(UserWarning, match=r"will not have the hyperparameters loss"):
        made = fit(tmp_path, module, enable_checkpointing=True)
    path = made.checkpoint_callback.best_model_path
    assert torch.load(path, weights_only=True)["hyper_parameters"] == {"width": 2}
    made.save_checkpoint(tmp_path / "again.ckpt")
    again = torch.load(tmp_path / "again.ckpt", weights_only=True)
    assert again["hyper_parameters"] == {"width": 2}
    assert type(module).load_from_checkpoint(path, weights_only=True).hparams.width == 2


def test_a_data_module(tmp_path: Path, pl: Any, make: Callable[..., Any]) -> None:
    """One of Lightning's gives the loaders; in a stage it is of both libraries."""
    seen: list[Any] = []

    class Data(pl.LightningDataModule):
        def setup(self, stage: str) -> None:
            seen.extend([stage, isinstance(self, DataModule), self.trainer.world_size])

        def train_dataloader(self) -> Any:
            return loader()

    data = Data()
    made = fit(tmp_path, make(), data)
    assert seen == ["fit", True, 1]
    assert (made.datamodule, type(data), data.trainer) == (data, Data, None)
    with pytest.raises(ConfigurationError, match="loaders and a data module"):
        trainer(tmp_path).fit(make(), loader(), datamodule=data)


def test_callbacks(tmp_path: Path, pl: Any, make: Callable[..., Any]) -> None:
    """A user's callback is called; so is one that the module configures, and one without any methods."""
    seen: list[str] = []

    class Note(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            seen.append(type(pl_module).__name__)
            assert not hasattr(self, "configure_sharded_model")  # which a module has

    class Other(Note):
        pass

    module = make(configure_callbacks=lambda self: Other())
    made = fit(tmp_path, module, callbacks=[Note(), pl.Callback()])
    assert seen == ["Own", "Own"]
    assert {"Note", "Other", "Callback"} <= {type(each).__name__ for each in made.callbacks}


def test_hooks_that_lightning_ignores(tmp_path: Path, make: Callable[..., Any]) -> None:
    """A method with the name of a hook of Lightning 1.x may be the module's own: there is a warning."""
    with pytest.warns(UserWarning, match=r"Own\.on_epoch_end\(\) is not a hook"):
        fit(tmp_path, make(on_epoch_end=lambda self, outputs: None))


@pytest.mark.parametrize("name", ["training_epoch_end", "configure_sharded_model"])
def test_hooks_that_would_never_be_called(tmp_path: Path, make: Callable[..., Any], name: str) -> None:
    """They are refused before anything starts; a class that cannot be derived from is named."""
    methods = {name: lambda self, outputs=None: None}
    module = make(**methods, prepare_data=lambda self: pytest.fail("it has started"))
    kind = type(module)
    raises(ConfigurationError, rf"{name}\(\) would never be called", fit, tmp_path, module)
    assert type(module) is kind

    def refuse(cls: Any, **options: Any) -> None:
        raise TypeError("it is final")

    with pytest.raises(ConfigurationError, match="Own cannot be used with rankwise's Trainer: it is final"):
        fit(tmp_path, make(__init_subclass__=refuse))


def test_missing_attributes(tmp_path: Path, make: Callable[..., Any]) -> None:
    """Reading an attribute of the trainer that does not exist raises an error that names what to write."""
    instead = {"fit_loop": "progress", "plugins": "strategy", "_data_connector": "datamodule"}
    for name, write in instead.items():
        module = make(on_train_end=lambda self, name=name: getattr(self.trainer, name))
        text = rf"(?s)Trainer has no {name}\..*Fix: .*trainer\.{write}"
        raises(MissingAttributeError, text, fit, tmp_path, module)
        assert module.layer.weight.grad is not None  # it has trained until then


def test_what_is_not_read_is_not_missing(tmp_path: Path, pl: Any, make: Callable[..., Any]) -> None:
    """Methods that are not called may read anything; code may ask what there is, and set attributes."""

    class Note(pl.Callback):
        def score_of(self, trainer: Any) -> Any:
            return trainer.booster.best_score

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            assert not hasattr(trainer, "fit_loop")
            raises(AttributeError, "'Trainer' object has no attribute 'booster'", self.score_of, trainer)
            trainer.mine = trainer.strategy.world_size

    made: Any = fit(tmp_path, make(), callbacks=Note())
    assert made.mine == 1


def test_lightnings_own_parts_are_refused(tmp_path: Path, pl: Any) -> None:
    """What comes with Lightning needs its Trainer; the error says what to import instead."""
    own_stopping = type("Mine", (pl.callbacks.EarlyStopping,), {})("loss")
    for callback in (pl.callbacks.ModelCheckpoint(), own_stopping):
        with pytest.raises(ConfigurationError, match=r"Lightning's own (Mod|Early)[\s\S]*rankwise\.light"):
            trainer(tmp_path, callbacks=[callback])
    with pytest.raises(InvalidTypeError, match=r"import rankwise\.lightning as pl"):
        trainer(tmp_path, logger=pl.loggers.CSVLogger(tmp_path))
