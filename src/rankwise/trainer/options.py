"""`TrainerOptions`: the plain options of a Trainer, and the checks of their values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

from rankwise.errors import InvalidArgumentError, InvalidTypeError

__all__ = ["Limit", "TrainerOptions", "check_choice", "check_is_a", "check_whole"]

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


def check_whole(name: str, value: Any, minimum: int, *, also: int | None = None) -> int:
    """Return `value` if it is a whole number from `minimum` on, or equal to `also`."""
    check_is_a(name, value, int, "a whole number")
    if value < minimum and value != also:
        extra = "" if also is None else f", or {also} for no limit"
        raise InvalidArgumentError(argument=name, value=value, expected=f"{minimum} or more{extra}")
    return int(value)


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> Any:
    """Return `value` if it is one of `choices`."""
    if value not in choices:
        raise InvalidArgumentError(argument=name, value=value, expected=" or ".join(map(repr, choices)))
    return value


def _check_clip_value(name: str, value: Any) -> float:
    if value is None:
        return 0.0
    check_is_a(name, value, (int, float), "a number")
    if not value >= 0:
        raise InvalidArgumentError(argument=name, value=value, expected="0 or more")
    return float(value)


def _check_limit(name: str, value: Any) -> Limit:
    check_is_a(name, value, (int, float), "a number of batches, or a fraction of them as a float")
    if isinstance(value, float) and not 0.0 <= value <= 1.0:
        raise InvalidArgumentError(
            argument=name, value=value, expected="a fraction from 0.0 to 1.0, or a whole number of batches"
        )
    if value < 0:
        raise InvalidArgumentError(argument=name, value=value, expected="0 or more batches")
    limit: Limit = value
    return limit


def _check_interval(name: str, value: Any) -> Limit:
    limit = _check_limit(name, value)
    if not limit:
        raise InvalidArgumentError(argument=name, value=value, expected="more than 0")
    return limit


def _check_no_sanity_steps(name: str, value: Any) -> int:
    if value != 0:
        raise InvalidArgumentError(argument=name, value=value, expected="0: there are none")
    return 0


def _check_max_epochs(name: str, value: Any) -> int | None:
    return None if value is None else check_whole(name, value, 0, also=-1)


_CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    "max_epochs": _check_max_epochs,
    "max_steps": partial(check_whole, minimum=0, also=-1),
    "min_epochs": lambda name, value: check_whole(name, value or 0, 0),
    "limit_train_batches": _check_limit,
    "limit_val_batches": _check_limit,
    "limit_test_batches": _check_limit,
    "limit_predict_batches": _check_limit,
    "fast_dev_run": lambda name, value: check_whole(name, int(value), 0),
    "val_check_interval": _check_interval,
    "check_val_every_n_epoch": partial(check_whole, minimum=1),
    "num_sanity_val_steps": _check_no_sanity_steps,
    "accumulate_grad_batches": partial(check_whole, minimum=1),
    "gradient_clip_val": _check_clip_value,
    "gradient_clip_algorithm": partial(check_choice, choices=("norm", "value")),
    "on_nonfinite": partial(check_choice, choices=("raise", "skip", None)),
    "deterministic": partial(check_choice, choices=(True, False, "warn")),
    "benchmark": partial(check_choice, choices=(True, False, None)),
    "sync_batchnorm": partial(check_choice, choices=(True, False)),
    "uneven_inputs": partial(check_choice, choices=("error", "truncate", "join")),
    "log_every_n_steps": partial(check_whole, minimum=1),
}


@final
@dataclass
class TrainerOptions:
    """The plain options of a Trainer; see `Trainer` for what each means. Every assignment is checked.

    Raises:
        InvalidArgumentError, InvalidTypeError: for a wrong value, here or in an assignment.
    """

    max_epochs: int | None
    max_steps: int
    min_epochs: int
    limit_train_batches: Limit
    limit_val_batches: Limit
    limit_test_batches: Limit
    limit_predict_batches: Limit
    val_check_interval: Limit
    check_val_every_n_epoch: int
    num_sanity_val_steps: int
    accumulate_grad_batches: int
    gradient_clip_val: float
    gradient_clip_algorithm: str
    on_nonfinite: str | None
    sync_batchnorm: bool
    deterministic: bool | str
    benchmark: bool | None
    use_distributed_sampler: bool
    uneven_inputs: str
    log_every_n_steps: int
    default_root_dir: str
    fast_dev_run: int

    def __post_init__(self) -> None:
        if self.fast_dev_run:
            self.max_epochs, self.max_steps = 1, self.fast_dev_run
            self.val_check_interval, self.check_val_every_n_epoch = 1.0, 1
            for name in _LIMITS.values():
                setattr(self, name, self.fast_dev_run)

    def __setattr__(self, name: str, value: Any) -> None:
        check = _CHECKS.get(name)
        super().__setattr__(name, value if check is None else check(name, value))

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
