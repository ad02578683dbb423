"""Checkpoints of a fit, and continuing from them."""

import datetime as dt
import signal
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from rankwise.callbacks import Callback, EarlyStopping, LambdaCallback, ModelCheckpoint, MonitoringCallback
from rankwise.checkpoint import AsyncCheckpointIO, TorchCheckpointIO
from rankwise.errors import CheckpointError, ConfigurationError, LifecycleError
from tests.helpers.own_process import signal_handled
from tests.helpers.raising import raises
from tests.unit.trainer.helpers import Line, fitted, loader, saved, trainer


class WithMomentum(Line):
    """Has an optimizer with state and a scheduler with a function in it."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        return [optimizer], [LambdaLR(optimizer, lambda epoch: 0.9**epoch)]


def test_contents(tmp_path: Path) -> None:
    """A checkpoint holds the position of training, in plain types; frozen sets are saved as sets."""
    model = Line()
    nested = OrderedDict(widths=Counter({np.int64(1): np.int64(2)}), deep=(OrderedDict(a=[np.float32(0.5)]),))
    model.hparams = {"lr": 0.1, "data": Path("here"), "width": np.int64(3), "nested": nested}
    model.hparams |= {"frozen": frozenset({1}), "paths": {Path("a")}}
    checkpoint = TorchCheckpointIO().load_checkpoint(saved(tmp_path, model))
    assert (checkpoint["epoch"], checkpoint["global_step"]) == (1, 4)
    assert list(checkpoint["state_dict"]) == ["layer.weight", "layer.bias"]
    assert checkpoint["state_dict"]._metadata.keys() == {"", "layer"}
    plain = OrderedDict(widths=Counter({1: 2}), deep=(OrderedDict(a=[0.5]),))
    expected = {"lr": 0.1, "data": "here", "width": 3, "nested": plain, "frozen": {1}, "paths": {"a"}}
    assert checkpoint["hyper_parameters"] == expected
    (rank,) = checkpoint["ranks"]  # these keys stay, so that a fit continues from older checkpoints
    assert list(rank["metrics"]) == ["callback_metrics", "logged_metrics", "_progress_bar_metrics"]
    model.hparams = {"nested": {frozenset({1})}}
    raises(CheckpointError, r"\['nested'\]", saved, tmp_path, model)


@pytest.mark.parametrize("plugins", [None, AsyncCheckpointIO()], ids=["at once", "in a thread"])
def test_hyper_parameters_that_could_not_be_loaded_are_refused_beforehand(
    tmp_path: Path, plugins: Any
) -> None:
    """No step runs, nothing is written, and the error names them."""
    model = Line()
    model.hparams = {"lr": 0.1, "data": {"until": dt.date(2020, 1, 2)}}
    saving = ModelCheckpoint(tmp_path / "here")
    train = trainer(tmp_path, callbacks=saving, plugins=plugins)
    place = r"checkpoint\['hyper_parameters'\]\['data'\]\['until'\] \(datetime.date\)"
    with pytest.raises(CheckpointError, match=rf"/here.*cannot be written.*{place}(?s:.*)str\(date\)"):
        train.fit(model, loader())
    assert (model.seen, list(tmp_path.iterdir())) == ([], [])


class Plain:
    """Saves the hyper parameters as text, as a module or a callback does."""

    def on_save_checkpoint(self, *arguments: Any) -> None:
        arguments[-1]["hyper_parameters"] = {"until": "2020-01-02"}


class PlainLine(Plain, Line):
    """A module."""


class PlainCallback(Plain, Callback):
    """A callback."""


@pytest.mark.parametrize(
    ("model", "callbacks", "options"),
    [
        (Line, [], {}),
        (Line, [ModelCheckpoint(save_top_k=0)], {}),
        (Line, [ModelCheckpoint()], {"fast_dev_run": True}),
        (PlainLine, [ModelCheckpoint()], {}),
        (Line, [ModelCheckpoint(), PlainCallback()], {}),
        (Line, [ModelCheckpoint(), LambdaCallback(on_save_checkpoint=Plain().on_save_checkpoint)], {}),
    ],
    ids=["no callback", "keeps none", "fast_dev_run", "module's hook", "callback's hook", "function"],
)
def test_hyper_parameters_that_no_checkpoint_gets_may_be_anything(
    tmp_path: Path, model: type[Line], callbacks: list[Callback], options: Any
) -> None:
    """They are accepted if nothing is saved, or if a hook makes them plain."""
    trained = model()
    trained.hparams = {"until": dt.date(2020, 1, 2)}
    fitted(tmp_path, trained, callbacks=callbacks, **options)
    assert trained.seen


class Records:
    """Adds its name to `calls` and to the checkpoint, in both checkpoint hooks."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name = name
        self.calls = calls

    def on_save_checkpoint(self, *arguments: Any) -> None:
        arguments[-1][f"of {self.name}"] = self.name
        self.calls.append(f"{self.name} saves")

    def on_load_checkpoint(self, *arguments: Any) -> None:
        self.calls.append(f"{arguments[-1][f'of {self.name}']} loads")


