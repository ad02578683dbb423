"""`TrainerOptions`: the plain options of a Trainer, and the checks of their values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, final

from rankwise.errors import InvalidArgumentError, InvalidTypeError

__all__ = ["Limit", "TrainerOptions", "check_choice", "check_is_a"]

Limit = int | float
_DEFAULT_MAX_EPOCHS = 1000
_LIMITS = {
    "train": "limit_train_batches",
    "validate": "limit_val_batches",
    "test": "limit_test_batches",
    "predict": "limit_predict_batches",
}


def check_is_a(name: str, value: Any, kinds: Any, expected: str) -> None:
    """Raise InvalidTypeError unless `value` is an instance of `kinds`; a bool is not a number."""
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    if isinstance(value, kinds) and not (isinstance(value, bool) and bool not in kinds):
        return
    is_class = isinstance(value, type) and issubclass(value, kinds)
    raise InvalidTypeError(
        argument=name,
        value=value,
        expected=expected,
        remedy=f"make an instance of it: {value.__name__}()" if is_class else "",
    )


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Raise InvalidArgumentError unless `value` is one of `choices`."""
    if value not in choices:
        raise InvalidArgumentError(argument=name, value=value, expected=" or ".join(map(repr, choices)))


def _check_whole(name: str, value: Any, minimum: int, *, is_endless: bool = False) -> None:
    """Refuse what is not a whole number from `minimum` on; with `is_endless`, -1 is allowed too."""
    check_is_a(name, value, int, "a whole number")
    if value < minimum and not (is_endless and value == -1):
        extra = ", or -1 for no limit" if is_endless else ""
        raise InvalidArgumentError(argument=name, value=value, expected=f"{minimum} or more{extra}")


def _check_positive_or_zero(name: str, value: Any) -> None:
    check_is_a(name, value, (int, float), "a number")
    if not value >= 0:
        raise InvalidArgumentError(argument=name, value=value, expected="0 or more")


def _check_limit(name: str, value: Any, *, is_zero_allowed: bool = True) -> None:
    check_is_a(name, value, (int, float), "a number of batches, or a fraction of them as a float")
    if isinstance(value, float) and not 0.0 <= value <= 1.0:
        expected = "a fraction from 0.0 to 1.0, or a whole number of batches"
        raise InvalidArgumentError(argument=name, value=value, expected=expected)
    if value < 0 or not (value or is_zero_allowed):
        expected = "0 or more batches" if is_zero_allowed else "more than 0"
        raise InvalidArgumentError(argument=name, value=value, expected=expected)


def _check_no_sanity_steps(name: str, value: Any) -> None:
    if value != 0:
        raise InvalidArgumentError(argument=name, value=value, expected="0: there are none")


def _by(check: Callable[..., None], *, is_optional: bool = False, **arguments: Any) -> Mapping[str, Any]:
    """Return the metadata of a field whose values `check` accepts; and None, with `is_optional`."""
    return {"check": partial(check, **arguments), "is_optional": is_optional}


@final
@dataclass
class TrainerOptions:
    """The plain options of a Trainer, which documents them. Every assignment is checked.

    Raises:
        InvalidArgumentError, InvalidTypeError: for a wrong value, here or in an assignment.
    """

    max_epochs: int | None = field(metadata=_by(_check_whole, minimum=0, is_endless=True, is_optional=True))
    max_steps: int = field(metadata=_by(_check_whole, minimum=0, is_endless=True))
    min_epochs: int = field(metadata=_by(_check_whole, minimum=0, is_optional=True))
    limit_train_batches: Limit = field(metadata=_by(_check_limit))
    limit_val_batches: Limit = field(metadata=_by(_check_limit))
    limit_test_batches: Limit = field(metadata=_by(_check_limit))
    limit_predict_batches: Limit = field(metadata=_by(_check_limit))
    val_check_interval: Limit = field(metadata=_by(_check_limit, is_zero_allowed=False))
    check_val_every_n_epoch: int = field(metadata=_by(_check_whole, minimum=1))
    num_sanity_val_steps: int = field(metadata=_by(_check_no_sanity_steps))
    accumulate_grad_batches: int = field(metadata=_by(_check_whole, minimum=1))
    gradient_clip_val: float = field(metadata=_by(_check_positive_or_zero, is_optional=True))
    gradient_clip_algorithm: str = field(metadata=_by(check_choice, choices=("norm", "value")))
    on_nonfinite: str | None = field(metadata=_by(check_choice, choices=("raise", "skip"), is_optional=True))
    sync_batchnorm: bool = field(metadata=_by(check_choice, choices=(True, False)))
    deterministic: bool | str = field(metadata=_by(check_choice, choices=(True, False, "warn")))
    benchmark: bool | None = field(metadata=_by(check_choice, choices=(True, False), is_optional=True))
    use_distributed_sampler: bool
    uneven_inputs: str = field(metadata=_by(check_choice, choices=("error", "truncate", "join")))
    log_every_n_steps: int = field(metadata=_by(_check_whole, minimum=1))
    default_root_dir: str
    fast_dev_run: int = field(metadata=_by(_check_whole, minimum=0))

    def __post_init__(self) -> None:
        self.min_epochs = self.min_epochs or 0
        self.gradient_clip_val = self.gradient_clip_val or 0.0
        self.default_root_dir = str(Path(self.default_root_dir or Path.cwd()).absolute())
        if self.fast_dev_run:
            self.max_epochs, self.max_steps = 1, self.fast_dev_run
            self.val_check_interval, self.check_val_every_n_epoch = 1.0, 1
            for name in _LIMITS.values():
                setattr(self, name, self.fast_dev_run)

    def __setattr__(self, name: str, value: Any) -> None:
        metadata = self.__dataclass_fields__[name].metadata
        if metadata and not (value is None and metadata["is_optional"]):
            metadata["check"](name, value)
        super().__setattr__(name, value)

    def limit(self, phase: str) -> Limit:
        """Return how many batches of a phase run (int), or which fraction of them (float)."""
        limit: Limit = getattr(self, _LIMITS[phase])
        return limit

    @property
    def epoch_limit(self) -> int:
        """After how many epochs to stop; -1 for never."""
        if self.max_epochs is None:
            return _DEFAULT_MAX_EPOCHS if self.max_steps == -1 else -1
        return self.max_epochs
