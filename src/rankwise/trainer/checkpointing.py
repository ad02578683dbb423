"""Make, find and restore checkpoints."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import os
from collections import Counter, OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankwise.callbacks import Callback, EarlyStopping, ModelCheckpoint
from rankwise.checkpoint.reasons import as_checkpoint_error
from rankwise.errors import CheckpointError, ConfigurationError
from rankwise.ranks import rank_zero_only
from rankwise.stores.restart import current_restart
from rankwise.trainer.module import is_defined
from rankwise.trainer.state import Progress
from rankwise.trainer.state_transfer import RankState, gather_rank_states

if TYPE_CHECKING:
    from rankwise.trainer.module import TrainingModule
    from rankwise.trainer.trainer import Trainer

__all__ = [
    "check_hyper_parameters",
    "checkpoint_after_restart",
    "checkpoint_folders",
    "current_run_id",
    "find_checkpoint",
    "make_checkpoint",
    "newest_first",
    "restore_loop",
    "restore_module",
    "saved_files",
    "savers",
    "stop_checkpoint_path",
]


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


_log = logging.getLogger(__name__)

_VERSION = 1
_NEEDED = ("loops", "ranks", "optimizer_states", "lr_schedulers", "callbacks")


def check_hyper_parameters(trainer: Trainer, module: TrainingModule) -> None:
    """Refuse hyper parameters that no checkpoint could hold, where a callback will save some.

    Where a hook gets the checkpoint before it is written, it may change them: they are judged then.

    Raises:
        CheckpointError: naming those that cannot be written, or could not be loaded.
    """
    saving = next((saver for saver in savers(trainer) if saver.save_top_k or saver.save_last), None)
    if saving is None or not module.hparams or _changes_checkpoints(trainer, module):
        return
    folder = saving.dirpath or trainer.default_root_dir
    with as_checkpoint_error(folder):
        part = _plain({"hyper_parameters": module.hparams})
    trainer.strategy.checkpoint_io.check_checkpoint(part, folder)


def _changes_checkpoints(trainer: Trainer, module: TrainingModule) -> bool:
    return is_defined(module, "on_save_checkpoint") or any(
        type(callback).on_save_checkpoint is not Callback.on_save_checkpoint for callback in trainer.callbacks
    )


def make_checkpoint(trainer: Trainer, module: TrainingModule, path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return all that is needed to go on from here, as plain types and tensors, to be written to `path`.

    Collective: every rank must call this, as sharded optimizers gather their state.

    Raises:
        CheckpointError: when it contains itself.
    """
    strategy, progress = trainer.strategy, trainer.progress
    optimizers, schedulers = trainer.whole_states()
    checkpoint: dict[str, Any] = {
        "version": _VERSION,
        "epoch": progress.current_epoch,
        "global_step": progress.global_step,
        "state_dict": strategy.get_module_state_dict(module),
        "optimizer_states": optimizers,
        "lr_schedulers": schedulers,
        "callbacks": {
            callback.state_key: state for callback in trainer.callbacks if (state := callback.state_dict())
        },
        "precision": strategy.precision.state_dict(),
        "loops": dataclasses.asdict(progress),
        "ranks": gather_rank_states(trainer),
        "seed": trainer.seed,
        "order_seed": trainer.order_seed,
        "run_id": current_run_id(),
        "gradient_order": trainer.gradient_order,
    }
    if comm_hooks := strategy.comm_hook_states():
        checkpoint["comm_hooks"] = comm_hooks
    if module.hparams:
        checkpoint["hyper_parameters"] = module.hparams
    for callback in trainer.callbacks:
        callback.on_save_checkpoint(trainer, module, checkpoint)
    module.on_save_checkpoint(checkpoint)
    with as_checkpoint_error(path):
        plain: dict[str, Any] = _plain(checkpoint)
    return plain


def restore_module(trainer: Trainer, module: TrainingModule, checkpoint: dict[str, Any], path: str) -> None:
    """Load the weights of a checkpoint into the module.

    Raises:
        CheckpointError: when there are none, or they belong to another module.
    """
    if "state_dict" not in checkpoint:
        raise CheckpointError(path=path, problem=f"holds no 'state_dict', but {sorted(map(str, checkpoint))}")
    for callback in trainer.callbacks:
        callback.on_load_checkpoint(trainer, module, checkpoint)
    module.on_load_checkpoint(checkpoint)
    trainer.strategy.precision.prepare_to_load(module)
    try:
        trainer.strategy.load_module_state_dict(module, checkpoint["state_dict"])
    except RuntimeError as error:
        raise CheckpointError(
            path=path,
            problem=f"does not fit {type(module).__name__}: {error}",
            remedy="build the module as it was when the checkpoint was written.",
        ) from None