class RecordingMonitor(Records, MonitoringCallback):
    """A monitoring callback, whose other hooks run after the module's."""

    def __init__(self, name: str, calls: list[str]) -> None:
        MonitoringCallback.__init__(self, None, "min")
        Records.__init__(self, name, calls)


class RecordingCallback(Records, Callback):
    """A callback."""


class RecordingLine(Records, Line):
    """A module."""

    def __init__(self, calls: list[str]) -> None:
        Line.__init__(self)
        Records.__init__(self, "module", calls)


def test_order_of_checkpoint_hooks(tmp_path: Path) -> None:
    """Callbacks come in their order; the module is last in saving and first in loading; each may add."""
    calls: list[str] = []
    callbacks = [RecordingMonitor("first", calls), RecordingCallback("second", calls)]
    path = saved(tmp_path, RecordingLine(calls), callbacks=callbacks)
    trainer(tmp_path, callbacks=callbacks).test(RecordingLine(calls), loader(), ckpt_path=path)
    saves, loads = ("first", "second", "module"), ("module", "first", "second")
    assert calls == [*(f"{name} saves" for name in saves), *(f"{name} loads" for name in loads)]


def test_resumed_run_ends_like_an_uninterrupted_one(tmp_path: Path) -> None:
    """Two epochs, saved and resumed for two more, end with the weights of four."""
    whole, resumed = WithMomentum(), WithMomentum()
    fitted(tmp_path, whole, max_epochs=4)
    path = saved(tmp_path, WithMomentum(), max_epochs=2)
    train = trainer(tmp_path, max_epochs=4)
    for _ in range(2):  # a run that has ended may start again from there
        train.fit(resumed, loader(), ckpt_path=path)
        assert torch.equal(resumed.layer.weight, whole.layer.weight)
        assert (train.current_epoch, train.global_step) == (4, 16)


@pytest.mark.parametrize("which", ["last", "best"])
def test_checkpoint_at_the_end_of_an_epoch(tmp_path: Path, which: str) -> None:
    """A checkpoint from the end of an epoch continues with the next epoch."""
    whole, model, saving = WithMomentum(), WithMomentum(), ModelCheckpoint(tmp_path, save_last=True)
    fitted(tmp_path, whole, max_epochs=3)
    first = fitted(tmp_path, model, max_epochs=2, callbacks=saving)
    first.max_epochs = 3
    first.fit(model, loader(), ckpt_path=which)
    assert torch.equal(model.layer.weight, whole.layer.weight)


def test_epoch_that_was_cut_short_goes_on(tmp_path: Path) -> None:
    """A checkpoint from within an epoch continues with that epoch's next batch."""
    path = saved(tmp_path, max_steps=6, max_epochs=-1)
    model = Line()
    train = fitted(tmp_path, model, max_epochs=2, ckpt_path=path)
    assert (train.current_epoch, train.global_step) == (2, 8)
    assert model.seen == ["train 2", "train 3"]


def test_what_is_restored(tmp_path: Path) -> None:
    """A callback's state is restored; an evaluation with `ckpt_path` uses the weights of the file."""
    trained, stopping = Line(), EarlyStopping("loss", patience=9)
    path, train = saved(tmp_path, trained, callbacks=EarlyStopping("loss", patience=9)), trainer(tmp_path)
    with pytest.warns(UserWarning, match="Nothing to train"):
        trainer(tmp_path, callbacks=stopping).fit(Line(), loader(), ckpt_path=path)
    assert stopping.best_score < float("inf")
    assert train.test(Line(), loader(), ckpt_path=path) == train.test(trained, loader())
    assert train.ckpt_path is None


