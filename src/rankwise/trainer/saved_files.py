"""Where the checkpoints of a trainer's fits lie: of this one, and of those before it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rankwise.callbacks import ModelCheckpoint

if TYPE_CHECKING:
    from rankwise.trainer.trainer import Trainer

__all__ = ["checkpoint_folders", "newest_first", "saved_files", "savers", "stop_checkpoint_path"]


def savers(trainer: Trainer) -> list[ModelCheckpoint]:
    """Return the callbacks that save checkpoints."""
    return [callback for callback in trainer.callbacks if isinstance(callback, ModelCheckpoint)]


def stop_checkpoint_path(trainer: Trainer) -> str:
    """Return where a fit that a signal stops leaves its checkpoint; `ckpt_path="last"` finds it there."""
    saving = trainer.checkpoint_callback
    folder = None if saving is None else saving.chosen_dirpath
    return str(Path(folder or trainer.default_root_dir) / "last.ckpt")


def checkpoint_folders(trainer: Trainer) -> list[Path]:
    """Return the folders of every `ModelCheckpoint`: before a fit, where it was given none, of all runs."""
    dirpaths = [saving.dirpath for saving in savers(trainer)]
    chosen = [Path(dirpath) for dirpath in dirpaths if dirpath is not None]
    if None not in dirpaths:
        return chosen
    # The default folder lies in the logger's, which is another one at every start.
    parents = trainer.logger.log_dirs if trainer.logger else []
    return [*chosen, *(Path(parent) / "checkpoints" for parent in parents or [trainer.default_root_dir])]


def saved_files(trainer: Trainer, pattern: str) -> set[Path]:
    """Return the files there, and the one that a signal made a fit leave, whose names match `pattern`."""
    found = {path for folder in checkpoint_folders(trainer) for path in folder.glob(pattern)}
    stopped = Path(stop_checkpoint_path(trainer))
    return {*found, stopped} if stopped.exists() else found


def newest_first(paths: Iterable[Path]) -> list[Path]:
    """Return those that still exist, by the time of their last change, and by name where that is the same."""
    changed_at = {}
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # another run may remove its own
            changed_at[path] = path.stat().st_mtime_ns
    return sorted(changed_at, key=lambda path: (changed_at[path], path), reverse=True)
