"""The way of a batch to the step: to the device, into the precision's format, through the module's hooks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from rankwise.trainer.state import LoopContext

_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


@final
class BatchTransfer:
    """Move batches to this rank's device; which hooks the module defines is decided once."""

    def __init__(self, context: LoopContext) -> None:
        self._strategy = context.strategy
        self._before, self._transfer, self._after = (context.hooks.own(name) for name in _HOOKS)
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
