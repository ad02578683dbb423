"""Checkpoint IO: writes dictionaries to checkpoint files, and reads them."""

from rankwise.checkpoint.async_io import AsyncCheckpointIO
from rankwise.checkpoint.base import CheckpointIO
from rankwise.checkpoint.torch_io import TorchCheckpointIO

__all__ = ["AsyncCheckpointIO", "CheckpointIO", "TorchCheckpointIO"]
