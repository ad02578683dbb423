"""Checkpoint IO: how a checkpoint, a dictionary, becomes a file and comes back."""

from rankwise.checkpoint.async_io import AsyncCheckpointIO
from rankwise.checkpoint.base import CheckpointIO
from rankwise.checkpoint.torch_io import TorchCheckpointIO

__all__ = ["AsyncCheckpointIO", "CheckpointIO", "TorchCheckpointIO"]
