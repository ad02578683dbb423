"""Checkpoints in a storage that is not the local file system; paths that a storage does not have."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rankwise import Fabric, Trainer
from rankwise.callbacks import ModelCheckpoint
from rankwise.checkpoint import AsyncCheckpointIO, CheckpointIO, TorchCheckpointIO
from rankwise.errors import ConfigurationError
from rankwise.loggers import CSVLogger
from rankwise.profilers import SimpleProfiler
from rankwise.stores import rendezvous
from rankwise.stores.rendezvous import RestartInfo
from rankwise.trainer.checkpointing import save_stop_checkpoint
from tests.helpers.bucket import Bucket
from tests.unit.trainer.helpers import Line, fitted, loader

RUN = "bucket://runs/a"


class Scored(Line):
    """Logs a score that the epochs have in no order."""

    def on_train_epoch_end(self) -> None:
        self.log("score", float((3, 1, 4, 1, 5)[self.current_epoch]))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the bucket; the working directory is another one."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    return tmp_path / "bucket"


def fit(io: CheckpointIO | None, max_epochs: int, **options: Any) -> Trainer:
    """Fit with two best checkpoints, and the last one."""
    saving = ModelCheckpoint(
        RUN, "sub/{epoch}", monitor="score", save_top_k=2, save_last=True, save_on_train_epoch_end=True
    )
    options = {"callbacks": saving, "enable_checkpointing": True, "plugins": io, **options}
    return fitted(Path(), Scored(), max_epochs=max_epochs, **options)


def names(folder: Path) -> list[str]:
    """Return what is in the bucket; nothing is anywhere else."""
    assert list(Path().iterdir()) == []
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.ckpt"))


@pytest.mark.full
@pytest.mark.parametrize("wrapped", [lambda io: io, AsyncCheckpointIO])
def test_a_run_and_what_continues_it(folder: Path, wrapped: Callable[[CheckpointIO], CheckpointIO]) -> None:
    """The best stay, others are removed, "last" and "best" are found, another run's last is left."""
    fit(wrapped(Bucket(folder)), 3)
    assert names(folder) == ["runs/a/last.ckpt", "runs/a/sub/epoch=0.ckpt", "runs/a/sub/epoch=1.ckpt"]
    train = fit(wrapped(Bucket(folder)), 4, ckpt_path="last")
    assert (train.ckpt_path, train.global_step) == (f"{RUN}/last.ckpt", 16)
    assert names(folder) == ["runs/a/last.ckpt", "runs/a/sub/epoch=1.ckpt", "runs/a/sub/epoch=3.ckpt"]
    train.test(Scored(), loader(), ckpt_path="best")
    assert train.ckpt_path == f"{RUN}/sub/epoch=1.ckpt"
    fit(wrapped(Bucket(folder)), 1)
    assert names(folder)[:2] == ["runs/a/last-v1.ckpt", "runs/a/last.ckpt"]


def test_stops_and_restarts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a signal makes a run write is in the bucket, and a restart of the job finds it there."""
    monkeypatch.setattr(rendezvous, "_noted", RestartInfo(0, "a job"))
    saving = ModelCheckpoint(f"{RUN}/", every_n_epochs=0)
    train = fit(Bucket(folder), 1, callbacks=saving)
    save_stop_checkpoint(train.context(train.module))
    assert names(folder) == ["runs/a/last.ckpt"]
    monkeypatch.setattr(rendezvous, "_noted", RestartInfo(1, "a job"))
    assert fit(Bucket(folder), 2, callbacks=saving).ckpt_path == f"{RUN}/last.ckpt"


class ThreeMethods(CheckpointIO):
    """Written for Lightning: its arguments, and no more methods than there."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        TorchCheckpointIO().save_checkpoint(checkpoint, path)

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return TorchCheckpointIO().load_checkpoint(path, map_location)

    def remove_checkpoint(self, path: Any) -> None:
        Path(path).unlink()


def test_three_methods_are_enough_for_local_files(tmp_path: Path) -> None:
    """A `CheckpointIO` that was written for Lightning keeps the best and finds the last."""
    continued = []
    for epochs in (1, 2):
        saving = ModelCheckpoint(tmp_path, "{epoch}", save_last="link")
        continued.append(fit(ThreeMethods(), epochs, ckpt_path="last", callbacks=saving).ckpt_path)
    assert continued == [None, str(tmp_path / "last.ckpt")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch=1.ckpt", "last.ckpt"]


@pytest.mark.parametrize("io", [None, AsyncCheckpointIO(), ThreeMethods()])
@pytest.mark.parametrize(
    "options",
    [
        {"callbacks": ModelCheckpoint(RUN)},
        {"ckpt_path": f"{RUN}/last.ckpt", "callbacks": None, "enable_checkpointing": False},
    ],
    ids=["dirpath", "ckpt_path"],
)
def test_a_scheme_that_no_plug_in_has(folder: Path, io: CheckpointIO | None, options: dict[str, Any]) -> None:
    """A path with a scheme is refused, not by a worker, unless the `CheckpointIO` looks there itself."""
    with pytest.raises(ConfigurationError, match=r"(?s)'bucket'.*Trainer\(plugins=.*has_checkpoint and list"):
        fit(io, 1, strategy="ddp_fork", devices=2, **options)
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    "use",
    [
        lambda: ModelCheckpoint(Path(RUN)),
        lambda: Trainer(default_root_dir=RUN, accelerator="cpu"),
        lambda: CSVLogger(RUN),
        lambda: SimpleProfiler(RUN),
        lambda: Fabric(accelerator="cpu", devices=1).save(RUN, {}),
        lambda: Fabric(accelerator="cpu", devices=1).load(RUN),
        lambda: Line.load_from_checkpoint(RUN),
        lambda: TorchCheckpointIO().link_checkpoint("a", RUN),
        lambda: TorchCheckpointIO().list_checkpoints(RUN),
    ],
)
def test_what_is_local_takes_no_scheme(folder: Path, use: Callable[[], object]) -> None:
    """No local folder is made of a URL, nor of one that pathlib has shortened."""
    with pytest.raises(ConfigurationError, match="has the scheme 'bucket', but it must be a local path"):
        use()
    assert list(Path().iterdir()) == []
