"""The search of the largest batch size for which there is memory; see `Tuner.scale_batch_size`."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch

from rankwise.callbacks import Callback
from rankwise.callbacks.learning_rate_finder import (
    copy_of,
    has_value,
    precision_and_random_state_kept,
    set_value,
)
from rankwise.errors import ConfigurationError, InvalidArgumentError, WorkerRaisedError
from rankwise.trainer.module import TrainingModule, no_module

if TYPE_CHECKING:
    from rankwise.lightning.core import LightningDataModule, LightningModule
    from rankwise.lightning.trainer import Trainer

_LIMITS = {
    "fit": ("limit_train_batches", "limit_val_batches"),
    "validate": ("limit_val_batches",),
    "test": ("limit_test_batches",),
    "predict": ("limit_predict_batches",),
}
_QUIET: dict[str, dict[str, Any]] = {
    "fit": {},
    "validate": {"verbose": False},
    "test": {"verbose": False},
    "predict": {"return_predictions": False},
}
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "CUDNN_STATUS_NOT_SUPPORTED")


@final
@dataclass
class BatchSizeSearch:
    """The arguments of a search, checked, and its trials."""

    trainer: Trainer
    module: LightningModule
    datamodule: LightningDataModule | None
    method: str
    mode: str
    steps_per_trial: int
    max_trials: int
    attribute: str
    margin: float
    max_size: int

    def __post_init__(self) -> None:
        if not isinstance(self.module, TrainingModule):
            raise no_module(self.module)
        for name, value, choices in (("method", self.method, _LIMITS), ("mode", self.mode, _MODES)):
            if value not in choices:
                expected = " or ".join(map(repr, choices))
                raise InvalidArgumentError(argument=name, value=value, expected=expected)
        for name, least in (("steps_per_trial", 1), ("max_trials", 1), ("max_size", 1)):
            if getattr(self, name) < least:
                argument = {"max_size": "max_val"}.get(name, name)
                raise InvalidArgumentError(argument=argument, value=getattr(self, name), expected="1 or more")
        if not 0 <= self.margin < 1:
            raise InvalidArgumentError(
                argument="margin", value=self.margin, expected="0.0 or more, below 1.0"
            )
        if self.trainer.world_size > 1 and self.trainer.strategy.runs_in_caller:
            raise ConfigurationError(
                message="A batch size cannot be searched where this process is a rank of several.",
                facts="a rank that has no more memory ends the job.",
                remedy='Trainer(devices=1), or strategy="ddp_spawn", for the search.',
            )

    def run(self, first: int) -> int:
        """Return the batch size found, and set it; where the search fails, set the one from before."""
        before = self._current()
        try:
            with precision_and_random_state_kept(self.trainer):
                found = _MODES[self.mode](self._fits, min(first, self.max_size), self)
        except BaseException:
            self._set(before)
            raise
        self._set(found)
        return found

    def _owners(self) -> list[Any]:
        return [owner for owner in (self.module, self.datamodule) if owner is not None]

    def _current(self) -> Any:
        for owner in self._owners():
            if has_value(owner, self.attribute):
                return getattr(owner, self.attribute, owner.hparams.get(self.attribute))
        raise ConfigurationError(
            message=f"scale_batch_size() finds no {self.attribute!r} to set.",
            facts="neither the module, nor its data module, nor their hparams have it.",
            remedy='read self.batch_size in train_dataloader(), or batch_arg_name="...".',
        )

    def _set(self, size: Any) -> None:
        for owner in self._owners():
            set_value(owner, self.attribute, size)

    def _fits(self, size: int) -> bool | None:
        """Try a size; return whether there is memory for it, or None if it takes all data at once."""
        self._set(size)
        trial = self._try()
        if trial is None:
            gc.collect()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
            return False
        phase = "train" if self.method == "fit" else self.method
        return True if max(trial.state.num_batches[phase]) > 1 else None

    def _try(self) -> Trainer | None:
        """Run a copy of the module for a few batches; return its trainer, or None without enough memory."""
        steps = max(2, self.steps_per_trial)  # one would not show whether there is more
        options: dict[str, Any] = dict.fromkeys(_LIMITS[self.method], steps)
        if self.method == "fit":
            options |= {"max_epochs": 1, "max_steps": -1, "min_epochs": 0, "min_steps": 0}
            options |= {"num_sanity_val_steps": 0, "val_check_interval": 1.0, "check_val_every_n_epoch": 1}
        copied = copy_of(self.module, "scale_batch_size()")
        with tempfile.TemporaryDirectory() as folder:
            trial = self.trainer.trial(copied, Callback(), default_root_dir=folder, **options)
            try:
                getattr(trial, self.method)(copied, datamodule=self.datamodule, **_QUIET[self.method])
            except (RuntimeError, MemoryError) as error:
                if not _is_out_of_memory(error):
                    raise
                return None
        return trial


def _double(fits: Callable[[int], bool | None], size: int, search: BatchSizeSearch) -> int:
    """Return the last of the doubled sizes that fits; if the first does not, of the halved ones."""
    return _extremes(fits, size, search)[0]


def _bisect(fits: Callable[[int], bool | None], size: int, search: BatchSizeSearch) -> int:
    """Return the largest size that fits, less the margin."""
    largest, too_large, trials = _extremes(fits, size, search)
    while too_large is not None and too_large - largest > 1 and trials < search.max_trials:
        middle = (largest + too_large) // 2
        largest, too_large = (largest, middle) if fits(middle) is False else (middle, too_large)
        trials += 1
    return max(1, int(largest * (1 - search.margin)))


def _extremes(
    fits: Callable[[int], bool | None], size: int, search: BatchSizeSearch
) -> tuple[int, int | None, int]:
    """Return a size that fits, the smallest known that does not, if any, and the number of trials."""
    largest, too_large = 0, None
    for trial in range(1, search.max_trials + 1):
        outcome = fits(size)
        if outcome is False:
            too_large = size
        else:
            largest = size
        is_done = outcome is None or size == search.max_size
        if largest and (is_done or too_large is not None or trial == search.max_trials):
            return largest, too_large, trial
        size = size // 2 if too_large is not None else min(2 * size, search.max_size)
        if size == 0:
            break
    raise ConfigurationError(
        message="scale_batch_size() has found no batch size for which there is enough memory.",
        facts=f"the smallest that was tried is {too_large}.",
        remedy="a smaller init_val or model.",
    )


_MODES: dict[str, Callable[..., int]] = {"power": _double, "binsearch": _bisect}


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, WorkerRaisedError):
        is_memory_error = error.exception_type in ("MemoryError", "OutOfMemoryError")
        return is_memory_error or any(text in error.exception_message for text in _OUT_OF_MEMORY)
    return isinstance(error, MemoryError) or any(text in str(error) for text in _OUT_OF_MEMORY)
