"""Prepare a batch for the step: hooks, transfer to the device, the precision's format."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

from rankwise.trainer.data import DataModule
from rankwise.trainer.data.data_hooks import TRANSFER_HOOKS, is_own

if TYPE_CHECKING:
    from rankwise.trainer.state import LoopContext


@final
class BatchTransfer:
    """Move batches to this rank's device; which hooks module and data module define is decided once."""

    def __init__(self, context: LoopContext) -> None:
        self._strategy = context.strategy
        self._before, self._transfer, self._after = (_own(context, name) for name in TRANSFER_HOOKS)
        self._has_hooks = any((self._before, self._transfer, self._after))

    def __call__(self, batch: Any, dataloader_idx: int = 0) -> Any:
        """Return the batch for the step; as in Lightning, hooks get it in the precision's format."""
        strategy = self._strategy
        if not self._has_hooks:
            return strategy.precision.convert_input(strategy.batch_to_device(batch))
        batch = strategy.precision.convert_input(batch)
        if self._before is not None:
            batch = self._before(batch, dataloader_idx)
        if self._transfer is None:
            batch = strategy.batch_to_device(batch)
        else:
            batch = self._transfer(batch, strategy.root_device, dataloader_idx)
        return batch if self._after is None else self._after(batch, dataloader_idx)


def _own(context: LoopContext, name: str) -> Callable[..., Any] | None:
    """Return the method that defines a hook: the data module's of this stage, or else the module's."""
    datamodule = context.stage.datamodule
    if datamodule is not None and is_own(datamodule, DataModule, name):
        found: Callable[..., Any] = getattr(datamodule, name)
        return found
    return context.hooks.own(name)