class Counts(Callback):
    """Counts the batches of training, also over several runs."""

    count = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_callbacks_in_an_evaluation(tmp_path: Path, stage: str) -> None:
    """They get their state, as in Lightning; those that count the run keep theirs. No warning."""
    counts, saving, path = Counts(), ModelCheckpoint(tmp_path / "kept", monitor="loss"), tmp_path / "1.ckpt"
    first = LambdaCallback(
        on_train_epoch_end=lambda runs, _: runs.current_epoch or runs.save_checkpoint(path)
    )
    train = fitted(tmp_path, callbacks=[first, counts, saving], max_epochs=2)
    best = saving.best_model_path
    assert counts.count == 8
    getattr(train, stage)(Line(), loader(), ckpt_path=path)
    assert (counts.count, saving.best_model_path) == (4, best)
    getattr(trainer(tmp_path), stage)(Line(), loader(), ckpt_path=path)


def test_what_does_not_exist(tmp_path: Path) -> None:
    """There may be no best checkpoint, no file of a path, and before a fit nothing to save."""
    with pytest.raises(ConfigurationError, match='ckpt_path="best" finds no checkpoint'):
        trainer(tmp_path).test(Line(), loader(), ckpt_path="best")
    with pytest.raises(CheckpointError, match="does not exist"):
        trainer(tmp_path).fit(Line(), loader(), ckpt_path=tmp_path / "no.ckpt")
    raises(LifecycleError, "save_checkpoint", trainer(tmp_path).save_checkpoint, tmp_path / "x.ckpt")


@pytest.mark.filterwarnings("ignore:Fixed.configure_optimizers")
def test_other_modules_and_optimizers(tmp_path: Path) -> None:
    """Weights of another module and optimizer states that do not fit are refused, naming what does not."""

    class Wider(Line):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 1)

    class Fixed(Line):
        def configure_optimizers(self) -> None:
            return None

    path = saved(tmp_path)
    with pytest.raises(CheckpointError, match=r"does not fit Wider: .*\n.*layer\.weight"):
        trainer(tmp_path).test(Wider(), loader(), ckpt_path=path)
    with pytest.raises(CheckpointError, match="does not fit the optimizers"):
        trainer(tmp_path).fit(Fixed(), loader(), ckpt_path=path)


def test_a_signal_while_a_state_is_loaded(tmp_path: Path) -> None:
    """What the user's handler raises is no fault of the checkpoint, and raised as it is."""

    def stop(*_: object) -> None:
        raise ValueError("from the handler")

    class Interrupted(torch.optim.SGD):
        def load_state_dict(self, state_dict: Any) -> None:
            signal.raise_signal(signal.SIGALRM)

    class Loading(Line):
        def configure_optimizers(self) -> Any:
            return Interrupted(self.parameters(), lr=0.1)

    class Signals(Line):
        def load_state_dict(self, *args: Any, **options: Any) -> Any:
            signal.raise_signal(signal.SIGALRM)

    path, train = saved(tmp_path), trainer(tmp_path)
    for run, model in ((train.fit, Loading()), (train.validate, Signals())):
        with (
            signal_handled(signal.SIGALRM, stop),
            pytest.raises(ValueError, match=r"^from the handler$") as caught,
        ):
            run(model, loader(), ckpt_path=path)
        assert type(caught.value) is ValueError


@pytest.mark.parametrize(
    ("contents", "problem"),
    [({"weights": 1}, "holds no 'state_dict'"), ({"state_dict": Line().state_dict()}, "holds no .*loops")],
)
def test_files_of_other_programs(tmp_path: Path, contents: dict[str, Any], problem: str) -> None:
    """A file that torch.save wrote, but that is no checkpoint of a fit, is refused."""
    path = tmp_path / "other.ckpt"
    TorchCheckpointIO().save_checkpoint(contents, path)
    raises(CheckpointError, problem, trainer(tmp_path).fit, Line(), loader(), ckpt_path=path)
