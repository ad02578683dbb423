"""When checkpoints are saved, which are kept, and what they are called."""

import math
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from rankwise.callbacks import LambdaCallback, ModelCheckpoint
from rankwise.checkpoint import AsyncCheckpointIO, TorchCheckpointIO
from rankwise.errors import CheckpointError, ConfigurationError, InvalidArgumentError, InvalidTypeError
from tests.unit.trainer.helpers import Failing, Line, SlowIO, fitted, loader, trainer


class Scripted(Line):
    """Logs given validation scores, one per epoch."""

    def __init__(self, *scores: float) -> None:
        super().__init__()
        self.scores = scores

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", self.scores[self.current_epoch])


def load(path: Path | str) -> dict[str, Any]:
    return TorchCheckpointIO().load_checkpoint(path)


def fit(folder: Path, saving: ModelCheckpoint, *scores: float, **options: Any) -> list[str]:
    """Train as many epochs as there are scores; return the names of the files that are left."""
    options = {"callbacks": saving, "max_epochs": len(scores), **options}
    fitted(folder, Scripted(*scores), loader(), loader(), **options)
    return sorted(path.name for path in Path(saving.dirpath or "").iterdir())


MONITOR, SECOND, HALVES = {"monitor": "score"}, {"check_val_every_n_epoch": 2}, {"val_check_interval": 0.5}
SCORED = {"filename": "{epoch}", **MONITOR}
EPOCHS, STEPS = ({"filename": name, "save_top_k": -1} for name in ("{epoch}", "{step}"))
TWO, THIRD, ACCUMULATED = {"save_top_k": 2}, {"every_n_train_steps": 3}, {"accumulate_grad_batches": 2}
NEWEST = {"filename": "{epoch}", **TWO, "mode": "max"}
UNNAMED = {"filename": "at-{epoch:02d}-{score:.1f}", "auto_insert_metric_name": False}
AT_END, AT_VALIDATION = ({"save_on_train_epoch_end": at_end} for at_end in (True, False))
RUNS: dict[str, tuple[dict[str, Any], list[float], dict[str, Any], str]] = {
    "the latest, without a metric": ({}, [1, 1], {}, "epoch=1-step=8"),
    "all, with -1": ({"save_top_k": -1}, [1, 1, 1], {}, "epoch=0-step=4 epoch=1-step=8 epoch=2-step=12"),
    "a NaN gives way to any number": ({**SCORED}, [math.nan, 0.5, math.nan], {}, "epoch=1"),
    "only the last, with 0": ({"save_top_k": 0, "save_last": True}, [1, 1], {}, "last"),
    "every second epoch": ({**EPOCHS, "every_n_epochs": 2}, [1, 1, 1, 1], {}, "epoch=1 epoch=3"),
    "optimizer steps, over epochs": ({**STEPS, **THIRD}, [1] * 3, ACCUMULATED, "step=3 step=6"),
    "an epoch without validation has no score": ({**SCORED, **TWO}, [0.3, 0.2, 0.1], SECOND, "epoch=1"),
    "validated in the middle of an epoch": ({**STEPS, **MONITOR}, [1], HALVES, "step=2 step=4"),
    "... for steps": ({**STEPS, **MONITOR, **AT_VALIDATION}, [1], HALVES, "step=2 step=4"),
    "... unless only the end of an epoch counts": ({**STEPS, **MONITOR, **AT_END}, [1], HALVES, "step=4"),
    "validated every second epoch": ({**EPOCHS, "monitor": "loss"}, [1] * 4, SECOND, "epoch=1 epoch=3"),
    "... for epochs": ({**EPOCHS, "monitor": "loss", **AT_VALIDATION}, [1] * 4, SECOND, "epoch=1 epoch=3"),
    "... but every epoch is saved": (
        {**EPOCHS, "monitor": "loss", **AT_END},
        [1] * 4,
        SECOND,
        "epoch=0 epoch=1 epoch=2 epoch=3",
    ),
    "a step waits for the first validation, the last one for that of its epoch": (
        {"filename": "{step}-{score:.0f}", **MONITOR, "save_top_k": -1, "every_n_train_steps": 2},
        [7, 8],
        {},
        "step=4-score=7 step=6-score=7 step=8-score=8",
    ),
    "once where training then stops": (STEPS, [1], {**HALVES, "max_steps": 2}, "step=2"),
    "no epoch": ({"every_n_epochs": 0}, [1, 1], {}, ""),
    "no step": ({"every_n_train_steps": 0}, [1, 1], {}, ""),
    "the newest by step": ({**NEWEST, "monitor": "step"}, [1, 1, 1], {}, "epoch=1 epoch=2"),
    "the newest by epoch": ({**NEWEST, "monitor": "epoch"}, [1, 1, 1], {}, "epoch=1 epoch=2"),
    "the oldest": ({**NEWEST, "monitor": "epoch", "mode": "min"}, [1, 1, 1], {}, "epoch=0 epoch=1"),
    "values without names": (UNNAMED, [1, 0.5], {}, "at-01-0.5"),
}
"""Arguments of the callback, scores, arguments of the trainer, and the files that are left."""


