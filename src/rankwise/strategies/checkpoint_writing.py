"""Write a checkpoint: on global rank 0, for which the others wait; after a failure on each rank by itself."""

from __future__ import annotations

import os
from typing import Any

from rankwise.checkpoint.base import as_checkpoint_error
from rankwise.monitoring.heartbeat import report_phase, saving_in_hook_reported
from rankwise.process_group.after_failure import is_after_failure, refuse_partly_updated
from rankwise.strategies.shared_errors import errors_shared


def write_checkpoint(strategy: Any, checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a checkpoint; see `Strategy.save_checkpoint`."""
    if is_after_failure():
        refuse_partly_updated("save_checkpoint()")
        with saving_in_hook_reported():
            _write(strategy, checkpoint, path)
        return
    with errors_shared(strategy, of_rank_zero=True):
        if strategy.is_global_zero:
            report_phase("checkpoint")
            _write(strategy, checkpoint, path)


def _write(strategy: Any, checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> None:
    with as_checkpoint_error(path):
        strategy.checkpoint_io.save_checkpoint(checkpoint, path)
