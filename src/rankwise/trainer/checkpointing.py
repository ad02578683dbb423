"""Make, find and restore checkpoints."""

from __future__ import annotations

import copy
import dataclasses
import logging
import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, final

from rankwise import hyperparameters, ranks
from rankwise.callbacks import Callback, ModelCheckpoint, MonitoringCallback, Timer
from rankwise.checkpoint.base import as_checkpoint_error, restored_from
from rankwise.compatibility.lightning_checkpoints import (
    LIGHTNING_VERSION,
    LightningState,
    is_lightning_checkpoint,
)
from rankwise.errors import CheckpointError, ConfigurationError
from rankwise.monitoring.heartbeat import saving_in_hook_reported
from rankwise.nested import is_numpy_scalar, once_each
from rankwise.paths import checkpoint_path, is_last_checkpoint, is_symbolic_link, join_path, unused_checkpoint
from rankwise.process_group.lone_calls import is_after_failure
from rankwise.stores.rendezvous import current_restart
from rankwise.trainer.consistency import compare_ranks
from rankwise.trainer.data import DataModule
from rankwise.trainer.data.data_module import is_own
from rankwise.trainer.module import is_defined
from rankwise.trainer.module_loading import (
    BUILD_SAME_MODULE,
    loaded_into,
    warn_of_different_weights,
    weights_in,
)
from rankwise.trainer.state import LoopContext, Progress
from rankwise.trainer.state_transfer import RankState, gather_rank_states

_log = logging.getLogger(__name__)
_VERSION = 1
_HIGHEST = 2**53  # numbers of steps and samples up to here are exact as scores, too
_OF_RUN = (MonitoringCallback, Timer)
_NEEDED = ("loops", "ranks", "optimizer_states", "lr_schedulers", "callbacks")
_TYPES: Mapping[str, type] = {
    **dict.fromkeys(("loops", "callbacks", "precision", "gradients", "requires_grad"), dict),
    **dict.fromkeys(("ranks", "optimizer_states", "lr_schedulers", "comm_hooks", "gradient_order"), list),
    **dict.fromkeys(("seed", "order_seed"), int),
}
_UNKNOWN_JOB = (
    "Training begins anew after a restart, as this job's checkpoints cannot be told from another job's: "
    "give torchrun a --rdzv-id of its own for each job; where a rank trains in several processes, pass "
    "ckpt_path to fit in each."
)