@pytest.mark.full
@pytest.mark.parametrize("what", RUNS)
def test_what_is_kept(tmp_path: Path, what: str) -> None:
    """When checkpoints are saved, which of them stay, and what they are called."""
    options, scores, more, names = RUNS[what]
    (tmp_path / "own").mkdir()
    saving = ModelCheckpoint(tmp_path / "own", **options)
    assert fit(tmp_path, saving, *scores, **more) == [f"{name}.ckpt" for name in names.split()]
    assert Path(saving.last_model_path).name == ("last.ckpt" if "save_last" in options else "")
    if not options:
        assert saving.best_model_path == str(tmp_path / "own" / "epoch=1-step=8.ckpt")
        assert saving.best_model_score is None


@pytest.mark.parametrize(("mode", "best"), [("min", 0.2), ("max", 0.9)])
def test_best_two_are_kept(tmp_path: Path, mode: str, best: float) -> None:
    """The best of a metric stay with their scores, and the worse of two is known."""
    saving = ModelCheckpoint(tmp_path, "{epoch}-{score:.1f}", monitor="score", mode=mode)
    scores = (0.5, 0.2, 0.9, 0.4)
    name = f"epoch={scores.index(best)}-score={best}.ckpt"
    assert fit(tmp_path, saving, *scores) == [name]
    assert saving.best_model_path == str(tmp_path / name)
    assert float(saving.best_model_score or 0) == pytest.approx(best)
    saving = ModelCheckpoint(tmp_path / "two", "{epoch}", monitor="score", save_top_k=2)
    assert fit(tmp_path, saving, *scores) == ["epoch=1.ckpt", "epoch=3.ckpt"]
    assert saving.kth_best_model_path == str(tmp_path / "two" / "epoch=3.ckpt")
    assert saving.kth_value == saving.best_k_models[saving.kth_best_model_path]


class FailsSecond(TorchCheckpointIO):  # type: ignore[misc]  # one that differs from the real one in this alone
    """Writes the first and the third checkpoint, but not the second."""

    count = 0

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any) -> None:
        self.count += 1
        if self.count == 2:
            raise CheckpointError(path=os.fspath(path), problem="could not be written: no space")
        super().save_checkpoint(checkpoint, path)


@pytest.mark.parametrize("writes", ["at once", "in a thread"])
def test_a_failed_save_leaves_the_file_before_it(tmp_path: Path, writes: str) -> None:
    """What a checkpoint that could not be written was to take the place of is not removed."""
    io = FailsSecond() if writes == "at once" else AsyncCheckpointIO(FailsSecond())
    with pytest.raises(CheckpointError, match="no space"):
        fit(tmp_path, ModelCheckpoint(tmp_path), 1, 1, plugins=io)
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["epoch=0-step=4.ckpt"]


def test_another_runs_files_are_left(tmp_path: Path) -> None:
    """A new file gets a version; a second run has a last checkpoint of its own, and replaces only that."""
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "model.ckpt").write_text("precious")
    saving = ModelCheckpoint(folder, "model")
    assert fit(folder, saving, 1, 1) == ["model-v1.ckpt", "model.ckpt"]
    assert (folder / "model.ckpt").read_text() == "precious"
    for number, max_epochs in enumerate([1, 2]):
        saving = ModelCheckpoint(tmp_path, save_top_k=0, save_last=True)
        fit(tmp_path, saving, *[1] * max_epochs)
        name = "last-v1.ckpt" if number else "last.ckpt"
        assert saving.last_model_path == str(tmp_path / name)
    epochs = {path.name: load(path)["epoch"] for path in tmp_path.glob("*.ckpt")}
    assert epochs == {"last.ckpt": 0, "last-v1.ckpt": 1}


