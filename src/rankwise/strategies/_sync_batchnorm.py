"""Turn batch normalisation into `SyncBatchNorm` for training, and back."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import final

from rankwise.errors import ConfigurationError

__all__ = ["SyncedBatchNorms", "check_sync_batchnorm"]


@final
class SyncedBatchNorms:
    """The layers of one module that were replaced, with what they replaced."""

    def __init__(self) -> None:
        self._replaced: list[tuple[nn.Module, str, nn.Module, nn.Module]] = []

    def convert(self, module: nn.Module, group: ProcessGroup | None) -> None:
        """Replace the layers below `module`; parameters and buffers stay the same objects."""
        for owner in list(module.modules()):
            for name, layer in list(owner.named_children()):
                if isinstance(layer, _BatchNorm) and not isinstance(layer, nn.SyncBatchNorm):
                    synced = nn.SyncBatchNorm.convert_sync_batchnorm(layer, group)
                    setattr(owner, name, synced)
                    self._replaced.append((owner, name, layer, synced))

    def revert(self) -> None:
        """Put the layers back, with what training has made of their parameters and buffers."""
        for owner, name, layer, synced in self._replaced:
            if owner._modules.get(name) is synced:
                layer._parameters.update(synced._parameters)
                layer._buffers.update(synced._buffers)
                layer.training = synced.training
                setattr(owner, name, layer)
        self._replaced.clear()


def check_sync_batchnorm(device: torch.device) -> None:
    """Make sure that torch has `SyncBatchNorm` for a device.

    Raises:
        ConfigurationError: when it has not.
    """
    if device.type == "cpu":
        raise ConfigurationError(
            message="sync_batchnorm=True is not possible on the CPU: torch has no SyncBatchNorm there.",
            remedy="leave it out, or train on CUDA devices.",
        )
