"""A data module: its hooks in Lightning's order, its loaders, hyperparameters and state."""

import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import RandomSampler

from rankwise import DataModule
from rankwise.callbacks import Callback, ModelCheckpoint
from rankwise.errors import CheckpointError, ConfigurationError, InvalidTypeError
from rankwise.trainer.data.data_module import TRANSFER_HOOKS, DataHooks, prepares_data
from tests.helpers.raising import raises
from tests.unit.trainer.helpers import Line, Stream, calls_in, fitted, loader, noting, samples, trainer


class Numbers(DataModule):
    """Loaders of 8 samples."""

    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.seen: list[str] = []
        self.count = 0

    def __len__(self) -> int:
        return 0

    def train_dataloader(self) -> Any:
        return loader(8, self.hparams.batch_size)

    def val_dataloader(self) -> Any:
        return loader(8, 4)

    test_dataloader = predict_dataloader = val_dataloader

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"] + 0


# What Lightning 2.6 calls: d for the data module, c for the callback, m for the module.
FIT = """
d prepare_data, m prepare_data, d setup, c setup, m setup, m configure_optimizers, c on_fit_start,
m on_fit_start, d train_dataloader, d val_dataloader, c on_train_start, m on_train_start,
d on_before_batch_transfer, d transfer_batch_to_device, d on_after_batch_transfer, m training_step,
d on_before_batch_transfer, d transfer_batch_to_device, d on_after_batch_transfer, m training_step,
d on_before_batch_transfer, d transfer_batch_to_device, d on_after_batch_transfer, m validation_step,
d on_before_batch_transfer, d transfer_batch_to_device, d on_after_batch_transfer, m validation_step,
d teardown, c teardown, m teardown
"""
TEST = """
d prepare_data, m prepare_data, d setup, c setup, m setup,
m on_load_checkpoint, d load_state_dict, c on_load_checkpoint, d test_dataloader,
d on_before_batch_transfer, d transfer_batch_to_device, d on_after_batch_transfer, m test_step,
d on_before_batch_transfer, d transfer_batch_to_device, d on_after_batch_transfer, m test_step,
d teardown, c teardown, m teardown
"""
SAVE = "d state_dict, c on_save_checkpoint, m on_save_checkpoint"
FAILED = "c on_exception, d on_exception, d teardown, c teardown, m teardown"
ALL = calls_in(f"{FIT},{TEST},{SAVE},{FAILED}")


