"""`AroundModule`: what holds of a strategy's modules beside how they are wrapped."""

from __future__ import annotations

from torch import nn

from rankwise.strategies._together import Together

__all__ = ["AroundModule"]


class AroundModule(Together):
    """The defaults for one process: nothing is averaged, nothing is converted.

    Attributes:
        sync_batchnorm: whether batch normalisation uses the batches of all ranks in training.
    """

    sync_batchnorm: bool = False

    def gradients_may_differ(self, module: nn.Module) -> bool:
        """Return whether ranks may hold different gradients after a synchronised backward pass.

        Decisions that are made on gradients then cost a collective. Override it for a hook that
        averages over some ranks only.
        """
        return False

    def restore_module(self, module: nn.Module) -> None:
        """Undo what `setup_module` replaced within a module for training, in place; twice does no harm."""