@final
class CheckpointFiles:
    """The checkpoint files of a Trainer's runs, in the folders of its callbacks and of its first logger."""

    def __init__(self, context: LoopContext) -> None:
        self._strategy = context.strategy
        self._io = context.strategy.checkpoint_io
        self._saving = context.trainer.checkpoint_callbacks
        self._logger = context.trainer.logger
        self._default_root_dir = context.options.default_root_dir

    @property
    def stop_folder(self) -> str:
        """The folder of the checkpoint that a signal makes a fit write; `ckpt_path="last"` looks there."""
        folder = self._saving[0].chosen_dirpath if self._saving else None
        return folder or self._default_root_dir

    def stop_path(self, continued: str | None) -> str:
        """Return the path of the checkpoint of a fit that a signal stops; no other run's file. Collective.

        It is the run's last checkpoint, if that is there, or the one from which the run has `continued`.
        """
        named = {saving.last_model_path: saving for saving in self._saving if saving.last_model_path}
        given = None if continued is None else checkpoint_path(continued)

        def choose() -> str:
            for path in filter(None, (*named, given)):
                is_here = is_last_checkpoint(path) and Path(path).parent == Path(self.stop_folder)
                is_file = is_here and not is_symbolic_link(path)
                if is_file and (path == given or named[path].owns(path, self._strategy)):
                    return path
            return unused_checkpoint(self.stop_folder, "last", self._io.has_checkpoint)

        return self._strategy.call_on_rank_zero(choose)

    @property
    def folders(self) -> list[str]:
        """The folders of all `ModelCheckpoint` callbacks; if one lacks `dirpath`, the folders of all runs."""
        chosen = [saving.dirpath for saving in self._saving if saving.dirpath is not None]
        if len(chosen) == len(self._saving):
            return chosen
        # The default folder is in the logger's, and a logger may have a new folder in each run.
        parents = (self._logger.log_dirs if self._logger else []) or [self._default_root_dir]
        return [*chosen, *(join_path(parent, "checkpoints") for parent in parents)]

    def find(self, ckpt_path: str | os.PathLike[str] | None) -> str | None:
        """Return the path that `"best"`, `"last"` or a path means; None for `"last"` if no file exists."""
        if ckpt_path == "last":
            return self._last()
        if ckpt_path != "best":
            return None if ckpt_path is None else os.fspath(ckpt_path)
        return self._best()

    def check_paths(self, stage: str, ckpt_path: str | os.PathLike[str] | None) -> None:
        """Refuse paths of the user at which the strategy's `CheckpointIO` cannot have checkpoints."""
        folders = [saving.chosen_dirpath for saving in self._saving] if stage == "fit" else []
        for path in (*folders, None if ckpt_path in ("best", "last") else ckpt_path):
            if path is not None:
                self._io.check_checkpoint({}, path)

    def best_of_fit(self, stage: str) -> str | None:
        """Return the best checkpoint of the last fit, or None; report on rank 0 which weights these are."""
        saved = [saving for saving in self._saving if saving.best_model_path]
        judged = [saving for saving in saved if saving.monitor is not None]
        best = next(iter(judged or saved), None)
        if best is None or best.monitor is None:
            which = "as the last stage left them" if best is None else f"of {best.best_model_path}"
            ranks.rank_zero_only(_log.info)("%s() without a model uses the weights %s.", stage, which)
        elif self._strategy.is_global_zero:
            ranks.warn(
                f"{stage}() without a model uses the weights that are the best by {best.monitor!r}, of "
                f"{best.best_model_path}. For the last ones pass the model; to silence this pass "
                f'ckpt_path="best".',
            )
        return None if best is None else best.best_model_path

    def _best(self) -> str:
        """Return the best checkpoint; one that a metric has chosen, if any callback has a metric."""
        saved = [saving for saving in self._saving if saving.best_model_path]
        judged = [saving for saving in saved if saving.monitor is not None]
        paths = {saving.best_model_path: saving.monitor for saving in judged or saved}
        if len(paths) == 1:
            return next(iter(paths))
        if not paths:
            raise ConfigurationError(
                message='ckpt_path="best" finds no checkpoint.',
                facts="no ModelCheckpoint of this trainer has saved any.",
                remedy="call fit() first, with a ModelCheckpoint, or pass a path.",
            )
        raise ConfigurationError(
            message=f'ckpt_path="best" could be each of {len(paths)} checkpoints.',
            facts=", ".join(f"{path} (monitor={monitor!r})" for path, monitor in paths.items()) + ".",
            remedy="pass the best_model_path of one ModelCheckpoint.",
        )

    def _last(self) -> str | None:
        """Return the newest `last.ckpt` of this trainer's runs, including one written on a signal."""
        folders = dict.fromkeys([self.stop_folder, *self.folders])
        for path in newest_first(self._changed_at(folders, is_last_checkpoint)):
            ranks.rank_zero_only(_log.info)('ckpt_path="last" is %s.', path)
            return path
        ranks.rank_zero_only(_log.warning)(
            'ckpt_path="last" finds no checkpoint, so none is loaded. Looked in %s.', ", ".join(folders)
        )
        return None

    def newest_of_job(self, ckpt_path: str | os.PathLike[str] | None) -> str | None:
        """Return the newest loadable checkpoint that has this job's id; None in the first start.

        None, too, in a job that a scheduler has restarted, if the user has given a `ckpt_path`. Runs on rank
        0: without a store that outlives the start, ranks may count the restarts differently.
        """
        restart = current_restart(self._strategy.environment)
        if restart.number == 0 or (restart.is_requeued and ckpt_path is not None):
            return None
        if not restart.job:
            _log.warning(_UNKNOWN_JOB)
            return None
        folders = self.folders
        if any(saving.dirpath is None for saving in self._saving):  # it is in the folder of any logger
            folders += map(str, Path(self._default_root_dir).rglob("checkpoints"))
        found = self._changed_at(dict.fromkeys(folders), lambda name: name.endswith(".ckpt"))
        for path in newest_first(found | self._changed_at([self.stop_folder], is_last_checkpoint)):
            try:
                checkpoint = self._strategy.load_checkpoint(path)
            except CheckpointError as error:
                _log.warning("The checkpoint %s is passed over, as it does not load: %s", path, error)
                continue
            if checkpoint.get("run_id") == restart.job:
                _log.info("Restart %d of the job continues from %s.", restart.number, path)
                return path
        return None

    def _changed_at(self, folders: Iterable[str], is_wanted: Callable[[str], bool]) -> dict[str, float]:
        """Return the paths of the checkpoints with wanted names, with the time of each one's last change."""
        return {
            join_path(folder, name): seconds
            for folder in folders
            for name, seconds in self._io.list_checkpoints(folder).items()
            if is_wanted(name)
        }


