"""Which of the existing files a fit continues from: `ckpt_path="last"`, and restarts."""

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rankwise.callbacks import EarlyStopping, ModelCheckpoint
from rankwise.checkpoint import AsyncCheckpointIO, CheckpointIO, TorchCheckpointIO
from rankwise.errors import CheckpointError, ConfigurationError
from rankwise.loggers import CSVLogger
from rankwise.stores import rendezvous
from rankwise.stores.rendezvous import RestartInfo
from rankwise.trainer import Trainer
from rankwise.trainer.checkpointing import newest_first, save_stop_checkpoint
from tests.unit.trainer.helpers import Line, fitted, loader, saved, trainer

JOB = "a job"
BOTH = {"last.ckpt", "last-v1.ckpt"}


def from_last(folder: Path, max_epochs: int = 1, **options: Any) -> Trainer:
    """Fit from `"last"`, with a callback that saves in its default folder."""
    defaults = {"logger": True, "enable_checkpointing": True, "callbacks": ModelCheckpoint(save_last=True)}
    return fitted(folder, max_epochs=max_epochs, ckpt_path="last", **{**defaults, **options})


def begun_from(train: Trainer, folder: Path) -> str:
    """Return the path, below `folder`, of the checkpoint from which a fit continued."""
    return str(Path(train.ckpt_path or "").relative_to(folder))


def change_time(path: Path, seconds: float) -> None:
    """Let a file be newer than it is, or older."""
    os.utime(path, (path.stat().st_mtime + seconds,) * 2)


@pytest.mark.parametrize("logger", [True, False])
def test_last_of_the_run_before(tmp_path: Path, logger: bool) -> None:
    """Without `dirpath`, "last" is the previous run's, in the folder that its logger chose."""
    runs = [from_last(tmp_path, max_epochs, logger=logger) for max_epochs in (1, 2, 3)]
    assert [train.global_step for train in runs] == [4, 8, 12]
    last = "rankwise_logs/version_1/checkpoints/last.ckpt" if logger else "checkpoints/last.ckpt"
    assert begun_from(runs[-1], tmp_path) == last


def test_last_where_a_logger_writes(tmp_path: Path) -> None:
    """That may be another folder than the trainer's; with a named version no other run's is searched."""
    runs = [from_last(tmp_path, epochs, logger=CSVLogger(tmp_path / "logs", "mine")) for epochs in (1, 2)]
    assert begun_from(runs[-1], tmp_path) == "logs/mine/version_0/checkpoints/last.ckpt"
    from_last(tmp_path, logger=CSVLogger(tmp_path, version="a"))
    assert from_last(tmp_path, logger=CSVLogger(tmp_path, version="b")).ckpt_path is None
    train = from_last(tmp_path, 2, logger=CSVLogger(tmp_path, version="a"))
    assert begun_from(train, tmp_path) == "rankwise_logs/a/checkpoints/last.ckpt"


def test_last_of_any_saving_callback(tmp_path: Path) -> None:
    """Any callback may save the last; a newer best checkpoint whose name begins with "last" is not used."""

    def fitted_with_two(max_epochs: int) -> Trainer:
        saving = ModelCheckpoint(tmp_path / "mine", filename="last_best", monitor="loss", save_last=True)
        return from_last(tmp_path, max_epochs, callbacks=[ModelCheckpoint(), saving])

    fitted_with_two(1)
    change_time(tmp_path / "mine" / "last_best.ckpt", 60)
    assert begun_from(fitted_with_two(2), tmp_path) == "mine/last.ckpt"


def test_last_of_several_runs_in_one_folder(tmp_path: Path) -> None:
    """Of the last checkpoints of several runs in one folder, "last" is the newest, whatever its number."""
    for max_epochs in (1, 2):
        fitted(tmp_path, max_epochs=max_epochs, **last_in(tmp_path))
    assert begun_from(from_last(tmp_path, 3, **last_in(tmp_path)), tmp_path) == "last-v1.ckpt"
    change_time(tmp_path / "last.ckpt", 60)
    assert begun_from(from_last(tmp_path, 3, **last_in(tmp_path)), tmp_path) == "last.ckpt"


