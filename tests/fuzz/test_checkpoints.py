"""Damaged checkpoint files, files of other records, and checkpoints whose parts have other shapes."""

import io
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from rankwise.callbacks import EarlyStopping, ModelCheckpoint, Timer
from rankwise.checkpoint import TorchCheckpointIO
from rankwise.errors import CheckpointError
from rankwise.trainer.checkpointing import check_contents, restore_module, restore_training
from tests.fuzz.inputs import ODD_PARTS, Fuzzing, changed, damaged
from tests.unit.trainer.helpers import Line, loader, trainer


class Logging(Line):
    """Logs what the callbacks monitor; has momentum and a schedule to restore."""

    on_start: Callable[[], object] | None = None

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(batch, batch_idx)
        self.log("level", 1.0, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]

    def on_fit_start(self) -> None:
        if self.on_start is not None:
            self.on_start()


def options(folder: Path) -> dict[str, Any]:
    """Return the arguments of a trainer with callbacks that have states."""
    callbacks = [ModelCheckpoint(folder, save_last=True), EarlyStopping("level"), Timer("1:00:00:00")]
    return {"callbacks": callbacks, "enable_checkpointing": True}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint that a fit has written."""
    folder = tmp_path_factory.mktemp("run")
    trainer(folder, **options(folder)).fit(Logging(), loader())
    return folder / "last.ckpt"


def load(path: Path, content: bytes) -> None:
    """Load a file with that content, whose error names it; check what it has as a fit would."""
    path.write_bytes(content)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of other formats
            check_contents(TorchCheckpointIO().load_checkpoint(path), str(path))
    except CheckpointError as error:
        assert error.path == str(path)  # noqa: PT017  it may also load
        raise


def test_files(fuzzing: Fuzzing, written: Path, tmp_path: Path) -> None:
    """A file with any changed bytes does not load, or as it was."""
    content = written.read_bytes()
    accepted = fuzzing.run(lambda random: load(tmp_path / "damaged.ckpt", damaged(random, content)))
    assert 0 < accepted < fuzzing.count


def test_records(fuzzing: Fuzzing, written: Path, tmp_path: Path) -> None:
    """Nor do records that are changed, missing, doubled or compressed, each with the right checksum."""
    with zipfile.ZipFile(written) as archive:
        records = {each.filename: archive.read(each) for each in archive.infolist()}
    large = next(name for name in records if name.endswith("/data/0"))

    def parse(random: Random) -> None:
        file, names = io.BytesIO(), [*records]
        bad = random.choice([next(name for name in names if name.endswith("data.pkl")), *names])
        contents = {**records, bad: damaged(random, records[bad])}
        if random.random() < 0.02:
            contents[large] = bytes(3_000_000)
        random.shuffle(names)
        with warnings.catch_warnings(), zipfile.ZipFile(file, "w") as archive:
            warnings.simplefilter("ignore")  # of doubled names
            for name in names if random.random() < 0.8 else names[random.randrange(3) :] + names[:1]:
                is_large = len(contents[name]) > 1_000_000
                kind = zipfile.ZIP_DEFLATED if is_large or random.random() < 0.05 else zipfile.ZIP_STORED
                archive.writestr(name, contents[name], kind)
        load(tmp_path / "changed.ckpt", file.getvalue())

    assert 0 < fuzzing.run(parse) < fuzzing.count


class Done(Exception):
    """Ends a fit in which checkpoints were restored."""


def test_contents(fuzzing: Fuzzing, written: Path, tmp_path: Path) -> None:
    """A fit continues from parts of other shapes and types, or raises an error with the file's name."""
    checkpoint = torch.load(written, weights_only=True)
    model, train = Logging(), trainer(tmp_path, **options(tmp_path))
    path = str(tmp_path / "changed.ckpt")

    def restore(random: Random) -> None:
        context = train.context(model)
        context.state.ckpt_path = path
        try:
            other = changed(random, checkpoint, ODD_PARTS)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of callbacks and metrics that are not there
                check_contents(other, path)
                restore_module(context, other)
                rank_state = restore_training(context, other)
                if rank_state is not None:
                    rank_state.results()
                    rank_state.restore_random()
        except CheckpointError as error:
            assert error.path == path  # noqa: PT017  it may also be restored
            raise

    def restore_all() -> None:
        assert 0 < fuzzing.run(restore) < fuzzing.count
        raise Done

    model.on_start = restore_all
    with pytest.raises(Done):
        train.fit(model, loader())