def test_files_that_a_thread_has_yet_to_write_are_left(tmp_path: Path) -> None:
    """A worse checkpoint, or another callback's, does not take the name of one that waits to be written."""
    saving = ModelCheckpoint(tmp_path, "best", monitor="score", mode="max", save_top_k=2)
    plugin = AsyncCheckpointIO(SlowIO())
    assert fit(tmp_path, saving, 9, 1, plugins=plugin) == ["best-v1.ckpt", "best.ckpt"]
    assert load(saving.best_model_path)["epoch"] == 0
    folder = tmp_path / "two"
    savings = [ModelCheckpoint(folder, "best", monitor="score", mode=mode) for mode in ("max", "min")]
    options = {"max_epochs": 2, "plugins": AsyncCheckpointIO(SlowIO())}
    fitted(tmp_path, Scripted(9, 1), loader(), loader(), callbacks=savings, **options)
    best = [load(saving.best_model_path)["epoch"] for saving in savings]
    assert best == [0, 1]


def test_the_best_of_another_module_does_not_compete(tmp_path: Path) -> None:
    """A second module's checkpoints, as in a k-fold script, compete with each other; the first's stay."""
    saving = ModelCheckpoint(tmp_path, "{epoch}-{score}", monitor="score")
    train = trainer(tmp_path, callbacks=saving, max_epochs=2)
    for scores, best in (((0.1, 0.2), "epoch=0-score=0.1.ckpt"), ((0.7, 0.5), "epoch=1-score=0.5.ckpt")):
        train.fit(Scripted(*scores), loader(), loader())
        assert Path(saving.best_model_path).name == best
        assert float(saving.best_model_score or 0) == pytest.approx(min(scores))
    assert len(list(tmp_path.glob("*.ckpt"))) == 2
    saving = ModelCheckpoint(tmp_path / "last", save_top_k=0, save_last=True)
    train = trainer(tmp_path, callbacks=saving)
    for _ in range(2):
        train.fit(Line(), loader())
    assert sorted(path.name for path in (tmp_path / "last").iterdir()) == ["last-v1.ckpt", "last.ckpt"]


def test_a_run_that_continues_replaces_its_last(tmp_path: Path) -> None:
    """Whatever checkpoint of its own it continues from; two callbacks write a file each."""
    for epochs, ckpt_path in [(1, None), (2, "last"), (3, "best"), (4, tmp_path / "last.ckpt")]:
        saving = ModelCheckpoint(tmp_path, "{epoch}", save_last=True)
        path = tmp_path / f"epoch={epochs - 2}.ckpt" if ckpt_path == "best" else ckpt_path
        fitted(tmp_path, callbacks=saving, max_epochs=epochs, ckpt_path=path)
        assert sorted(path.name for path in tmp_path.iterdir()) == [f"epoch={epochs - 1}.ckpt", "last.ckpt"]
        assert load(tmp_path / "last.ckpt")["epoch"] == epochs - 1
    folder = tmp_path / "two"
    for epochs in (1, 2):
        savings = [
            ModelCheckpoint(folder, save_top_k=0, save_last=True, every_n_epochs=1),
            ModelCheckpoint(folder, save_top_k=0, save_last=True, every_n_train_steps=1),
        ]
        fitted(tmp_path, callbacks=savings, max_epochs=epochs, ckpt_path="last")
        assert len({saving.last_model_path for saving in savings}) == len(list(folder.iterdir())) == 2


def test_default_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Checkpoints lie in the logger's folder, and each file is logged if asked for."""
    saving = ModelCheckpoint(verbose=True)
    with caplog.at_level("INFO", "rankwise"):
        fit(tmp_path, saving, 1, logger=True)
    assert saving.dirpath == str(tmp_path / "rankwise_logs" / "version_0" / "checkpoints")
    text = f"ModelCheckpoint: epoch 0, step 4: saved {saving.dirpath}/epoch=0-step=4.ckpt"
    assert text in caplog.messages


def test_missing_metric(tmp_path: Path) -> None:
    """It is an error that says what was logged; so are validations that are waited for and never come."""
    with pytest.raises(ConfigurationError, match=r"monitor='accuracy'.*\n.*'loss', 'score'"):
        fit(tmp_path, ModelCheckpoint(tmp_path, monitor="accuracy"), 1)
    with pytest.raises(ConfigurationError, match="would never act: it waits for validations"):
        fitted(tmp_path, callbacks=ModelCheckpoint(tmp_path, save_on_train_epoch_end=False))