def last_in(folder: Path) -> dict[str, Any]:
    """Return options of a trainer that writes nothing but its last checkpoint."""
    saving = ModelCheckpoint(folder, save_top_k=0, save_last=True)
    return {"callbacks": saving, "logger": False}


@pytest.mark.parametrize("has_callback", [False, True])
def test_a_stop_leaves_the_last_of_another_run(tmp_path: Path, has_callback: bool) -> None:
    """What a signal makes a run write replaces the checkpoint that it continued from, but no other run's."""
    first = b""
    for steps, start, files in ((2, None, {"last.ckpt"}), (2, None, BOTH), (3, "last", BOTH)):
        stopped(tmp_path, steps, start, **(last_in(tmp_path) if has_callback else {}))
        first = first or (tmp_path / "last.ckpt").read_bytes()
        assert {path.name for path in tmp_path.glob("*.ckpt")} == files
    assert (tmp_path / "last.ckpt").read_bytes() == first


def test_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every path that a user gives, "~" is the home folder."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    saving, logger = ModelCheckpoint("~/saved", save_last=True), CSVLogger("~/logs")
    options: dict[str, Any] = {"callbacks": saving, "enable_checkpointing": True, "log_every_n_steps": 1}
    train = fitted(Path("~/root"), logger=logger, **options)
    train.save_checkpoint("~/mine.ckpt")
    assert {path.name for path in tmp_path.iterdir()} == {"home"}
    assert {path.name for path in (tmp_path / "home").iterdir()} == {"saved", "logs", "mine.ckpt"}
    assert train.default_root_dir == str(tmp_path / "home" / "root")
    train.default_root_dir = "~/other"
    assert train.default_root_dir == str(tmp_path / "home" / "other")
    for path in ("~/mine.ckpt", Path("~/saved/last.ckpt")):
        again = trainer(Path("~/root"), callbacks=ModelCheckpoint("~/saved"))
        again.test(Line(), loader(), ckpt_path=path)
    TorchCheckpointIO().remove_checkpoint("~/mine.ckpt")
    assert not (tmp_path / "home" / "mine.ckpt").exists()


def savers(folder: Path, *monitors: str | None) -> dict[str, Any]:
    """Return options of a trainer with a callback for each metric, in folders of their own."""
    callbacks = [
        ModelCheckpoint(folder / str(number), monitor=monitor, every_n_epochs=1 + (monitor is None))
        for number, monitor in enumerate(monitors)
    ]
    return {"callbacks": callbacks}


def test_best_by_a_metric(tmp_path: Path) -> None:
    """The best is the one that a metric has chosen, also if another callback keeps the latest."""
    train = fitted(tmp_path, max_epochs=2, **savers(tmp_path, None, "loss"))
    train.test(Line(), loader(), ckpt_path="best")
    assert train.ckpt_path == train.callbacks[1].best_model_path  # type: ignore[attr-defined]  # a ModelCheckpoint


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_a_stage_without_a_model_has_the_best_weights(tmp_path: Path, stage: str) -> None:
    """It loads the checkpoint that a metric has chosen, with a warning; a given model stays as it is.

    The checkpoints are of the fitted module, so they are not loaded into another one.
    """
    train, data, model = trainer(tmp_path, max_epochs=3, **savers(tmp_path, "epochs")), loader(), Rising()
    train.fit(model, data)
    run, last = getattr(train, stage), model.layer.weight.clone()
    run(model, data)
    assert (train.ckpt_path, torch.equal(model.layer.weight, last)) == (None, True)
    with pytest.warns(UserWarning, match=rf"{stage}\(\) without a model uses .* the best by 'epochs'"):
        run(dataloaders=data)
    [saving] = train.checkpoint_callbacks
    assert train.ckpt_path == saving.best_model_path
    best = torch.load(saving.best_model_path, weights_only=True)["state_dict"]["layer.weight"]
    assert torch.equal(model.layer.weight, best)
    assert not torch.equal(best, last)
    run(dataloaders=data, ckpt_path="best")
    train.validate(Line(), data)
    run(dataloaders=data)
    assert train.ckpt_path is None


class Rising(Line):
    """Logs a value that is best in the first epoch."""

    def on_train_epoch_end(self) -> None:
        self.log("epochs", float(self.current_epoch))