def newest_first(changed_at: Mapping[str, float]) -> list[str]:
    """Return paths sorted by the time of their last change, newest first; ties by name."""
    return sorted(changed_at, key=lambda path: (changed_at[path], path), reverse=True)


def check_hyper_parameters(context: LoopContext, datamodule: DataModule | None) -> None:
    """Warn of hyperparameters that checkpoints leave out; refuse others that these cannot hold.

    None are refused where a hook may change the checkpoints.
    """
    saving = [each for each in context.trainer.checkpoint_callbacks if each.save_top_k or each.save_last]
    changes_checkpoints = is_defined(context.module, "on_save_checkpoint") or any(
        is_own(callback, Callback, "on_save_checkpoint") for callback in context.callbacks
    )
    given = [each for each in (context.module, datamodule) if each is not None]
    owners = [each for each in given if each._hyperparameters is not None]
    for owner in owners if saving else ():
        if left_out := hyperparameters.left_out_of_checkpoints(owner):
            _warn_of_left_out(type(owner).__name__, left_out)
        if changes_checkpoints:
            continue
        folder = saving[0].dirpath or context.options.default_root_dir
        with as_checkpoint_error(folder):
            part = _plain(hyperparameters.checkpointed_parts(owner))
        context.strategy.checkpoint_io.check_checkpoint(part, folder)


def _warn_of_left_out(kind: str, left_out: dict[str, Any]) -> None:
    described = ", ".join(f"{name} ({type(value).__name__})" for name, value in left_out.items())
    keywords = ", ".join(f"{name}=..." for name in left_out)
    ranks.rank_zero_only(ranks.warn)(
        f"Checkpoints will not have the hyperparameters {described}, which do not load with "
        f"weights_only=True. {kind}.load_from_checkpoint(path, {keywords}) needs them. To leave them out of "
        f"hparams, too: self.save_hyperparameters(ignore={[*left_out]}).",
    )


def save_checkpoint(context: LoopContext, path: str | os.PathLike[str], *, weights_only: bool) -> None:
    """Write all that a fit needs to continue from here, as plain types and tensors. Collective.

    With `weights_only`, write what an evaluation needs. After a failure on this rank it is not collective:
    the rank writes its own state, and the supervisor waits for it.
    """
    is_alone = is_after_failure()
    with saving_in_hook_reported() if is_alone else nullcontext():
        if context.stage.name == "fit" and not is_alone:
            context.strategy.sync_models()  # what rank 0 saves is the model of all ranks then
            compare_ranks(context, "before a checkpoint")
        _save_checkpoint(context, path, weights_only)