def test_state_round_trip(tmp_path: Path) -> None:
    """A resumed run with the same folder goes on with its files; one with another folder does not."""
    saving = ModelCheckpoint(tmp_path, monitor="score")
    fit(tmp_path, saving, 0.5)
    same, other = ModelCheckpoint(tmp_path), ModelCheckpoint(tmp_path / "other")
    for resumed in (same, other):
        resumed.load_state_dict(saving.state_dict())
    assert same.best_k_models == saving.best_k_models
    assert other.best_model_path == ""


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (InvalidArgumentError, [{"mode": "best"}, {"save_top_k": -2}, {"save_last": "copy"}]),
        (InvalidArgumentError, [{"every_n_epochs": -1}, {"every_n_train_steps": -1}]),
        (
            InvalidArgumentError,
            [{"filename": each} for each in ("{epoch:.2q}", "../{epoch}", "/tmp/{epoch}")],
        ),
        (InvalidTypeError, [{"train_time_interval": 60}]),
        (ConfigurationError, [{"save_top_k": 2}, {"every_n_epochs": 1, "every_n_train_steps": 1}]),
        (ConfigurationError, [{"every_n_epochs": 1, "train_time_interval": timedelta(hours=1)}]),
        (ConfigurationError, [{"every_n_train_steps": 1, **AT_END}, {"every_n_epochs": 0, **AT_END}]),
        (ConfigurationError, [{"train_time_interval": timedelta(hours=1), **AT_VALIDATION}]),
    ],
)
def test_wrong_values(error: type[Exception], refused: list[dict[str, Any]]) -> None:
    """Values that cannot work, or contradict each other, are refused in the constructor."""
    for options in refused:
        with pytest.raises(error) as caught:
            ModelCheckpoint(**options)
        assert error is not InvalidTypeError or "train_time_interval" in str(caught.value)
    for filename in ("last", "last-v1"):  # which others may have without save_last
        with pytest.raises(InvalidArgumentError, match=r"filename='last.*save_last=True uses this one"):
            ModelCheckpoint(filename=filename, save_last=True)
        ModelCheckpoint(filename=filename)


def test_a_linked_last(tmp_path: Path) -> None:
    """It takes no space, and stays when the other is removed; a thread makes it after the file."""
    saving = ModelCheckpoint(tmp_path, "{epoch}", monitor="score", save_last="link")
    assert fit(tmp_path, saving, 2, 1) == ["epoch=1.ckpt", "last.ckpt"]
    last = Path(saving.last_model_path)
    assert last.samefile(saving.best_model_path)
    last.unlink()
    saving = ModelCheckpoint(tmp_path / "worse", "{epoch}", monitor="score", save_last="link")
    assert fit(tmp_path, saving, 1, 2) == ["epoch=0.ckpt", "last.ckpt"]
    assert load(saving.last_model_path)["epoch"] == 1
    assert load(saving.best_model_path)["epoch"] == 0
    saving = ModelCheckpoint(tmp_path / "thread", "{epoch}", save_last="link")
    assert fit(tmp_path, saving, 1, 1, plugins=AsyncCheckpointIO()) == ["epoch=1.ckpt", "last.ckpt"]
    assert Path(saving.last_model_path).samefile(saving.best_model_path)


def test_a_symbolic_link_as_last(tmp_path: Path) -> None:
    """A run that continues from one leaves the file that it names as it is, and another link to nothing."""
    fit(tmp_path, ModelCheckpoint(tmp_path, "best", monitor="score", save_last=True), 1)
    best, last = tmp_path / "best.ckpt", tmp_path / "last.ckpt"
    (tmp_path / "last-v1.ckpt").symlink_to(tmp_path / "removed.ckpt")
    last.unlink()
    last.symlink_to(best)
    before = best.read_bytes()
    saving = ModelCheckpoint(tmp_path, "best", monitor="score", save_last=True)
    fit(tmp_path, saving, 1, 2, ckpt_path=last)
    assert Path(saving.last_model_path).name == "last-v2.ckpt"
    assert best.read_bytes() == before


def test_no_versions(tmp_path: Path) -> None:
    """A file of that name is replaced; a symbolic link, and not the file that it names."""
    for epochs in (2, 1):
        saving = ModelCheckpoint(tmp_path, "mine", enable_version_counter=False, save_last=True)
        assert fit(tmp_path, saving, *[1] * epochs) == ["last.ckpt", "mine.ckpt"]
    assert load(tmp_path / "mine.ckpt")["epoch"] == 0
    precious = tmp_path / "precious.ckpt"
    precious.write_text("precious")
    folder = tmp_path / "own"
    folder.mkdir()
    for name in ("last.ckpt", "mine.ckpt"):
        (folder / name).symlink_to(precious)
    saving = ModelCheckpoint(folder, "mine", enable_version_counter=False, save_last=True)
    assert fit(tmp_path, saving, 1) == ["last.ckpt", "mine.ckpt"]
    assert precious.read_text() == "precious"
    assert not any(path.is_symlink() for path in folder.iterdir())


