"""Checkpoints that somebody else has made or changed: what does not fit is an error, and no file is lost."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from rankwise.callbacks import EarlyStopping, ModelCheckpoint, Timer
from rankwise.checkpoint import AsyncCheckpointIO
from rankwise.errors import CheckpointError, ConfigurationError
from rankwise.strategies import SingleDeviceStrategy
from tests.unit.trainer.helpers import Line, Stream, fitted, loader, samples, trainer

Change = Callable[[dict[str, Any]], object]


def put(*place: Any) -> Change:
    """Return what replaces the value at a place, given as keys and then the value."""
    *keys, last, value = place

    def change(checkpoint: dict[str, Any]) -> None:
        for key in keys:
            checkpoint = checkpoint[key]
        checkpoint[last] = value

    return change


def put_everywhere(name: str, value: Any) -> Change:
    """Return what replaces a value in the states of all callbacks."""

    def change(checkpoint: dict[str, Any]) -> None:
        for state in checkpoint["callbacks"].values():
            if name in state:
                state[name] = value

    return change


NUMPY_STATE = ("MT19937", [1] * 624, 10**6, 0, 0.0)  # NumPy would read beyond the end of the state
SCALER = torch.amp.GradScaler("cpu").state_dict()

PLACES: list[tuple[Any, ...]] = [  # keys, then a value that no fit has written
    *(("version", 99), ("version", "1"), ("loops", 5), ("loops", "future", 1)),
    *(("loops", "global_step", -5), ("loops", "global_step", "x"), ("loops", "global_step", torch.ones(2))),
    ("loops", "batches_done", 2**70),  # more than there can be
    *(("loops", "window_batches", 5), ("loops", "window_samples", 9)),  # more than are done
    ("loops", "batches_done", 0),  # samples of no batch
    *(("ranks", []), ("ranks", "x"), ("ranks", [3]), ("ranks", 0, "random", {})),
    ("ranks", 0, "random", "torch", torch.ones(3)),
    ("ranks", 0, "random", "numpy", NUMPY_STATE),
    *(("ranks", 0, "metrics", {}), ("ranks", 0, "metrics", 7), ("ranks", 0, "metric_objects", 7)),
    ("ranks", 0, "metrics", "callback_metrics", {"level": "x"}),
    *(("state_dict", 3), ("state_dict", "layer.weight", "x"), ("callbacks", 7)),
    *(("optimizer_states", "x"), ("optimizer_states", [{}]), ("optimizer_states", [3])),
    *(("lr_schedulers", [1]), ("seed", "x"), ("order_seed", "x"), ("gradient_order", 3)),
    *(("gradient_order", [0, "x"]), ("gradients", [1]), ("precision", [1]), ("comm_hooks", 3)),
]
STATES: list[tuple[str, Any]] = [  # of any callback
    *(("time_elapsed", "soon"), ("wait_count", "x"), ("stopped_by", torch.ones(2, 2))),
    *(("best_score", [1]), ("best_model_score", "x"), ("best_k_models", ["x"])),
    *(("last_model_path", 3), ("kth_best_model_path", "")),
]
SHAPES: dict[str, Change] = {
    **{str(place)[:60]: put(*place) for place in PLACES},
    **{f"{name}={value}": put_everywhere(name, value) for name, value in STATES},
    "a callback's state is a number": lambda checkpoint: [
        checkpoint["callbacks"].update({key: 7}) for key in list(checkpoint["callbacks"])
    ],
    "a score is text": lambda checkpoint: put_everywhere(
        "best_k_models", {checkpoint["callbacks"][_saver(checkpoint)]["best_model_path"]: "x"}
    )(checkpoint),
}


def _saver(checkpoint: dict[str, Any]) -> str:
    keys: list[str] = [*checkpoint["callbacks"]]
    return next(key for key in keys if key.startswith("ModelCheckpoint"))


def _callbacks(folder: Path) -> list[Any]:
    return [ModelCheckpoint(folder, save_last=True), EarlyStopping("level", patience=9), Timer("1:00:00:00")]


class Logging(Line):
    """Logs a metric that the callbacks monitor."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(batch, batch_idx)
        self.log("level", 1.0, on_epoch=True)
        return loss