def _save_checkpoint(context: LoopContext, path: str | os.PathLike[str], weights_only: bool) -> None:
    checkpoint: dict[str, Any] = {} if weights_only else {"callbacks": _states_of(context.callbacks)}
    checkpoint |= _evaluation_part(context)
    if not weights_only:
        checkpoint |= _training_part(context)
    context.hooks.call_saving_hooks(checkpoint, weights_only=weights_only)
    with as_checkpoint_error(path):
        plain: dict[str, Any] = _plain(checkpoint)
    context.strategy.save_checkpoint(plain, path)


def save_stop_checkpoint(context: LoopContext) -> None:
    """Write the checkpoint of a fit that a signal stops, for `ckpt_path="last"`. Collective.

    Ranks are not compared, as there may be little time.
    """
    path = CheckpointFiles(context).stop_path(context.state.ckpt_path)
    context.strategy.sync_models()
    _save_checkpoint(context, path, weights_only=False)


def _evaluation_part(context: LoopContext) -> dict[str, Any]:
    """Return the part that an evaluation needs, and by which a `ModelCheckpoint` recognises its files."""
    progress = context.state.progress
    averages = [callback.module_to_evaluate(context.module) for callback in context.callbacks]
    module = next((average for average in averages if average is not None), context.module)
    return {
        "version": _VERSION,
        "pytorch-lightning_version": LIGHTNING_VERSION,
        "epoch": progress.current_epoch,
        "global_step": progress.global_step,
        "state_dict": context.strategy.get_module_state_dict(module),
        "run_tokens": [saving.run_token for saving in context.trainer.checkpoint_callbacks],
        **hyperparameters.checkpointed_parts(context.module),
        **_of_data_module(context),
    }


def _states_of(callbacks: Iterable[Callback]) -> dict[str, Any]:
    return {callback.state_key: saved for callback in callbacks if (saved := callback.state_dict())}


def _training_part(context: LoopContext) -> dict[str, Any]:
    """Return what `fit` needs to continue, beside what an evaluation needs. Collective."""
    strategy, module, state = context.strategy, context.module, context.state
    optimizers, schedulers = context.optimizer_set.states(strategy) or ([], [])
    checkpoint: dict[str, Any] = {
        "optimizer_states": optimizers,
        "lr_schedulers": schedulers,
        "precision": strategy.precision.state_dict(),
        "loops": dataclasses.asdict(state.progress),
        "ranks": gather_rank_states(context),
        "seed": state.seed,
        "order_seed": state.order_seed,
        # All starts of an elastic or requeued job share it; empty in other jobs.
        "run_id": current_restart(strategy.environment).job,
        "gradient_order": state.gradient_order,
        "requires_grad": _changed_flags(context),
    }
    running = context.stage.manual_optimization
    gradients = running.pending_gradients() if running else context.optimizer_set.gradients(module)
    if gradients:
        checkpoint["gradients"] = gradients
    if comm_hooks := strategy.gradients.gathered_states():
        checkpoint["comm_hooks"] = comm_hooks
    return checkpoint


def note_trained(context: LoopContext, checkpoint: dict[str, Any] | None) -> None:
    """Record which parameters are trained as a run begins; change `requires_grad` as the saved run has."""
    state, named = context.state, dict(context.module.named_parameters())
    if checkpoint is not None or state.first_trained is None:
        state.first_trained = [name for name, parameter in named.items() if parameter.requires_grad]
    changed = {} if checkpoint is None else checkpoint.get("requires_grad", {})
    for name in named.keys() & changed.keys():
        named[name].requires_grad_(bool(changed[name]))


def _changed_flags(context: LoopContext) -> dict[str, bool]:
    """Return whether parameters are trained that hooks have frozen or unfrozen since the run began."""
    first, running = set(context.state.first_trained or ()), context.stage.manual_optimization
    toggled = running.toggled if running else set()
    named = context.module.named_parameters()
    flags = {name: parameter.requires_grad or id(parameter) in toggled for name, parameter in named}
    return {name: flag for name, flag in flags.items() if flag != (name in first)}


