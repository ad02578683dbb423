"""Save checkpoints in a storage of fsspec (s3://, gs://, hdfs://, ...), and continue from the last one.

    python examples/fsspec_checkpoints.py memory://line
    python examples/fsspec_checkpoints.py file:///tmp/line 2

The second argument is the number of processes; `memory://` is the memory of one process.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any

import torch
from fsspec.core import url_to_fs
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from rankwise import Trainer, TrainingModule, rank_zero_only
from rankwise.callbacks import ModelCheckpoint
from rankwise.checkpoint import CheckpointIO
from rankwise.errors import CheckpointError


class FsspecCheckpointIO(CheckpointIO):
    """Stores checkpoints wherever fsspec can; local paths are local files."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> None:
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)  # what cannot be saved must not replace the previous file
        fs, place = url_to_fs(path)
        fs.makedirs(place.rpartition("/")[0], exist_ok=True)
        fs.pipe_file(place, buffer.getvalue())

    def load_checkpoint(self, path: str | os.PathLike[str], map_location: Any = "cpu") -> dict[str, Any]:
        fs, place = url_to_fs(path)
        try:
            content = io.BytesIO(fs.cat_file(place))
            loaded: dict[str, Any] = torch.load(content, map_location=map_location, weights_only=True)
        except Exception as error:  # whatever the storage raises; rankwise expects this one
            raise CheckpointError(path=os.fspath(path), problem=f"could not be read: {error!r}") from error
        return loaded

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        fs, place = url_to_fs(path)
        if fs.exists(place):
            fs.rm_file(place)

    def has_checkpoint(self, path: str | os.PathLike[str]) -> bool:
        fs, place = url_to_fs(path)
        return bool(fs.exists(place))

    def list_checkpoints(self, folder: str | os.PathLike[str]) -> dict[str, float]:
        fs, place = url_to_fs(folder)
        fs.invalidate_cache()  # other processes write there, too
        files = fs.find(place, maxdepth=1)
        return {file.rpartition("/")[2]: fs.modified(file).timestamp() for file in files}


class Line(TrainingModule):
    """Fit y = 3x + 1."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.3)


if __name__ == "__main__":
    url, devices = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1
    x = torch.linspace(-1, 1, 64).unsqueeze(1)
    loader = DataLoader(TensorDataset(x, 3 * x + 1), batch_size=8)
    for epochs in (1, 3):
        saving, storage = ModelCheckpoint(url, "{epoch}", save_last=True), FsspecCheckpointIO()
        trainer = Trainer(devices=devices, max_epochs=epochs, callbacks=saving, plugins=storage, logger=False)
        trainer.fit(Line(), loader, ckpt_path="last")
        files = ", ".join(sorted(storage.list_checkpoints(url)))
        rank_zero_only(print)(f"continued from {trainer.ckpt_path}, now: {files}")
