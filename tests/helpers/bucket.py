"""A `CheckpointIO` for a storage that is not the local file system: `bucket://...`."""

import os
from pathlib import Path
from typing import Any

from typing_extensions import override

from rankwise.checkpoint import CheckpointIO, TorchCheckpointIO
from rankwise.errors import ConfigurationError

Location = str | os.PathLike[str]


class Bucket(CheckpointIO):
    """Stores `bucket://PATH` below a folder, which other processes have too; local paths are refused."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def place(self, path: Location) -> Path:
        """Return the file that stands for the path."""
        if not isinstance(path, str) or not path.startswith("bucket://"):
            raise ConfigurationError(message=f"{path!r} is not in the bucket.")
        return self.folder / path.removeprefix("bucket://")

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Location) -> None:
        TorchCheckpointIO().save_checkpoint(checkpoint, self.place(path))

    @override
    def load_checkpoint(self, path: Location, map_location: Any = "cpu") -> dict[str, Any]:
        return TorchCheckpointIO().load_checkpoint(self.place(path), map_location)

    @override
    def remove_checkpoint(self, path: Location) -> None:
        TorchCheckpointIO().remove_checkpoint(self.place(path))

    @override
    def has_checkpoint(self, path: Location) -> bool:
        return TorchCheckpointIO().has_checkpoint(self.place(path))

    @override
    def list_checkpoints(self, folder: Location) -> dict[str, float]:
        return TorchCheckpointIO().list_checkpoints(self.place(folder))