def _of_data_module(context: LoopContext) -> dict[str, Any]:
    """Return a data module's parts of a checkpoint, by Lightning's keys: its state by its class's name."""
    datamodule = context.datamodule
    if datamodule is None:
        return {}
    saved = {type(datamodule).__qualname__: state} if (state := datamodule.state_dict()) else {}
    return hyperparameters.checkpointed_parts(datamodule, hyperparameters.DATA_MODULE_KEYS) | saved


def check_contents(checkpoint: dict[str, Any], path: str) -> None:
    """Raise unless a checkpoint's contents have the version and the types that a fit writes."""
    version = checkpoint.get("version", _VERSION)
    if type(version) is not int or version != _VERSION:
        raise CheckpointError(
            path=path,
            problem=f"has version {version!r}, and this release of rankwise reads version {_VERSION}",
            remedy="load it with the release that wrote it.",
        )
    for name, kind in _TYPES.items():
        if name in checkpoint and not isinstance(checkpoint[name], kind):
            found = type(checkpoint[name]).__name__
            raise CheckpointError(path=path, problem=f"holds a {found} as {name!r}, not a {kind.__name__}")
    for name, kind in (("ranks", dict), ("gradient_order", int)):
        if not all(isinstance(item, kind) for item in checkpoint.get(name, ())):
            raise CheckpointError(path=path, problem=f"holds items that are no {kind.__name__} in {name!r}")
    if "ranks" in checkpoint and not checkpoint["ranks"]:
        raise CheckpointError(path=path, problem="holds the state of no rank")


def _progress_in(loops: dict[str, Any], path: str) -> Progress:
    fresh = dataclasses.asdict(Progress())
    for name, value in loops.items():
        if name not in fresh or type(value) is not type(fresh[name]) or not 0 <= value <= _HIGHEST:
            raise CheckpointError(path=path, problem=f"holds {name}={value!r} among its 'loops'")
    progress = Progress(**{"counted_steps": loops.get("global_step", 0), **loops})
    if not progress.is_possible:
        raise CheckpointError(path=path, problem=f"holds numbers that contradict each other: {progress}")
    return progress


def restore_module(context: LoopContext, checkpoint: dict[str, Any]) -> None:
    """Load the weights of a checkpoint into the module, and the states of callbacks and data module."""
    path = context.state.ckpt_path or ""
    weights_in(checkpoint, path)
    context.hooks.call_loading_hooks(checkpoint, path)
    context.strategy.precision.prepare_to_load(context.module)
    module, weights = context.module, checkpoint["state_dict"]
    with loaded_into(type(module).__name__, path, "state_dict", RuntimeError, BUILD_SAME_MODULE):
        context.strategy.load_module_state_dict(module, weights, strict=module.strict_loading)
    if not module.strict_loading:
        own = module.state_dict()
        missing, unexpected = [name for name in own if name not in weights], [*weights.keys() - own.keys()]
        warn_of_different_weights(path, module, missing, sorted(unexpected))
    if isinstance(checkpoint.get("callbacks"), dict) and not is_lightning_checkpoint(checkpoint):
        _restore_callbacks(context, checkpoint["callbacks"], path)