def test_weights_only(tmp_path: Path) -> None:
    """A file of weights serves evaluation; a fit cannot continue from it. The callback needs no state."""
    saving = ModelCheckpoint(tmp_path, "{epoch}", save_weights_only=True)
    assert fit(tmp_path, saving, 1, 1) == ["epoch=1.ckpt"]
    path = saving.best_model_path
    assert "optimizer_states" not in load(path)
    trainer(tmp_path).validate(Scripted(1, 1), loader(), ckpt_path=path)
    with pytest.raises(CheckpointError, match="without which training cannot continue"):
        trainer(tmp_path).fit(Scripted(1, 1), loader(), ckpt_path=path)

    class Stateless(ModelCheckpoint):
        def state_dict(self) -> dict[str, Any]:
            return {}

    stateless = Stateless(tmp_path / "other", "{epoch}", save_weights_only=True)
    assert fit(tmp_path, stateless, 1) == ["epoch=0.ckpt"]
    saved = load(stateless.best_model_path)
    assert "callbacks" not in saved
    assert saved["run_tokens"] == [stateless.run_token]


class Counting(Line):
    """Logs the number of the validation."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def on_validation_epoch_end(self) -> None:
        self.number += 1
        self.log("score", float(self.number))


@pytest.mark.parametrize(
    ("interval", "names"),
    [
        (2, ["step=2-score=1.ckpt", "step=3-score=1.ckpt", "step=4-score=2.ckpt"]),
        (3, ["step=3-score=1.ckpt", "step=4-score=1.ckpt"]),
    ],
)
def test_steps_wait_for_their_validation(tmp_path: Path, interval: int, names: list[str]) -> None:
    """A step that is validated at once is ranked by that validation, the others by the one before."""
    saving = ModelCheckpoint(
        tmp_path, "{step}-{score:.0f}", monitor="score", mode="max", save_top_k=-1, every_n_train_steps=1
    )
    fitted(tmp_path, Counting(), loader(), loader(), callbacks=saving, val_check_interval=interval)
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == names
    assert Path(saving.best_model_path).name == names[-1]


@pytest.mark.parametrize(("interval", "count"), [(timedelta(seconds=0.01), 8), (timedelta(hours=1), 0)])
def test_intervals_of_time(tmp_path: Path, interval: timedelta, count: int) -> None:
    """Each step that ends later than the interval after the last save is saved."""
    saving = ModelCheckpoint(tmp_path / "own", "{step}", save_top_k=-1, train_time_interval=interval)
    pausing = LambdaCallback(on_train_batch_start=lambda *_: time.sleep(0.02))
    fitted(tmp_path, Scripted(1, 1), loader(), loader(), callbacks=[pausing, saving], max_epochs=2)
    assert len(list(tmp_path.glob("own/*.ckpt"))) == count


class Gathered(Line):
    """Notes when the state of its optimizer is asked for."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        optimizer.register_state_dict_pre_hook(lambda _: self.seen.append(f"asked at {self.global_step}"))
        return optimizer


@pytest.mark.parametrize("weights_only", [True, False])
def test_weights_only_gathers_no_more(tmp_path: Path, weights_only: bool) -> None:
    """The state of optimizers, which is large and may be spread over ranks, is not made for such files."""
    module = Gathered()
    saving = ModelCheckpoint(tmp_path, save_weights_only=weights_only, every_n_train_steps=3)
    fitted(tmp_path, module, callbacks=saving)
    assert ("asked at 3" in module.seen) != weights_only


def test_save_on_exception(tmp_path: Path) -> None:
    """The steps until an exception are saved, and another run continues after them, to the same weights."""
    saving = ModelCheckpoint(tmp_path, "{step}", save_top_k=0, save_on_exception=True, save_last=True)
    with pytest.raises(ValueError, match="broken"):
        fitted(tmp_path, Failing(at=7), loader(), loader(), callbacks=saving, max_epochs=2)
    assert (tmp_path / "step=7.ckpt").exists()
    models = [Line(), Line()]
    for model, path in zip(models, (None, tmp_path / "last.ckpt"), strict=True):
        fitted(tmp_path, model, loader(), loader(), max_epochs=2, ckpt_path=path)
    assert len(models[1].seen) < len(models[0].seen)
    assert models[0].layer.weight.tolist() == models[1].layer.weight.tolist()
