"""After torch's elastic agent has started the ranks again: find the checkpoint from which they go on."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankwise.errors import CheckpointError
from rankwise.process_group.starts import current_start
from rankwise.trainer.saved_files import newest_first, saved_files, savers

if TYPE_CHECKING:
    from rankwise.trainer.trainer import Trainer

__all__ = ["checkpoint_after_restart", "current_run_id"]

_log = logging.getLogger(__name__)
_UNKNOWN_JOB = (
    "Training begins anew after a restart, as nothing tells this job's checkpoints from another's: give "
    "torchrun a --rdzv-id of its own for each job; where a rank trains in several processes, give each one's "
    "fit a ckpt_path."
)


def current_run_id() -> str:
    """Return what all starts of a job have in common, under torch's elastic agent; elsewhere nothing."""
    return current_start().job


def checkpoint_after_restart(trainer: Trainer) -> tuple[str, dict[str, Any]] | None:
    """Return the path and contents of the newest checkpoint of this run; None at the first start.

    Collective: every rank must call this, and must be able to read what rank 0 finds.
    """
    # Rank 0 decides: without a store that all starts share, the ranks may count them differently.
    path = trainer.strategy.broadcast(_newest(trainer) if trainer.is_global_zero else None)
    return None if path is None else (path, trainer.strategy.load_checkpoint(path))


def _newest(trainer: Trainer) -> str | None:
    """Return the newest whole checkpoint of this run; an earlier run's, or a damaged one, is passed over."""
    start = current_start()
    if start.number == 0:
        return None
    if not start.job:
        _log.warning(_UNKNOWN_JOB)
        return None
    for path in newest_first(_files(trainer)):
        try:
            checkpoint = trainer.strategy.load_checkpoint(path)
        except CheckpointError as error:
            _log.warning("The checkpoint %s is passed over, as it does not load: %s", path, error)
            continue
        if checkpoint.get("run_id") == start.job:
            return str(path)
    return None


def _files(trainer: Trainer) -> set[Path]:
    found = saved_files(trainer, "*.ckpt")
    if all(saving.dirpath is not None for saving in savers(trainer)):
        return found
    # The default folder lies in the logger's, which may be another one at every start, anywhere below.
    return found.union(Path(trainer.default_root_dir).rglob("checkpoints/*.ckpt"))