def restore_training(context: LoopContext, checkpoint: dict[str, Any]) -> RankState | None:
    """Restore all but this rank's part, which is returned and restored last; the optimizers must exist.

    Lightning's files have no such part.
    """
    path = context.state.ckpt_path or ""
    if is_lightning_checkpoint(checkpoint):
        _restore_from_lightning(context, LightningState(checkpoint, path))
        return None
    if missing := [name for name in _NEEDED if name not in checkpoint]:
        raise CheckpointError(
            path=path,
            problem=f"holds no {missing}, without which training cannot continue",
            remedy="load its weights into the module instead: module.load_state_dict(...).",
        )
    check_contents(checkpoint, path)  # a hook may have changed it
    precision, gradients = checkpoint.get("precision", {}), checkpoint.get("gradients", {})
    if gradients and ("scaler" in precision) != context.strategy.precision.scales_loss:
        raise CheckpointError(
            path=path,
            problem="holds gradients that wait for a step, and only one of the precisions scales them",
            remedy="continue with the precision of that run, or from a checkpoint written after a step.",
        )
    context.state.progress = _progress_in(checkpoint["loops"], path)
    rank_state = RankState(context, checkpoint["ranks"], path)
    rank_state.restore_metrics()
    rank_state.restore_metric_objects()
    with loaded_into("the optimizers", path, "optimizers", ValueError):
        context.optimizer_set.load(checkpoint["optimizer_states"], checkpoint["lr_schedulers"])
        context.strategy.precision.load_state_dict(precision)
        context.optimizer_set.set_gradients(context.module, gradients)
    with restored_from(path, "communication hooks"):
        context.strategy.gradients.load_states(checkpoint.get("comm_hooks", []))
    with restored_from(path, "callbacks"):  # their loaded states may not be comparable
        stopping = context.trainer.early_stopping_callbacks
        context.state.should_stop = any(callback.has_stopped for callback in stopping)
    return rank_state


def _restore_from_lightning(context: LoopContext, saved: LightningState) -> None:
    """Restore the state that Lightning's and rankwise's checkpoints have in common; warn of the rest."""
    context.state.progress = Progress(
        current_epoch=saved.epoch,
        global_step=saved.global_step,
        total_batches=saved.total_batches,
        counted_steps=saved.counted_steps,
    )
    precision = context.strategy.precision
    with loaded_into("the optimizers", saved.path, "optimizers", ValueError):
        context.optimizer_set.load(saved.optimizers, saved.schedulers)
        precision.load_state_dict({"scaler": saved.scaler} if precision.scales_loss else {})
    if saved.left_out and context.strategy.is_global_zero:
        ranks.warn(
            f"{saved.path} is a Lightning checkpoint. Weights, optimizers, schedulers and counters are "
            f"restored, but not {', and not '.join(saved.left_out)}.",
        )


def _restore_callbacks(context: LoopContext, states: dict[str, Any], path: str) -> None:
    """Load callbacks' states; warn in a fit of those that no callback takes.

    An evaluation leaves out callbacks that count the run: a later fit continues them.
    """
    is_fit = context.stage.name == "fit"
    for callback in context.callbacks:
        if callback.state_key in states and (is_fit or not isinstance(callback, _OF_RUN)):
            with restored_from(path, callback.state_key):
                callback.load_state_dict(states[callback.state_key])
    gone = sorted(set(map(str, states)) - {callback.state_key for callback in context.callbacks})
    if not context.trainer.checkpoint_callbacks:
        gone = [key for key in gone if not key.startswith(ModelCheckpoint.__name__)]  # saves none on purpose
    if gone and is_fit and context.strategy.is_global_zero:
        ranks.warn(
            f"The checkpoint has the state of callbacks that this trainer does not have: {', '.join(gone)}. "
            "It is not restored. To continue with them, give the trainer callbacks with the same arguments.",
        )


def _plain(value: Any) -> Any:
    """Convert what `weights_only=True` does not load: paths, NumPy scalars and frozen sets."""
    plain = once_each(lambda item: _converted(item, plain))
    return plain(value)


def _converted(value: Any, plain: Callable[[Any], Any]) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if type(value) in (dict, OrderedDict, Counter):
        copied = copy.copy(value)  # keeps the type and the attributes: a state_dict has some
        copied.clear()
        for key, item in value.items():
            copied[_plain_key(key, plain)] = plain(item)
        return copied
    if type(value) in (set, frozenset):
        return {_plain_key(item, plain) for item in value}
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    return value.item() if is_numpy_scalar(value) else value


def _plain_key(value: Any, plain: Callable[[Any], Any]) -> Any:
    """Convert a key or an item of a set, which must stay hashable: a frozen set in it stays."""
    converted = plain(value)
    try:
        hash(converted)
    except TypeError:
        return value
    return converted