def first_run(folder: Path) -> dict[str, Any]:
    """Fit one epoch, and return its checkpoint."""
    fitted(folder, Logging(), callbacks=_callbacks(folder))
    checkpoint: dict[str, Any] = torch.load(folder / "last.ckpt", weights_only=True)
    return checkpoint


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return the folder of a run of one epoch, and its checkpoint."""
    folder = tmp_path_factory.mktemp("run")
    return folder, first_run(folder)


def resume(folder: Path, checkpoint: dict[str, Any], path: Path, **options: Any) -> None:
    """Continue from a checkpoint for another epoch."""
    torch.save(checkpoint, path)
    options = {"callbacks": _callbacks(folder), **options}
    trainer(path.parent, max_epochs=2, **options).fit(Logging(), loader(), ckpt_path=path)


@pytest.mark.full
@pytest.mark.parametrize("name", SHAPES)
def test_what_no_fit_has_written(name: str, written: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """Whatever part has another shape, the error says which file it is in."""
    folder, checkpoint = written
    changed = copy.deepcopy(checkpoint)
    SHAPES[name](changed)
    path = tmp_path / "changed.ckpt"
    with pytest.raises(CheckpointError) as caught:
        resume(folder, changed, path)
    assert caught.value.path == str(path)


@pytest.mark.parametrize("scaler", [{"future": 1}, {**SCALER, "scale": "x"}, {**SCALER, "scale": [1]}, 7])
def test_a_loss_scale_that_no_fit_has_written(
    scaler: Any, written: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """It is an error when it is read, not with the first loss."""
    checkpoint = {**written[1], "precision": {"scaler": scaler}}
    with pytest.raises(CheckpointError, match="optimizers"):
        resume(written[0], checkpoint, tmp_path / "changed.ckpt", precision="16-mixed")


def test_more_batches_than_the_data_have(written: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """Reading again ends with the data, whatever number of batches the file says."""
    checkpoint = copy.deepcopy(written[1])
    checkpoint["callbacks"] = {}
    checkpoint["loops"].update(batches_done=10**12, samples_done=10**12, is_epoch_done=False)
    torch.save(checkpoint, tmp_path / "changed.ckpt")
    data = DataLoader(Stream(samples(4)), batch_size=1)
    with pytest.raises(ConfigurationError, match="no batch after the 1000000000000 of an earlier run"):
        trainer(tmp_path, max_epochs=2).fit(Logging(), data, ckpt_path=tmp_path / "changed.ckpt")


def change_saver(checkpoint: dict[str, Any], **values: Any) -> dict[str, Any]:
    """Return a checkpoint with other values in the state of `ModelCheckpoint`."""
    changed = copy.deepcopy(checkpoint)
    changed["callbacks"][_saver(changed)].update(values)
    return changed


def best_is(path: str) -> dict[str, Any]:
    """Return a state in which a file is the best and worst checkpoint, and the only one."""
    score = torch.tensor(-1.0)
    return {"best_k_models": {path: score}, "best_model_path": path, "kth_best_model_path": path}


@pytest.mark.parametrize("name", ["../thesis.ckpt", "thesis.txt", "/elsewhere/thesis.ckpt"])
def test_a_file_elsewhere_is_not_a_runs(
    name: str, written: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """A checkpoint that names a file outside of the folder, or no checkpoint, is refused."""
    folder, checkpoint = written
    path = str(folder / name)
    with pytest.raises(CheckpointError, match="names files that are not in"):
        resume(folder, change_saver(checkpoint, **best_is(path)), tmp_path / "changed.ckpt")


@pytest.mark.parametrize("content", ["another run's", "no checkpoint", "no token"])
def test_a_file_of_another_run_stays(content: str, tmp_path: Path) -> None:
    """A named file in the folder is removed or replaced only if it says itself that it is of the run."""
    folder, others = tmp_path / "run", tmp_path / "other"
    checkpoint, _ = first_run(folder), first_run(others)
    precious, last = folder / "precious.ckpt", folder / "last-v7.ckpt"
    for path in (precious, last):
        is_checkpoint = content != "no checkpoint"
        path.write_bytes((others / "last.ckpt").read_bytes() if is_checkpoint else b"years of work")
    changed = change_saver(checkpoint, **best_is(str(precious)), last_model_path=str(last))
    if content == "no token":
        del changed["callbacks"][_saver(changed)]["run_token"]
    before = precious.read_bytes()
    resume(folder, changed, tmp_path / "changed.ckpt")
    assert (precious.read_bytes(), last.read_bytes()) == (before, before)


def test_files_of_the_run_are_replaced(tmp_path: Path) -> None:
    """The superseded checkpoint of the run that continues is removed, and its last one replaced."""
    checkpoint = first_run(tmp_path)
    folder = tmp_path / "sent"
    folder.mkdir()
    resume(tmp_path, checkpoint, folder / "copy.ckpt")
    names = sorted(path.name for path in tmp_path.glob("*.ckpt"))
    assert names == ["epoch=1-step=8.ckpt", "last.ckpt"]
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 8


@pytest.mark.parametrize(("folder", "filename"), [("../run", None), ("run", "each/{epoch}")])
def test_a_folder_given_by_a_relative_path(
    folder: str, filename: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run continues with its own files, also above the working directory, and in folders below its own."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for epochs in (1, 2):
        saving = ModelCheckpoint(folder, filename)
        path = None if epochs == 1 else next(tmp_path.rglob("*.ckpt"))
        options = {"callbacks": [saving], "max_epochs": epochs}
        trainer(tmp_path, **options).fit(Line(), loader(), ckpt_path=path)
    assert len(list(tmp_path.rglob("*.ckpt"))) == 1


def test_the_error_of_a_thread_is_not_lost(tmp_path: Path) -> None:
    """Who reads whether a file is the run's waits for earlier saves, and raises what they have raised."""
    first, saving = ModelCheckpoint(tmp_path), ModelCheckpoint(tmp_path)
    fitted(tmp_path, callbacks=first)
    saving.load_state_dict(first.state_dict())
    strategy = SingleDeviceStrategy(checkpoint_io=AsyncCheckpointIO())
    (tmp_path / "file").touch()
    strategy.checkpoint_io.save_checkpoint({}, tmp_path / "file" / "below.ckpt")
    with pytest.raises(CheckpointError, match=r"below\.ckpt'.* could not be written"):
        saving.owns(saving.best_model_path, strategy)
    assert saving.owns(saving.best_model_path, strategy)