def test_a_stage_without_a_model_and_a_metric(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It uses the last checkpoint that was saved; without any the weights as they are. The log says so."""
    caplog.set_level("INFO")
    saved, plain = trainer(tmp_path, max_epochs=2, **savers(tmp_path, None)), trainer(tmp_path)
    for train, which in ((saved, r"of .*\.ckpt"), (plain, "as the last stage left them")):
        train.fit(Line(), loader())
        train.test(dataloaders=loader())
        assert re.search(rf"test\(\) without a model uses the weights {which}\.", caplog.text)


@pytest.mark.parametrize("monitors", [("loss", "val_loss"), (None, None)])
def test_an_ambiguous_best(tmp_path: Path, monitors: tuple[str | None, ...]) -> None:
    """Where several callbacks have a best checkpoint, the error names them."""
    options = savers(tmp_path, *monitors)
    if monitors == (None, None):
        options["callbacks"][1] = ModelCheckpoint(tmp_path / "1", every_n_train_steps=3)
    train = fitted(tmp_path, None, loader(), loader(2), max_epochs=2, **options)
    with pytest.raises(ConfigurationError, match='ckpt_path="best" could be each of 2') as caught:
        train.test(Line(), loader(), ckpt_path="best")
    assert all(saving.best_model_path in str(caught.value) for saving in options["callbacks"])


def test_callbacks_that_are_gone(tmp_path: Path) -> None:
    """A warning names the callbacks of the checkpoint whose state no callback takes."""
    callbacks = [EarlyStopping("loss", patience=9), ModelCheckpoint(tmp_path, save_last=True)]
    fitted(tmp_path, callbacks=callbacks)
    changed = [EarlyStopping("loss", mode="max", patience=9), callbacks[1]]
    with pytest.warns(UserWarning, match=r"does not have: EarlyStopping\(monitor='loss', mode='min'\)\. It"):
        fitted(tmp_path, max_epochs=2, callbacks=changed, ckpt_path="last")


@pytest.mark.parametrize("logger", [True, False])
def test_another_runs_last(
    tmp_path: Path, logger: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Files in the working directory are ignored if the trainer writes elsewhere; the log says so."""
    monkeypatch.chdir(tmp_path)
    from_last(tmp_path / "other").save_checkpoint("last.ckpt")
    caplog.clear()
    assert from_last(tmp_path / "mine", logger=logger).ckpt_path is None
    assert f"finds no checkpoint, so none is loaded. Looked in {tmp_path / 'mine'}" in caplog.text
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


@pytest.fixture(autouse=True)
def first_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the job's id, which checkpoints hold."""
    monkeypatch.setattr(rendezvous, "_noted", RestartInfo(0, JOB))


def restarted(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> str:
    """Fit as after a restart, and return the path of the checkpoint from which it continued."""
    monkeypatch.setattr(rendezvous, "_noted", RestartInfo(1, JOB))
    return begun_from(fitted(folder, max_epochs=2, **options), folder)


def stopped(folder: Path, steps: int = 2, start: str | None = None, **options: Any) -> None:
    """Fit, and write the checkpoint of a fit that a signal stops."""
    train = fitted(folder, max_steps=steps, ckpt_path=start, **options)
    for path in folder.rglob("*.ckpt"):  # a file system's clock may stand still meanwhile
        change_time(path, -60)
    save_stop_checkpoint(train.context(train.module))


@pytest.mark.parametrize("callbacks", [None, ModelCheckpoint()])
def test_a_restart_finds_what_a_stop_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, callbacks: Any
) -> None:
    """Ranks that a signal stopped continue from that checkpoint, with or without a ModelCheckpoint."""
    stopped(tmp_path, callbacks=callbacks)
    assert restarted(tmp_path, monkeypatch, callbacks=callbacks) == "last.ckpt"


class ReplacedWhenRead(TorchCheckpointIO):  # type: ignore[misc]  # differs from the real one in this alone
    """Replaces a checkpoint by a newer one, once it is read, and calls a function."""

    def __init__(self, newer: Path, then: Callable[[], None]) -> None:
        self.newer = newer
        self.then = then

    def load_checkpoint(self, path: str | os.PathLike[str], map_location: Any = "cpu") -> dict[str, Any]:
        loaded = super().load_checkpoint(path, map_location)
        if self.newer.exists():
            self.newer.replace(path)
            self.then()
        return loaded


def test_a_restart_finds_what_replaced_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file that the first start continued from was read before that; the job has written it anew."""
    path, newer, module = tmp_path / "last.ckpt", tmp_path / "newer", Line()
    for steps, file in ((2, path), (3, newer)):
        fitted(tmp_path, max_steps=steps).save_checkpoint(file)
    io = ReplacedWhenRead(newer, lambda: monkeypatch.setattr(rendezvous, "_noted", RestartInfo(1, JOB)))
    fitted(tmp_path, module, max_steps=4, plugins=[io], ckpt_path=str(path))
    assert module.seen == ["train 3"]


def test_a_restart_finds_a_loggers_folder_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logger need not write below the trainer's folder."""
    root, logs = tmp_path / "root", tmp_path / "logs"
    from_last(root, logger=CSVLogger(logs), callbacks=ModelCheckpoint())
    options = {"default_root_dir": root, "logger": CSVLogger(logs), "enable_checkpointing": True}
    path = "logs/rankwise_logs/version_0/checkpoints/epoch=0-step=4.ckpt"
    assert restarted(tmp_path, monkeypatch, **options) == path


def test_a_restart_of_nobody_knows_which_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a job id training begins anew, and a warning names the remedy."""
    monkeypatch.setattr(rendezvous, "_noted", RestartInfo(1, ""))
    stopped(tmp_path)
    assert fitted(tmp_path).ckpt_path is None
    assert "give torchrun a --rdzv-id" in caplog.text


def test_newest_first(tmp_path: Path) -> None:
    """Files are sorted by modification time, then by name; a link to nothing is left out."""
    names = [f"{name}.ckpt" for name in "abcde"]
    for name, changed_at in zip(names, (2, 3, 1, 1, 1), strict=True):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (changed_at, changed_at))
    (tmp_path / "gone.ckpt").symlink_to("gone")
    found = TorchCheckpointIO().list_checkpoints(tmp_path)
    assert newest_first(found) == [names[number] for number in (1, 0, 4, 3, 2)]


class Lenient(Line):
    """Loads what fits."""

    strict_loading = False

    def __init__(self) -> None:
        super().__init__()
        self.added = torch.nn.Linear(1, 1)


def test_strict_loading(tmp_path: Path) -> None:
    """A module may load weights of which some are missing or left over; a warning names them."""
    model, path = Lenient(), saved(tmp_path)
    with pytest.warns(UserWarning, match=r"Only the module has \['added.weight', 'added.bias'\]"):
        trainer(tmp_path).test(model, loader(), ckpt_path=path)
    weights = torch.load(path, weights_only=True)["state_dict"]
    assert torch.equal(model.layer.weight, weights["layer.weight"])
    with pytest.warns(UserWarning, match="different weights"):
        Lenient.load_from_checkpoint(path)
    with pytest.raises(CheckpointError, match="does not fit Lenient"):
        Lenient.load_from_checkpoint(path, strict=True)


class Own(Line):
    """Has a value of its own in its checkpoints."""

    value: Any = 1

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["own"] = self.value


@pytest.mark.parametrize("io", [TorchCheckpointIO(), AsyncCheckpointIO()])
def test_values_at_too_many_places(tmp_path: Path, io: CheckpointIO) -> None:
    """Values at 2^60 places, or in themselves, are an error when a checkpoint is saved, not a hang."""
    model = Own()
    train = fitted(tmp_path, model, plugins=io)
    for _ in range(60):
        model.value = [model.value, model.value]
    with pytest.raises(CheckpointError, match="cannot be written, as it holds values at"):
        train.save_checkpoint(tmp_path / "x.ckpt")
        io.teardown()
    model.value = []
    model.value.append(model.value)
    with pytest.raises(CheckpointError, match=r"x\.ckpt.*could not be written: it contains itself"):
        train.save_checkpoint(tmp_path / "x.ckpt")
        io.teardown()
