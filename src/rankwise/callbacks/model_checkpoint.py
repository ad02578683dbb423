"""`ModelCheckpoint`: save checkpoints during training and keep the best ones."""

from __future__ import annotations

import logging
import math
import re
import secrets
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rankwise import ranks
from rankwise.callbacks.base import MonitoringCallback
from rankwise.checks import check_choice, check_is_a, check_minimum, check_value
from rankwise.errors import CheckpointError, ConfigurationError, InvalidArgumentError
from rankwise.paths import (
    checkpoint_path,
    is_last_checkpoint,
    is_path_below,
    is_symbolic_link,
    join_path,
    unused_checkpoint,
)
from rankwise.processes.signals import StoppedBySignal

if TYPE_CHECKING:
    import os
    from collections.abc import Collection, Mapping

    from rankwise.strategies import Strategy
    from rankwise.trainer import Trainer, TrainingModule

_log = logging.getLogger(__name__)
_PATHS = ("best_model_path", "last_model_path", "kth_best_model_path")
_SCORES = ("best_model_score", "current_score")
_STATE = (*_PATHS, *_SCORES, "best_k_models")


class ModelCheckpoint(MonitoringCallback):
    """Save a checkpoint every `every_n_epochs` epochs (or steps, or minutes) and keep the best `save_top_k`.

    Global rank 0 decides and writes. The attributes are equal on all ranks, and in the calling process
    afterwards.

    Args:
        dirpath: the folder; by default `checkpoints` in the logger's folder, or in `default_root_dir`. A path
            with a scheme, such as `s3://bucket/run`, needs a `CheckpointIO` for that storage.
        filename: file name without suffix, with metrics in braces: `"{epoch}-{val_loss:.2f}"` gives
            `epoch=3-val_loss=0.21.ckpt`. It may begin with folders in `dirpath`. The default is
            `"{epoch}-{step}"`.
        monitor: the metric that ranks the checkpoints, or `"step"` or `"epoch"`; None keeps the latest. A
            step's or time's save waits for a validation that has yet to measure it.
        verbose: log each file that is saved.
        save_last: write `last.ckpt` with every save, too; `last-v1.ckpt` and so on beside another run's.
            With `"link"` it is a hard link where the save has written another file.
        save_top_k: number of checkpoints to keep; -1 for all, 0 for none.
        save_on_exception: save when training raises; in one process only, as the others' ranks end then.
        save_weights_only: save weights and hyper parameters; `fit` cannot continue from such a file.
        mode: `"min"` or `"max"`.
        auto_insert_metric_name: write `name=` before each value in file names.
        every_n_train_steps: save after every n-th optimizer step; 0 for never.
        train_time_interval: save after the first optimizer step of each such interval. Rank 0's clock
            decides, which takes a small collective in each step.
        every_n_epochs: save at the end of every n-th epoch, 0 for never; 1 unless one of the two before it is
            given.
        save_on_train_epoch_end: save `every_n_epochs` after every epoch (True), or after every validation
            (False); by default after every validation, and after every epoch without `monitor`, or in a fit
            without validation.
        enable_version_counter: leave another run's file of the same name, and append `-v1` and so on;
            otherwise replace it.

    Attributes:
        chosen_dirpath: the `dirpath` argument as an absolute path, or with its scheme, if given.
        best_model_path: the best (without `monitor`: the latest) file; empty before the first save.
        best_model_score: its score; None without `monitor`.
        best_k_models: the files that are kept, with their scores.
        last_model_path: the path of this run's `last.ckpt`; empty before the first save.

    Raises:
        InvalidArgumentError, ConfigurationError: if arguments are out of range or contradict each other; in
            `fit`, for `save_on_train_epoch_end=False` without validation.
    """

    epoch_end_argument = "save_on_train_epoch_end"

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: bool | str | None = None,
        save_top_k: int = 1,
        save_on_exception: bool = False,
        save_weights_only: bool = False,
        mode: str = "min",
        auto_insert_metric_name: bool = True,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        every_n_epochs: int | None = None,
        save_on_train_epoch_end: bool | None = None,
        enable_version_counter: bool = True,
    ) -> None:
        super().__init__(monitor, mode, save_on_train_epoch_end)
        if monitor is None:
            self.mode = "max"  # the score is then the step
        _check_save_top_k(monitor, save_top_k)
        _check_intervals(every_n_epochs, every_n_train_steps, train_time_interval)
        check_choice("save_last", save_last, (None, True, False, "link"), "a bool or 'link'")
        self.chosen_dirpath = self.dirpath = None if dirpath is None else checkpoint_path(dirpath)
        self.filename = filename or "{epoch}-{step}"
        self.save_top_k = save_top_k
        self.save_last = save_last or False
        _check_filename(self.filename, bool(save_last))
        self.verbose = verbose
        self.save_on_exception = save_on_exception
        self.save_weights_only = save_weights_only
        self.auto_insert_metric_name = auto_insert_metric_name
        self.enable_version_counter = enable_version_counter
        self.every_n_train_steps = every_n_train_steps
        self.train_time_interval = train_time_interval
        is_by_epoch = every_n_train_steps is None and train_time_interval is None
        self.every_n_epochs = int(is_by_epoch) if every_n_epochs is None else every_n_epochs
        if save_on_train_epoch_end is not None and not self.every_n_epochs:
            raise ConfigurationError(
                message=f"ModelCheckpoint(save_on_train_epoch_end={save_on_train_epoch_end}) has no effect: "
                "nothing is saved by epochs.",
                facts=f"every_n_epochs={every_n_epochs}, every_n_train_steps={every_n_train_steps}, "
                f"train_time_interval={train_time_interval}.",
                remedy="leave it out; to save after epochs too, add another ModelCheckpoint.",
            )
        self._last_step_saved = 0
        self._saved_at = 0.0  # time.monotonic()
        self._is_training = False
        self.run_token = secrets.token_hex(8)  # in all checkpoints of this callback, and in no others
        self._unverified: set[str] = set()  # files that a loaded checkpoint has named
        self._begin_run()

    def _begin_run(self) -> None:
        self.best_model_path = self.kth_best_model_path = self.last_model_path = ""
        self.best_model_score: Tensor | None = None
        self.best_k_models: dict[str, Tensor] = {}
        self.current_score: Tensor | None = None
        self._is_last_chosen = False
        self._has_validated = self._waits_for_validation = False

    @property
    def state_key(self) -> str:
        """The class name with metric and interval, so that a trainer can have several."""
        return (
            f"ModelCheckpoint(monitor={self.monitor!r}, mode={self.mode!r}, "
            f"every_n_epochs={self.every_n_epochs}, every_n_train_steps={self.every_n_train_steps}, "
            f"train_time_interval={self.train_time_interval})"
        )

    def state_dict(self) -> dict[str, Any]:
        own = {"dirpath": self.dirpath, "run_token": self.run_token}
        return own | {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the files of the resumed run if this callback writes to the same folder.

        Files are removed or replaced only if they show that they are of that run: a checkpoint may come from
        anybody.

        Raises:
            ValueError, TypeError, KeyError: for files elsewhere, or for what no callback has returned.
        """
        if self.dirpath not in (None, state_dict["dirpath"]):
            return
        kept = {path: torch.tensor(float(score)) for path, score in state_dict["best_k_models"].items()}
        paths = {*kept, *(state_dict[name] for name in _PATHS if state_dict[name])}
        if outside := sorted(path for path in paths if not _is_below(path, state_dict["dirpath"])):
            raise ValueError(f"it names files that are not in {state_dict['dirpath']}: {outside}")
        if not {state_dict["best_model_path"], state_dict["kth_best_model_path"]} <= (set(kept) or {""}):
            raise ValueError("its best files are not among those that are kept")
        scores = [state_dict[name] for name in _SCORES]
        if not all(score is None or isinstance(score, Tensor) for score in scores):
            raise TypeError(f"its scores are not tensors: {scores}")
        self.dirpath = state_dict["dirpath"]
        if self.run_token != (token := state_dict.get("run_token", "")):
            self.run_token, self._unverified, self._is_last_chosen = str(token), paths, False
        for name in _STATE:
            setattr(self, name, state_dict[name])
        self.best_k_models = kept

    def check_stage(self, trainer: Trainer, module: TrainingModule, stage: str) -> None:
        if stage == "fit" and self.save_on_exception and trainer.world_size > 1:
            raise ConfigurationError(
                message="ModelCheckpoint(save_on_exception=True) works in one process only.",
                facts=f"the trainer has {trainer.world_size}, which write a checkpoint together; after an "
                "exception in one the others end.",
                remedy="every_n_train_steps=..., or train_time_interval=..., to lose less work.",
            )

    def setup(self, trainer: Trainer, module: TrainingModule, stage: str) -> None:
        if stage == "fit":
            folder = self.dirpath or join_path(trainer.log_dir or trainer.default_root_dir, "checkpoints")
            self.dirpath = trainer.strategy.broadcast(folder)

    def on_train_start(self, trainer: Trainer, module: TrainingModule) -> None:
        super().on_train_start(trainer, module)
        self._last_step_saved = trainer.global_step
        self._saved_at = time.monotonic()
        self._is_training = True
        if trainer.global_step == 0:  # a new run, perhaps of another module
            self._begin_run()

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainingModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._is_step_due(trainer):
            return
        if self._is_before_validation(trainer):
            self._waits_for_validation = True
        else:
            self._save(trainer)

    def on_validation_end(self, trainer: Trainer, module: TrainingModule) -> None:
        if trainer.is_fitting and not trainer.sanity_checking:
            self._has_validated = True
            if self._waits_for_validation:
                self._save(trainer)
        super().on_validation_end(trainer, module)

    def on_metrics_ready(self, trainer: Trainer, module: TrainingModule) -> None:
        """Save at the end of every n-th epoch."""
        if self.every_n_epochs and (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            self._save(trainer)

    def on_train_end(self, trainer: Trainer, module: TrainingModule) -> None:
        self._is_training = False

    def on_exception(self, trainer: Trainer, module: TrainingModule, exception: BaseException) -> None:
        """Save if it was requested; the files that the metric has chosen do not change."""
        is_stop = isinstance(exception.__cause__, StoppedBySignal)  # which has saved
        is_due, self._is_training = self.save_on_exception and self._is_training and not is_stop, False
        if is_due and trainer.global_step != self._last_step_saved:
            try:
                self._write(trainer, self._unused(trainer, self._file_name(trainer), ()))
                if self.save_last:
                    self._write(trainer, self._last_path(trainer))
            except CheckpointError as error:  # the exception itself matters more
                _log.error("No checkpoint of the run that fails: %s", error)

    def _is_step_due(self, trainer: Trainer) -> bool:
        """Return whether the optimizer step that has ended is to be saved. Collective with an interval."""
        if trainer.progress.window_batches or trainer.global_step == self._last_step_saved:
            return False
        if self.every_n_train_steps:
            return trainer.global_step % self.every_n_train_steps == 0
        if self.train_time_interval is None:
            return False
        elapsed = time.monotonic() - self._saved_at
        return bool(trainer.strategy.broadcast(elapsed >= self.train_time_interval.total_seconds()))

    def _is_before_validation(self, trainer: Trainer) -> bool:
        """Return whether a validation to come measures the metric of this step."""
        if self.monitor is None or not trainer.has_validation:
            return False
        if trainer.is_validation_due:
            return True
        is_missing: bool = trainer.strategy.broadcast(self.monitored_value(trainer) is None)
        return is_missing and not self._has_validated

    def _save(self, trainer: Trainer) -> None:
        self._last_step_saved = trainer.global_step
        self._saved_at = time.monotonic()
        self._waits_for_validation = False
        last = self._last_path(trainer) if self.save_last else None
        ranked = self._save_ranked(trainer) if self.save_top_k else None
        if last is None:
            return
        if ranked is None or self.save_last != "link":
            self._write(trainer, last)
        elif ranked != last:
            io = trainer.strategy.checkpoint_io
            trainer.strategy.call_on_rank_zero(lambda: io.link_checkpoint(ranked, last))

    def _last_path(self, trainer: Trainer) -> str:
        """Return the path of the last checkpoint, which all checkpoints of the run name. Collective."""
        if not self._is_last_chosen:
            self.last_model_path = trainer.strategy.call_on_rank_zero(lambda: self._choose_last(trainer))
            self._is_last_chosen = True
        return self.last_model_path

    def _write(self, trainer: Trainer, path: str) -> None:
        trainer.save_checkpoint(path, weights_only=self.save_weights_only)
        if self.verbose:
            epoch, step = trainer.current_epoch, trainer.global_step
            ranks.rank_zero_only(_log.info)("ModelCheckpoint: epoch %d, step %d: saved %s", epoch, step, path)

    def _choose_last(self, trainer: Trainer) -> str:
        """Return a path for this run's `last.ckpt` that no other run uses. Runs on: rank 0.

        A run may replace the last checkpoint from which it has continued, unless that is a symbolic link.
        """
        known = self.last_model_path
        continued = () if trainer.ckpt_path is None else (checkpoint_path(trainer.ckpt_path),)
        is_file = bool(known) and not is_symbolic_link(known)
        if is_file and (known in continued or self.owns(known, trainer.strategy)):
            return known
        return self._unused(trainer, "last", continued)

    def owns(self, path: str, strategy: Strategy) -> bool:
        """Return whether a file is this run's; a loaded checkpoint alone cannot say so. Runs on: rank 0."""
        if path not in self._unverified:
            return True
        try:
            tokens = strategy.load_checkpoint(path).get("run_tokens")
        except CheckpointError as error:
            if error.path != path:
                raise  # of an earlier save, by a thread
            tokens = None
        if self.run_token and isinstance(tokens, list) and self.run_token in tokens:
            self._unverified.discard(path)
            return True
        _log.warning("%s is not replaced or removed: it is not of the run that has continued.", path)
        return False

    def _unused(self, trainer: Trainer, stem: str, own: Collection[str]) -> str:
        """Return a path that no file has, also none that a thread has not written yet, or one of `own`.

        A symbolic link is never our own: who writes there replaces the file that it names. Without versions,
        return one that a file may have; a link is removed. Runs on: rank 0.
        """
        folder, io = self.dirpath or "", trainer.strategy.checkpoint_io
        if not self.enable_version_counter:
            path = join_path(folder, f"{stem}.ckpt")
            if is_symbolic_link(path):
                io.remove_checkpoint(path)
            return path
        savers = [callback for callback in trainer.callbacks if isinstance(callback, ModelCheckpoint)]
        of_others = {path for saving in savers if saving is not self for path in saving._paths}
        taken = of_others | (self._paths - {*own})

        def is_used(path: str) -> bool:
            return path in taken or (is_symbolic_link(path) if path in own else io.has_checkpoint(path))

        return unused_checkpoint(folder, stem, is_used)

    @property
    def _paths(self) -> set[str]:
        return {*self.best_k_models, self.last_model_path}

    def _save_ranked(self, trainer: Trainer) -> str | None:
        """Save a checkpoint if it is among the best; return its path."""
        score = self._agreed_score(trainer)
        is_full = 0 <= self.save_top_k <= len(self.best_k_models)
        if is_full and not self.is_better(score, float(self.best_k_models[self.kth_best_model_path])):
            return None
        path = trainer.strategy.call_on_rank_zero(lambda: self._new_path(trainer))
        superseded = self._rank(path, score)
        self._write(trainer, path)
        if superseded:
            trainer.strategy.call_on_rank_zero(lambda: self._remove(trainer, superseded))
        return path

    def monitored_value(self, trainer: Trainer) -> float | None:
        value = super().monitored_value(trainer)
        if value is None and self.monitor in ("step", "epoch"):
            return float(trainer.global_step if self.monitor == "step" else trainer.current_epoch)
        return value

    def _remove(self, trainer: Trainer, path: str) -> None:
        if self.owns(path, trainer.strategy):
            trainer.strategy.checkpoint_io.remove_checkpoint(path)

    def _agreed_score(self, trainer: Trainer) -> float:
        """Return rank 0's score on every rank; without `monitor` the step, so that the latest is best."""
        if self.monitor is None:
            return float(trainer.global_step)
        score = trainer.strategy.broadcast(self.monitored_value(trainer))
        if score is None:
            raise self.missing_metric(trainer)
        self.current_score = torch.tensor(score)
        return self.worst if math.isnan(score) else score

    @property
    def kth_value(self) -> Tensor | None:
        """The score of the worst of the files that are kept; None if there are none."""
        return self.best_k_models.get(self.kth_best_model_path)

    def _rank(self, path: str, score: float) -> str | None:
        """Add the new file to the kept ones; return the file that it replaces, if any."""
        self.best_k_models[path] = torch.tensor(score)
        ranked = sorted(self.best_k_models, key=lambda kept: float(self.best_k_models[kept]))
        if self.mode == "max":
            ranked.reverse()
        superseded = ranked.pop() if 0 < self.save_top_k < len(ranked) else None
        if superseded:
            del self.best_k_models[superseded]
        self.best_model_path, self.kth_best_model_path = ranked[0], ranked[-1]
        self.best_model_score = None if self.monitor is None else self.best_k_models[ranked[0]]
        return superseded

    def _new_path(self, trainer: Trainer) -> str:
        """Return an unused path, or the path of the file that will be replaced."""
        worst, is_full = self.kth_best_model_path, len(self.best_k_models) == self.save_top_k
        replaced = (worst,) if is_full and self.owns(worst, trainer.strategy) else ()
        return self._unused(trainer, self._file_name(trainer), replaced)

    def _file_name(self, trainer: Trainer) -> str:
        values = {
            **{name: float(value) for name, value in trainer.callback_metrics.items()},
            "epoch": trainer.current_epoch,
            "step": trainer.global_step,
        }
        return _filled_in(self.filename, values, has_names=self.auto_insert_metric_name)


def _is_below(path: str, folder: str) -> bool:
    """Return whether a path is of a checkpoint in a folder, by the path alone."""
    return path.endswith(".ckpt") and is_path_below(path, folder)


def _filled_in(template: str, values: Mapping[str, float], *, has_names: bool = True) -> str:
    """Replace `{name:format}` with `name=value`, or the value; a metric that was not logged counts as 0."""

    def fill(match: re.Match[str]) -> str:
        name, spec = match["name"], match["spec"] or ""
        is_named = not has_names or template[: match.start()].endswith(f"{name}=")
        prefix = "" if is_named else f"{name}="
        return f"{prefix}{format(values.get(name, 0), spec)}".replace("/", "_")

    return re.sub(r"\{(?P<name>[^{}:]+)(?::(?P<spec>[^{}]*))?\}", fill, template)


def _check_save_top_k(monitor: str | None, save_top_k: int) -> None:
    check_minimum("save_top_k", save_top_k, -1, "-1 (all), 0 (none) or a number of files")
    if monitor is None and save_top_k > 1:
        raise ConfigurationError(
            message=f"ModelCheckpoint(save_top_k={save_top_k}) has no monitor that ranks checkpoints.",
            remedy=f'ModelCheckpoint(monitor="val_loss", save_top_k={save_top_k}), or save_top_k=-1 for all.',
        )


def _check_intervals(every_n_epochs: int | None, every_n_train_steps: int | None, time_interval: Any) -> None:
    intervals: dict[str, Any] = {"every_n_epochs": every_n_epochs, "every_n_train_steps": every_n_train_steps}
    for name, value in intervals.items():
        check_value(name, value, value is None or value >= 0, "1 or more, or 0 for never")
    if time_interval is not None:
        check_is_a("train_time_interval", time_interval, timedelta, "a timedelta")
    intervals["train_time_interval"] = time_interval
    given = [f"{name}={value!r}" for name, value in intervals.items() if value]
    if len(given) > 1:
        raise ConfigurationError(
            message="ModelCheckpoint saves by epochs, by steps or by time.",
            facts=f"{', '.join(given)}.",
            remedy="give one of them, or several ModelCheckpoint callbacks.",
        )


def _check_filename(filename: str, save_last: bool) -> None:
    is_free = not (save_last and is_last_checkpoint(f"{filename}.ckpt"))
    check_value("filename", filename, is_free, "another name, as save_last=True uses this one")
    is_below = _is_below(f"{filename}.ckpt", "")
    check_value("filename", filename, is_below, "a name in dirpath, or in a folder below it")
    try:
        _filled_in(filename, {})
    except ValueError as error:
        expected = f"formats that fit numbers ({error})"
        raise InvalidArgumentError(argument="filename", value=filename, expected=expected) from None