def restore_loop(trainer: Trainer, checkpoint: dict[str, Any], path: str) -> RankState:
    """Take over progress, metrics, optimizers, schedulers and callbacks; the optimizers must exist.

    Returns:
        This rank's part of the checkpoint, for what is to be restored last.

    Raises:
        CheckpointError: when something is missing, or the optimizers are others.
    """
    if missing := [name for name in _NEEDED if name not in checkpoint]:
        raise CheckpointError(
            path=path,
            problem=f"holds no {missing}, without which training cannot go on from it",
            remedy="load its weights into the module instead: module.load_state_dict(...).",
        )
    trainer.progress = Progress(**checkpoint["loops"])
    if trainer.progress.is_epoch_closed:
        trainer.progress.end_epoch()
    rank_state = RankState(trainer, checkpoint["ranks"])
    rank_state.restore_metrics()
    try:
        trainer.load_optimizer_states(checkpoint["optimizer_states"], checkpoint["lr_schedulers"])
        trainer.strategy.precision.load_state_dict(checkpoint.get("precision", {}))
    except ValueError as error:
        raise CheckpointError(path=path, problem=f"does not fit the optimizers: {error}") from None
    trainer.strategy.load_comm_hook_states(checkpoint.get("comm_hooks", []))
    for callback in trainer.callbacks:
        if callback.state_key in checkpoint["callbacks"]:
            callback.load_state_dict(checkpoint["callbacks"][callback.state_key])
    trainer.should_stop = any(
        isinstance(callback, EarlyStopping) and callback.has_stopped for callback in trainer.callbacks
    )
    return rank_state


def find_checkpoint(trainer: Trainer, ckpt_path: str | os.PathLike[str] | None) -> str | None:
    """Return the path that `"best"`, `"last"` or a path means; None for `"last"` where there is none yet.

    Raises:
        ConfigurationError: for `"best"` where nothing was saved.
    """
    if ckpt_path is None or ckpt_path not in ("best", "last"):
        return None if ckpt_path is None else os.fspath(ckpt_path)
    if ckpt_path == "last":
        return _last(trainer)
    saving = trainer.checkpoint_callback
    if saving is None or not saving.best_model_path:
        raise ConfigurationError(
            message='ckpt_path="best" finds no checkpoint.',
            facts="no ModelCheckpoint of this trainer has saved any.",
            remedy="call fit() first, with a ModelCheckpoint, or pass a path.",
        )
    return saving.best_model_path


def _last(trainer: Trainer) -> str | None:
    """Return the newest `last.ckpt` of this trainer's runs, the one that a signal left included."""
    newest = next(iter(newest_first(saved_files(trainer, "last.ckpt"))), None)
    if newest is not None:
        _announce(logging.INFO, f'ckpt_path="last" is {newest}.')
        return str(newest)
    looked_in = [Path(stop_checkpoint_path(trainer)).parent, *checkpoint_folders(trainer)]
    places = ", ".join(dict.fromkeys(map(str, looked_in)))
    _announce(
        logging.WARNING, f'ckpt_path="last" finds no checkpoint, so none is loaded. Looked in {places}.'
    )
    return None


@rank_zero_only
def _announce(level: int, text: str) -> None:
    _log.log(level, text)


def _plain(value: Any) -> Any:
    """Turn paths and NumPy's numbers, which `weights_only=True` does not load, into strings and numbers."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if type(value) in (dict, OrderedDict, Counter):
        plain = copy.copy(value)  # it stays what it is, and keeps its attributes: a state_dict has some
        plain.clear()
        for key, item in value.items():
            plain[_plain(key)] = _plain(item)
        return plain
    if type(value) in (list, tuple):
        return type(value)(_plain(item) for item in value)
    return (
        value.item() if type(value).__module__ == "numpy" and getattr(value, "shape", None) == () else value
    )


_log = logging.getLogger(__name__)
_UNKNOWN_JOB = (
    "Training begins anew after a restart, as nothing tells this job's checkpoints from another's: give "
    "torchrun a --rdzv-id of its own for each job; where a rank trains in several processes, give each one's "
    "fit a ckpt_path."
)


def current_run_id() -> str:
    """Return what all starts of a job have in common, under torch's elastic agent; elsewhere nothing."""
    return current_restart().job


def checkpoint_after_restart(trainer: Trainer) -> tuple[str, dict[str, Any]] | None:
    """Return the path and contents of the newest checkpoint of this run; None at the first start.

    Collective: every rank must call this, and must be able to read what rank 0 finds.
    """
    # Rank 0 decides: without a store that all starts share, the ranks may count them differently.
    path = trainer.strategy.broadcast(_newest(trainer) if trainer.is_global_zero else None)
    return None if path is None else (path, trainer.strategy.load_checkpoint(path))


def _newest(trainer: Trainer) -> str | None:
    """Return the newest whole checkpoint of this run; an earlier run's, or a damaged one, is passed over."""
    start = current_restart()
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
