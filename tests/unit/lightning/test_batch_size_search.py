"""`Tuner.scale_batch_size`: the sizes that it finds, and that it leaves no traces."""

from pathlib import Path
from typing import Any

import pytest
import torch
from typing_extensions import override

from rankwise import DataModule, Trainer
from rankwise.errors import ConfigurationError, InvalidArgumentError, InvalidTypeError
from rankwise.lightning.tuner import Tuner
from tests.unit.trainer.helpers import Line, loader, trainer, with_second_rank


class Hungry(Line):
    """Has memory for `most` samples, of `count`; `error` is raised otherwise."""

    def __init__(self, most: int = 20, count: int = 64) -> None:
        super().__init__()
        self.batch_size = 1
        self.most, self.count = most, count
        self.error: Exception = torch.OutOfMemoryError("CUDA out of memory.")

    @override
    def loss(self, batch: Any) -> Any:
        if len(batch[0]) > self.most:
            raise self.error
        return super().loss(batch)

    @override
    def train_dataloader(self) -> Any:
        return loader(self.count, self.batch_size)

    @override
    def val_dataloader(self) -> Any:
        return loader(self.count, self.batch_size)

    test_dataloader = val_dataloader


def found(folder: Path, model: Any, options: dict[str, Any] | None = None, **arguments: Any) -> Any:
    """Search with a trainer of these options, and return the size."""
    return Tuner(trainer(folder, **(options or {}))).scale_batch_size(model, **arguments)


@pytest.mark.parametrize(
    ("most", "arguments", "size"),
    [
        (20, {}, 16),
        (20, {"mode": "binsearch", "margin": 0.0}, 20),
        (20, {"mode": "binsearch"}, 19),
        (20, {"mode": "binsearch", "margin": 0.0, "max_trials": 5}, 16),
        (20, {"init_val": 50}, 12),
        (20, {"max_trials": 2}, 4),
        (20, {"max_val": 10}, 10),
        (99, {}, 64),
        (99, {"init_val": 3, "steps_per_trial": 1}, 96),
    ],
)
def test_the_size_that_is_found(tmp_path: Path, most: int, arguments: dict[str, Any], size: int) -> None:
    """It fits, and takes all data at most once; the module has it afterwards."""
    model = Hungry(most)
    assert found(tmp_path, model, **arguments) == model.batch_size == size
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("method", ["fit", "validate", "test"])
def test_stages(tmp_path: Path, method: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each stage is tried by itself; nothing is printed."""
    model = Hungry()
    model.test_step = model.validation_step  # type: ignore[method-assign]  # as users do
    assert found(tmp_path, model, method=method) == 16
    assert capsys.readouterr().out == ""


def test_predictions(tmp_path: Path) -> None:
    """They are not kept; another attribute may have the size."""

    class Predicts(Hungry):
        width = 1

        @override
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch)

        @override
        def predict_dataloader(self) -> Any:
            return loader(self.count, self.width)

    model = Predicts()
    assert found(tmp_path, model, method="predict", batch_arg_name="width") == model.width == 16
    assert model.batch_size == 1


class Data(DataModule):
    """Has the loader, and its batch size as a hyperparameter."""

    def __init__(self, batch_size: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()

    @override
    def train_dataloader(self) -> Any:
        return loader(64, self.hparams["batch_size"])


@pytest.mark.filterwarnings("ignore:Of Hungry these methods are not called")
@pytest.mark.parametrize("name", ["datamodule", "train_dataloaders"])
def test_a_data_module(tmp_path: Path, name: str) -> None:
    """Its hyperparameter is set."""
    model, data = Hungry(), Data()
    assert found(tmp_path, model, None, **{name: data}) == data.hparams["batch_size"] == 16


def test_no_traces(tmp_path: Path) -> None:
    """But for the batch size, a fit is as one without a search."""
    results = []
    for searches in (False, True):
        torch.manual_seed(3)
        model, train = Hungry(), trainer(tmp_path)
        if searches:
            Tuner(train).scale_batch_size(model)
            assert (train.global_step, model.seen) == (0, [])
        model.batch_size = 8
        train.fit(model)
        results.append((model.layer.weight.tolist(), torch.rand(1).item(), train.global_step))
    assert results[0] == results[1]


@pytest.mark.parametrize("error", [RuntimeError("shape"), torch.OutOfMemoryError("CUDA out of memory.")])
def test_nothing_fits(tmp_path: Path, error: Exception) -> None:
    """Then an error says so; other errors are the module's own. The batch size is that from before."""
    model = Hungry(0)
    model.error = error
    is_own = isinstance(error, torch.OutOfMemoryError)
    expected = "found no batch size" if is_own else "shape"
    with pytest.raises(ConfigurationError if is_own else RuntimeError, match=expected):
        found(tmp_path, model)
    assert model.batch_size == 1


def test_memory_of_the_cpu(tmp_path: Path) -> None:
    """Torch's own error where the machine has no memory is one, too."""
    model = Hungry()
    model.error = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried ...")
    assert found(tmp_path, model) == 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "linear"}, "mode='linear'"),
        ({"method": "tune"}, "method='tune'"),
        ({"steps_per_trial": 0}, "steps_per_trial=0"),
        ({"init_val": 0}, "init_val=0"),
        ({"max_trials": 0}, "max_trials=0"),
        ({"max_val": 0}, "max_val=0"),
        ({"margin": 1.0}, "margin=1.0"),
    ],
)
def test_arguments_out_of_range(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    """The error names the argument."""
    with pytest.raises(InvalidArgumentError, match=message):
        found(tmp_path, Hungry(), **arguments)


@pytest.mark.parametrize("name", ["train_dataloaders", "val_dataloaders", "dataloaders"])
def test_loaders(tmp_path: Path, name: str) -> None:
    """Their batch size is fixed."""
    with pytest.raises(ConfigurationError, match=f"{name}=.* a loader's batch size is fixed"):
        found(tmp_path, Hungry(), None, **{name: loader()})


def test_where_there_is_no_size(tmp_path: Path) -> None:
    """A module without that attribute, and one that is no module."""
    with pytest.raises(ConfigurationError, match="finds no 'batch_size' to set"):
        found(tmp_path, Line())
    with pytest.raises(InvalidTypeError, match="TrainingModule"):
        found(tmp_path, object())


def test_one_rank_of_several(tmp_path: Path) -> None:
    """There a lack of memory would end the job."""
    train = Trainer(strategy=with_second_rank(lambda mine: mine), logger=False, default_root_dir=tmp_path)
    with pytest.raises(ConfigurationError, match="where this process is a rank of several"):
        Tuner(train).scale_batch_size(Hungry())


def test_a_trial_run(tmp_path: Path) -> None:
    """`fast_dev_run` does not search, and says so."""
    with pytest.warns(UserWarning, match="does not search in a trial run"):
        assert found(tmp_path, Hungry(), {"fast_dev_run": True}) is None