def test_lightnings_order(tmp_path: Path) -> None:
    """Fit with validation, saving, test of a checkpoint: the calls are Lightning's, in its order.

    A later stage with loaders sets the data module up, too, but the batches do not go through its hooks.
    `on_exception` gets what a step raises, after the callbacks' one; teardown follows.
    """
    seen: list[str] = []

    class Failing(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.clear()
            raise ValueError("bad batch")

    model, data, path = (
        noting(Line(), "m", ALL, seen),
        noting(Numbers(), "d", ALL, seen),
        tmp_path / "model.ckpt",
    )
    runs = trainer(tmp_path, callbacks=noting(Callback(), "c", ALL, seen))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runs.fit(model, data)
    assert ([str(warning.message) for warning in caught], seen) == ([], calls_in(FIT))
    seen.clear()
    runs.save_checkpoint(path)
    assert seen == calls_in(SAVE)
    seen.clear()
    runs.test(model, datamodule=data, ckpt_path=path)
    assert seen == calls_in(TEST)
    seen.clear()
    runs.validate(Line(), loader(8, 4))
    assert [each for each in seen if each[0] == "d"] == ["d prepare_data", "d setup", "d teardown"]
    raises(ValueError, "bad batch", runs.fit, noting(Failing(), "m", ALL, seen), data)
    assert seen[-5:] == calls_in(FAILED)


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_in_every_stage(tmp_path: Path, stage: str) -> None:
    """By position and by name a data module's loaders are used, as the same loaders would be."""
    data, runs = Numbers(), trainer(tmp_path)
    expected = getattr(trainer(tmp_path), stage)(Line(), loader(8, 4))
    by_position = getattr(runs, stage)(Line(), data)
    assert str(by_position) == str(expected) == str(getattr(runs, stage)(Line(), datamodule=data))
    assert runs.datamodule is data
    assert data.trainer is runs


def test_without_a_trainer() -> None:
    """`trainer` is None then, also in a copy; the transfer works, and missing loaders are named."""
    data = Numbers()
    data.trainer = object()  # type: ignore[assignment]  # any trainer
    copied = pickle.loads(pickle.dumps(data))
    assert copied.trainer is None
    assert copied.hparams == {"batch_size": 4}
    moved = copied.transfer_batch_to_device([torch.ones(1)], torch.device("cpu"), 0)
    assert moved == [torch.ones(1)]
    raises(ConfigurationError, r"not define train_dataloader\(\)", DataModule().train_dataloader)


def test_what_is_refused_before_the_start(tmp_path: Path) -> None:
    """Loaders and a data module; none of the two; another object; a loader that is missing; an attribute."""
    runs, both = trainer(tmp_path), r"fit\(\) was given loaders and a data module"
    raises(ConfigurationError, both, runs.fit, Line(), loader(), datamodule=Numbers())
    raises(ConfigurationError, both, runs.fit, Line(), Numbers(), loader())
    raises(InvalidTypeError, "datamodule", runs.fit, Line(), datamodule=loader())
    raises(ConfigurationError, r"not define test_dataloader\(\)", runs.test, Line(), DataModule())
    data = Numbers()
    data.train_dataloader = loader()  # type: ignore[method-assign, assignment]  # refused
    raises(InvalidTypeError, r"Numbers\.train_dataloader", runs.fit, Line(), data)
    for owner in (Line(), Numbers()):  # to allow empty loaders on some ranks would have no effect
        vars(owner)["allow_zero_length_dataloader_with_multiple_devices"] = True
        arguments: Any = (owner, loader()) if isinstance(owner, Line) else (Line(), owner)
        expected = f"{type(owner).__name__}.allow_zero_length_.* has no effect"
        raises(ConfigurationError, expected, runs.fit, *arguments)
    assert runs.datamodule is None


@pytest.mark.parametrize("name", ["on_train_start", "on_epoch_end", "on_save_checkpoint", "on_batch_start"])
def test_hooks_that_are_not_called(tmp_path: Path, name: str) -> None:
    """A data module with a hook that it does not have is refused, by name; so is one with other arguments."""
    odd, older = (type("Odd", (Numbers,), {hook: lambda self: None})() for hook in (name, "setup"))
    raises(ConfigurationError, rf"Odd\.{name}\(\) would never be called", trainer(tmp_path).fit, Line(), odd)
    raises(ConfigurationError, r"Odd\.setup\(\) cannot be called", trainer(tmp_path).fit, Line(), older)


def test_the_modules_methods_that_a_data_module_replaces(tmp_path: Path) -> None:
    """They are not called, as in Lightning; a warning names them."""

    class Own(Line):
        def train_dataloader(self) -> Any:
            raise AssertionError

        on_before_batch_transfer = on_after_batch_transfer = lambda self, batch, dataloader_idx: batch

    class Moving(Numbers):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return batch

    expected = r"Of Own these methods are not called.*: train_dataloader, on_before_batch_transfer\."
    with pytest.warns(UserWarning, match=expected):
        trainer(tmp_path).fit(Own(), Moving())


def test_from_datasets(tmp_path: Path) -> None:
    """The training loader shuffles; the constructor gets what it takes; val_dataloader may be missing."""
    data = Numbers.from_datasets({"a": samples(4), "b": Stream(range(3))}, [samples(2)], batch_size=2)
    train, [validation] = data.train_dataloader(), data.val_dataloader()
    assert data.hparams == {"batch_size": 2}
    assert isinstance(train["a"].sampler, RandomSampler)
    assert not isinstance(train["b"].sampler, RandomSampler)
    assert (train["a"].batch_size, validation.batch_size) == (2, 2)
    copied = pickle.loads(pickle.dumps(Numbers.from_datasets(samples(4), batch_size=2)))
    assert len(copied.train_dataloader()) == 2
    assert len(data.test_dataloader()) == 2  # the class's own
    raises(InvalidTypeError, "val_dataset", DataModule.from_datasets, val_dataset=[3])
    model = Line()
    trainer(tmp_path).fit(model, DataModule.from_datasets(train_dataset=samples(4), batch_size=2))
    assert model.seen == ["train 0", "train 1"]


def test_hyperparameters_and_state_of_a_checkpoint(tmp_path: Path) -> None:
    """A checkpoint has both, under Lightning's keys, and they are restored from it."""
    data, runs = Numbers(batch_size=2), trainer(tmp_path)
    data.count = 7
    runs.fit(Line(), data)
    for path, weights_only in ((tmp_path / "all.ckpt", False), (tmp_path / "weights.ckpt", True)):
        runs.save_checkpoint(path, weights_only=weights_only)
        saved = torch.load(path, weights_only=True)
        assert saved["datamodule_hyper_parameters"] == {"batch_size": 2}
        assert saved["Numbers"] == {"count": 7}
        loaded = Numbers.load_from_checkpoint(path)
        assert (loaded.count, loaded.hparams) == (7, {"batch_size": 2})
    assert Numbers.load_from_checkpoint(tmp_path / "all.ckpt", batch_size=8).hparams == {"batch_size": 8}
    resumed = Numbers()
    trainer(tmp_path, max_epochs=2).fit(Line(), resumed, ckpt_path=tmp_path / "all.ckpt")
    assert resumed.count == 7


class Odd(Numbers):
    """Has another state."""

    state: dict[str, Any] = {}

    def __init__(self, function: Any = None) -> None:
        super().__init__()

    def state_dict(self) -> dict[str, Any]:
        return self.state


def test_other_states_and_hyperparameters(tmp_path: Path) -> None:
    """A checkpoint has no entry for a data module without a state, whose `load_state_dict` is not called.

    The error for a state that does not load names the file and the class. `fit` warns of hyperparameters
    that checkpoints cannot hold, as of a module's.
    """
    data, runs, path = Odd(), trainer(tmp_path), tmp_path / "odd.ckpt"
    runs.fit(Line(), data)
    runs.save_checkpoint(path)
    assert "Odd" not in torch.load(path, weights_only=True)
    runs.test(Line(), data, ckpt_path=path)
    data.state = {"count": None}
    runs = fitted(tmp_path, None, data, callbacks=ModelCheckpoint(dirpath=tmp_path))
    runs.save_checkpoint(path)
    raises(CheckpointError, r"odd\.ckpt.*Odd", runs.test, Line(), data, ckpt_path=path)
    with pytest.warns(UserWarning, match=r"Checkpoints will not have the hyperparameters function"):
        runs.fit(Line(), Odd(lambda: None))


def test_logged_hyperparameters(tmp_path: Path) -> None:
    """Loggers get those of both; two values of one name are refused, unless they are equal."""

    class Sized(Line):
        def __init__(self, batch_size: int = 4, width: int = 1) -> None:
            super().__init__()
            self.save_hyperparameters()

    fitted(tmp_path, Sized(), Numbers(), logger=True)
    saved = next(tmp_path.rglob("hparams.*")).read_text()
    assert "batch_size" in saved
    assert "width" in saved
    with pytest.raises(ConfigurationError, match="different values of the hyperparameter 'batch_size'"):
        trainer(tmp_path, logger=True).fit(Sized(batch_size=3), Numbers())


@pytest.mark.parametrize(("per_node", "expected"), [(True, [(0, 0), (0, 1)]), (False, [(0, 0)])])
def test_which_processes_prepare_data(per_node: bool, expected: list[tuple[int, int]]) -> None:
    """The first of each node, or of the first node; the same for modules."""
    owners: list[DataHooks] = [Numbers(), Line()]
    for owner in owners:
        assert owner.prepare_data_per_node
        owner.prepare_data_per_node = per_node
        ids = [(local_rank, node_rank) for node_rank in range(2) for local_rank in range(2)]
        assert [each for each in ids if prepares_data(owner, *each)] == expected


def test_transfer_hooks_get_the_number_of_the_loader(tmp_path: Path) -> None:
    """Also with several loaders; where the data module has no such hook, the module's is called."""
    seen: list[Any] = []

    class Two(Numbers):
        def val_dataloader(self) -> Any:
            return [loader(2, 2), loader(2, 2)]

        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            seen.append(("d", dataloader_idx))
            return batch

    class Moving(Line):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            pass

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            seen.append(("m", dataloader_idx))
            return batch

    trainer(tmp_path).validate(Moving(), Two())
    assert seen == [("d", 0), ("m", 0), ("d", 1), ("m", 1)]
    assert set(TRANSFER_HOOKS) <= set(dir(DataModule))
