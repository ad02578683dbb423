"""`ModelCheckpoint`: save checkpoints during training and keep the best ones."""

from __future__ import annotations

import logging
import math
import re
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from rankwise.callbacks.base import MonitoringCallback
from rankwise.errors import CheckpointError, ConfigurationError, InvalidArgumentError
from rankwise.paths import absolute_path, is_last_checkpoint, unused_checkpoint

if TYPE_CHECKING:
    import os
    from collections.abc import Collection, Mapping

    from rankwise.strategies import Strategy
    from rankwise.trainer import Trainer, TrainingModule

_log = logging.getLogger(__name__)
_PATHS = ("best_model_path", "last_model_path", "kth_best_model_path")
_SCORES = ("best_model_score", "current_score")
_STATE = (*_PATHS, *_SCORES, "best_k_models")


@final
class ModelCheckpoint(MonitoringCallback):
    """Save a checkpoint every `every_n_epochs` epochs (or steps) and keep the best `save_top_k`.

    Global rank 0 decides and writes. The attributes are equal on all ranks, and in the calling process
    afterwards.

    Args:
        dirpath: the folder; by default `checkpoints` in the logger's folder, or in `default_root_dir`.
        filename: file name without suffix, with metrics in braces: `"{epoch}-{val_loss:.2f}"` gives
            `epoch=3-val_loss=0.21.ckpt`. It may begin with folders in `dirpath`. The default is
            `"{epoch}-{step}"`.
        monitor: the metric that ranks the checkpoints; None keeps the latest.
        mode: `"min"` or `"max"`.
        save_top_k: number of checkpoints to keep; -1 for all, 0 for none.
        save_last: write `last.ckpt` with every save, too; `last-v1.ckpt` and so on beside another run's.
        every_n_epochs: save at the end of every n-th epoch; 1 unless `every_n_train_steps` is given.
        every_n_train_steps: save after every n-th optimizer step instead.

    Attributes:
        chosen_dirpath: the `dirpath` argument as an absolute path, if given.
        best_model_path: the best (without `monitor`: the latest) file; empty before the first save.
        best_model_score: its score; None without `monitor`.
        best_k_models: the files that are kept, with their scores.
        last_model_path: the path of this run's `last.ckpt`; empty before the first save.

    Raises:
        InvalidArgumentError, ConfigurationError: if arguments are out of range or contradict each other.
    """

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        mode: str = "min",
        save_top_k: int = 1,
        save_last: bool | None = None,
        every_n_epochs: int | None = None,
        every_n_train_steps: int | None = None,
    ) -> None:
        super().__init__(monitor, mode)
        if monitor is None:
            self.mode = "max"  # the score is then the step
        _check_save_top_k(monitor, save_top_k)
        _check_intervals(every_n_epochs, every_n_train_steps)
        self.chosen_dirpath = None if dirpath is None else absolute_path(dirpath)
        self.dirpath = self.chosen_dirpath
        self.filename = filename or "{epoch}-{step}"
        self.save_top_k = save_top_k
        self.save_last = bool(save_last)
        _check_filename(self.filename, self.save_last)
        self.every_n_train_steps = every_n_train_steps
        self.every_n_epochs = 0 if every_n_train_steps else every_n_epochs or 1
        self._last_step_saved = 0
        self._token = secrets.token_hex(8)  # in all checkpoints of this callback, and in no others
        self._unverified: set[str] = set()  # files that a loaded checkpoint has named
        self._begin_run()

    def _begin_run(self) -> None:
        self.best_model_path = self.kth_best_model_path = self.last_model_path = ""
        self.best_model_score: Tensor | None = None
        self.best_k_models: dict[str, Tensor] = {}
        self.current_score: Tensor | None = None
        self._is_last_chosen = False

    @property
    def state_key(self) -> str:
        """The class name with metric and interval, so that a trainer can have several."""
        return (
            f"ModelCheckpoint(monitor={self.monitor!r}, mode={self.mode!r}, "
            f"every_n_epochs={self.every_n_epochs}, every_n_train_steps={self.every_n_train_steps})"
        )

    def state_dict(self) -> dict[str, Any]:
        own = {"dirpath": self.dirpath, "run_token": self._token}
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
            raise TypeError(f"its scores are no tensors: {scores}")
        self.dirpath = state_dict["dirpath"]
        if self._token != (token := state_dict.get("run_token", "")):
            self._token, self._unverified, self._is_last_chosen = str(token), paths, False
        for name in _STATE:
            setattr(self, name, state_dict[name])
        self.best_k_models = kept

    def setup(self, trainer: Trainer, module: TrainingModule, stage: str) -> None:
        if stage == "fit":
            folder = self.dirpath or str(Path(trainer.log_dir or trainer.default_root_dir) / "checkpoints")
            self.dirpath = trainer.strategy.broadcast(folder)

    def on_train_start(self, trainer: Trainer, module: TrainingModule) -> None:
        self._last_step_saved = trainer.global_step
        if trainer.global_step == 0:  # a new run, perhaps of another module
            self._begin_run()

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainingModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        interval = self.every_n_train_steps
        if interval and trainer.global_step % interval == 0 and trainer.global_step != self._last_step_saved:
            self._save(trainer)

    def on_metrics_ready(self, trainer: Trainer, module: TrainingModule) -> None:
        """Save at the end of every n-th epoch."""
        if self.every_n_epochs and (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        self._last_step_saved = trainer.global_step
        if self.save_last and not self._is_last_chosen:  # all checkpoints of the run name its last one
            self.last_model_path = self._choose_last(trainer)
            self._is_last_chosen = True
        if self.save_top_k:
            self._save_ranked(trainer)
        if self.save_last:
            trainer.save_checkpoint(self.last_model_path)

    def _choose_last(self, trainer: Trainer) -> str:
        """Return the path of this run's `last.ckpt`, which is no other run's. Collective.

        A run may replace the last checkpoint from which it has continued.
        """
        continued = () if trainer.ckpt_path is None else (absolute_path(trainer.ckpt_path),)

        def choose() -> str:
            known = self.last_model_path
            if known and (known in continued or self.owns(known, trainer.strategy)):
                return known
            return self._unused(trainer, "last", continued)

        return trainer.strategy.call_on_rank_zero(choose)

    def owns(self, path: str, strategy: Strategy) -> bool:
        """Return whether a file is this run's; a loaded checkpoint alone cannot say so. Runs on: rank 0."""
        if path not in self._unverified:
            return True
        try:
            callbacks = strategy.load_checkpoint(path).get("callbacks")
        except CheckpointError as error:
            if error.path != path:
                raise  # of an earlier save, by a thread
            callbacks = None
        state = callbacks.get(self.state_key) if isinstance(callbacks, dict) else None
        if self._token and isinstance(state, dict) and state.get("run_token") == self._token:
            self._unverified.discard(path)
            return True
        _log.warning("%s is not replaced or removed: it is not of the run that has continued.", path)
        return False

    def _unused(self, trainer: Trainer, stem: str, own: Collection[str]) -> str:
        """Return a path that no file has, also none that a thread has not written yet, or one of `own`."""
        savers = [callback for callback in trainer.callbacks if isinstance(callback, ModelCheckpoint)]
        of_others = {path for saving in savers if saving is not self for path in saving._paths}
        return unused_checkpoint(self.dirpath or "", stem, of_others | (self._paths - {*own}), own)

    @property
    def _paths(self) -> set[str]:
        return {*self.best_k_models, self.last_model_path}

    def _save_ranked(self, trainer: Trainer) -> None:
        score = self._agreed_score(trainer)
        is_full = 0 <= self.save_top_k <= len(self.best_k_models)
        if is_full and not self.is_better(score, float(self.best_k_models[self.kth_best_model_path])):
            return
        path = trainer.strategy.call_on_rank_zero(lambda: self._new_path(trainer))
        superseded = self._rank(path, score)
        trainer.save_checkpoint(path)
        if superseded:
            trainer.strategy.call_on_rank_zero(lambda: self._remove(trainer, superseded))

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
        """Return an unused path, or that of the file that will be replaced."""
        values = {
            **{name: float(value) for name, value in trainer.callback_metrics.items()},
            "epoch": trainer.current_epoch,
            "step": trainer.global_step,
        }
        worst, is_full = self.kth_best_model_path, len(self.best_k_models) == self.save_top_k
        replaced = (worst,) if is_full and self.owns(worst, trainer.strategy) else ()
        return self._unused(trainer, _filled_in(self.filename, values), replaced)


def _is_below(path: str, folder: str) -> bool:
    """Return whether a path is of a checkpoint in a folder, by the path alone."""
    if not (path.endswith(".ckpt") and Path(path).is_relative_to(folder)):
        return False
    return ".." not in Path(path).relative_to(folder).parts


def _filled_in(template: str, values: Mapping[str, float]) -> str:
    """Replace `{name:format}` with `name=value`; a metric that was not logged counts as 0."""

    def fill(match: re.Match[str]) -> str:
        name, spec = match["name"], match["spec"] or ""
        prefix = "" if template[: match.start()].endswith(f"{name}=") else f"{name}="
        return f"{prefix}{format(values.get(name, 0), spec)}".replace("/", "_")

    return re.sub(r"\{(?P<name>[^{}:]+)(?::(?P<spec>[^{}]*))?\}", fill, template)


def _check_save_top_k(monitor: str | None, save_top_k: int) -> None:
    if save_top_k < -1:
        raise InvalidArgumentError(
            argument="save_top_k", value=save_top_k, expected="-1 (all), 0 (none) or a number of files"
        )
    if monitor is None and save_top_k > 1:
        raise ConfigurationError(
            message=f"ModelCheckpoint(save_top_k={save_top_k}) has no monitor that ranks checkpoints.",
            remedy=f'ModelCheckpoint(monitor="val_loss", save_top_k={save_top_k}), or save_top_k=-1 for all.',
        )


def _check_intervals(every_n_epochs: int | None, every_n_train_steps: int | None) -> None:
    intervals = {"every_n_epochs": every_n_epochs, "every_n_train_steps": every_n_train_steps}
    for name, value in intervals.items():
        if value is not None and value < 1:
            raise InvalidArgumentError(argument=name, value=value, expected="1 or more")
    if every_n_epochs and every_n_train_steps:
        raise ConfigurationError(
            message="ModelCheckpoint saves every_n_epochs or every_n_train_steps, not both.",
            facts=f"every_n_epochs={every_n_epochs}, every_n_train_steps={every_n_train_steps}.",
            remedy="give one of them, or two ModelCheckpoint callbacks.",
        )


def _check_filename(filename: str, save_last: bool) -> None:
    if save_last and is_last_checkpoint(f"{filename}.ckpt"):
        expected = "another name, as save_last=True uses this one"
        raise InvalidArgumentError(argument="filename", value=filename, expected=expected)
    if not _is_below(f"{filename}.ckpt", ""):
        expected = "a name in dirpath, or in a folder below it"
        raise InvalidArgumentError(argument="filename", value=filename, expected=expected)
    try:
        _filled_in(filename, {})
    except ValueError as error:
        raise InvalidArgumentError(
            argument="filename", value=filename, expected=f"formats that fit numbers ({error})"
        ) from None
