"""The Trainer's arguments: `TrainerOptions`, the arguments that are objects, and unknown keywords."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, ParamSpec, final

from torch.nn.parallel import DistributedDataParallel

from rankwise.callbacks import (
    Callback,
    ModelCheckpoint,
    ModelSummary,
    ProgressBar,
    Timer,
    TQDMProgressBar,
)
from rankwise.callbacks.stopping import parse_duration
from rankwise.checks import check_choice, check_is_a, check_value, checked_list
from rankwise.compatibility.names import TRAINER_ARGUMENTS
from rankwise.errors import ConfigurationError, InvalidArgumentError, UnknownArgumentError
from rankwise.loggers import Logger
from rankwise.paths import absolute_path
from rankwise.ranks import warn
from rankwise.strategies import DDPStrategy

P = ParamSpec("P")
_Limit = int | float
_NUMBER = (int, float)
_FLAG = (True, False)
_DEFAULT_MAX_EPOCHS = 1000
_LIMITS = {
    "train": "limit_train_batches",
    "validate": "limit_val_batches",
    "test": "limit_test_batches",
    "predict": "limit_predict_batches",
}


def check_weights_only(value: Any) -> None:
    """Refuse checkpoints that are unpickled."""
    expected = "True or None; for a class that you trust, torch.serialization.add_safe_globals([...])"
    check_choice("weights_only", value, (None, True), expected)


def _check_number(name: str, value: Any, minimum: int, *, kinds: Any = int, is_endless: bool = False) -> None:
    """Refuse values other than a (whole) number from `minimum` on; with `is_endless`, -1 is allowed too."""
    check_is_a(name, value, kinds, "a whole number" if kinds is int else "a number")
    is_valid = value >= minimum or (is_endless and value == -1)
    check_value(name, value, is_valid, f"{minimum} or more{', or -1 for no limit' if is_endless else ''}")


def _check_limit(name: str, value: Any, *, is_zero_allowed: bool = True) -> None:
    check_is_a(name, value, _NUMBER, "a number of batches, or a fraction of them as a float")
    if isinstance(value, float) and not 0.0 <= value <= 1.0:
        expected = "a fraction from 0.0 to 1.0, or a whole number of batches"
        raise InvalidArgumentError(argument=name, value=value, expected=expected)
    expected = "0 or more batches" if is_zero_allowed else "more than 0"
    check_value(name, value, value > 0 or (value == 0 and is_zero_allowed), expected)


def _check_interval(name: str, value: Any) -> None:
    if not isinstance(value, timedelta):
        _check_limit(name, value, is_zero_allowed=False)


def _check_is(name: str, value: Any, *, only: Any, reason: str) -> None:
    """Refuse every value but one: the argument is Lightning's, and others have no effect here."""
    check_value(name, value, value == only, f"{only!r}: {reason}")


def _by(
    check: Callable[..., None], *, is_optional: bool = False, default: Any = None, **arguments: Any
) -> Mapping[str, Any]:
    """Return the metadata of a field whose values `check` accepts; and None, with `is_optional`.

    None stands for `default`, if there is one.
    """
    return {"check": partial(check, **arguments), "is_optional": is_optional, "default": default}


@final
@dataclass
class TrainerOptions:
    """The plain options of a Trainer, which documents them. Every assignment is checked."""

    max_epochs: int | None = field(metadata=_by(_check_number, minimum=0, is_endless=True, is_optional=True))
    max_steps: int = field(metadata=_by(_check_number, minimum=0, is_endless=True))
    min_epochs: int = field(metadata=_by(_check_number, minimum=0, is_optional=True))
    min_steps: int = field(metadata=_by(_check_number, minimum=0, is_optional=True))
    limit_train_batches: _Limit = field(metadata=_by(_check_limit, default=1.0))
    limit_val_batches: _Limit = field(metadata=_by(_check_limit, default=1.0))
    limit_test_batches: _Limit = field(metadata=_by(_check_limit, default=1.0))
    limit_predict_batches: _Limit = field(metadata=_by(_check_limit, default=1.0))
    val_check_interval: _Limit | timedelta = field(metadata=_by(_check_interval, default=1.0))
    check_val_every_n_epoch: int | None = field(metadata=_by(_check_number, minimum=1, is_optional=True))
    overfit_batches: _Limit = field(metadata=_by(_check_limit))
    num_sanity_val_steps: int = field(metadata=_by(_check_number, minimum=0, is_endless=True, default=2))
    accumulate_grad_batches: int = field(metadata=_by(_check_number, minimum=1))
    gradient_clip_val: float = field(metadata=_by(_check_number, minimum=0, kinds=_NUMBER, is_optional=True))
    gradient_clip_algorithm: str | None = field(metadata=_by(check_choice, choices=(None, "norm", "value")))
    on_nonfinite: str | None = field(metadata=_by(check_choice, choices=("raise", "skip"), is_optional=True))
    sync_batchnorm: bool = field(metadata=_by(check_choice, choices=_FLAG))
    deterministic: bool | str = field(
        metadata=_by(check_choice, choices=(True, False, "warn"), default=False)
    )
    benchmark: bool | None = field(metadata=_by(check_choice, choices=_FLAG, is_optional=True))
    detect_anomaly: bool = field(metadata=_by(check_choice, choices=_FLAG))
    inference_mode: bool = field(metadata=_by(check_choice, choices=_FLAG))
    use_distributed_sampler: bool = field(metadata=_by(check_choice, choices=_FLAG))
    reload_dataloaders_every_n_epochs: int = field(metadata=_by(_check_number, minimum=0))
    uneven_inputs: str = field(metadata=_by(check_choice, choices=("error", "truncate", "join")))
    log_every_n_steps: int = field(metadata=_by(_check_number, minimum=1, default=50))
    check_ranks_every_n_steps: int | None = field(metadata=_by(_check_number, minimum=0, is_optional=True))
    default_root_dir: str
    enable_autolog_hparams: bool = field(metadata=_by(check_choice, choices=_FLAG))
    model_registry: None = field(
        metadata=_by(_check_is, only=None, reason="models are in files, as ModelCheckpoint writes them")
    )
    fast_dev_run: int = field(metadata=_by(_check_number, minimum=0))
    barebones: bool = field(metadata=_by(check_choice, choices=_FLAG))

    def __post_init__(self) -> None:
        self.min_epochs, self.min_steps = self.min_epochs or 0, self.min_steps or 0
        self.gradient_clip_val = float(self.gradient_clip_val or 0.0)
        for kind, least, most in (
            ("epochs", self.min_epochs, self.epoch_limit),
            ("steps", self.min_steps, self.max_steps),
        ):
            if least > most >= 0:
                raise ConfigurationError(
                    message=f"min_{kind}={least} is more than max_{kind}={most}.",
                    remedy=f"more max_{kind}, or fewer min_{kind}.",
                )
        if self.check_val_every_n_epoch is None and isinstance(self.val_check_interval, float):
            raise ConfigurationError(
                message="check_val_every_n_epoch=None counts batches over epochs, and needs how many.",
                facts=f"val_check_interval={self.val_check_interval} is a fraction of an epoch.",
                remedy="val_check_interval=1000, a number of batches; or check_val_every_n_epoch=1.",
            )
        self._limit_to_overfit()
        if self.fast_dev_run:
            self.max_epochs, self.max_steps = 1, self.fast_dev_run
            self.min_epochs = self.min_steps = self.num_sanity_val_steps = 0
            self.val_check_interval, self.check_val_every_n_epoch = 1.0, 1
            for name in _LIMITS.values():
                setattr(self, name, self.fast_dev_run)

    def _limit_to_overfit(self) -> None:
        if not self.overfit_batches:
            return
        for name, default in (("limit_train_batches", 1.0), ("limit_val_batches", 1.0), ("fast_dev_run", 0)):
            if (value := getattr(self, name)) != default or type(value) is not type(default):
                raise ConfigurationError(
                    message=f"overfit_batches and {name} contradict each other.",
                    facts=f"overfit_batches={self.overfit_batches}, {name}={value}.",
                    remedy="keep one of them.",
                )
        self.limit_train_batches = self.limit_val_batches = self.overfit_batches

    def __setattr__(self, name: str, value: Any) -> None:
        metadata = self.__dataclass_fields__[name].metadata
        if name == "val_check_interval" and isinstance(value, (str, Mapping, timedelta)):
            value = parse_duration(name, value)
        if metadata:
            value = metadata["default"] if value is None else value
            if value is not None or not metadata["is_optional"]:
                metadata["check"](name, value)
        if name == "default_root_dir":
            value = absolute_path(value or ".")
        super().__setattr__(name, value)

    @property
    def sets_torch_flags(self) -> bool:
        """Whether a stage sets flags of torch."""
        return bool(self.deterministic or self.detect_anomaly) or self.benchmark is not None

    def limit(self, phase: str) -> _Limit:
        """Return how many batches of a phase run (int), or which fraction of them (float)."""
        limit: _Limit = getattr(self, _LIMITS[phase])
        return limit

    @property
    def epoch_limit(self) -> int:
        """After how many epochs to stop; -1 for never."""
        if self.max_epochs is None:
            return _DEFAULT_MAX_EPOCHS if self.max_steps == -1 else -1
        return self.max_epochs


_BAREBONES: Mapping[str, tuple[Any, ...]] = {
    "logger": (None, False),
    "enable_checkpointing": (None, False),
    "enable_progress_bar": (None, False),
    "enable_model_summary": (None, False),
    "num_sanity_val_steps": (None, 0),
    "log_every_n_steps": (None, 0),
    "fast_dev_run": (False, 0),
    "detect_anomaly": (False,),
    "profiler": (None,),
}
"""The arguments that `barebones` switches off, and the values that agree with it."""


def barebones_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a Trainer with `barebones=True`; refuse those that it switches off."""
    for name, accepted in _BAREBONES.items():
        if not any(given[name] is value for value in accepted):
            raise ConfigurationError(
                message=f"{name}={given[name]!r} and barebones=True contradict each other.",
                facts="barebones measures the training loop alone, without what is logged, saved or shown.",
                remedy="keep one of them.",
            )
    warn("barebones=True: self.log() has no effect, and nothing is saved or shown.")
    off = {name: accepted[-1] for name, accepted in _BAREBONES.items()}
    return {**given, **off, "log_every_n_steps": None}


def collect_callbacks(
    callbacks: Any,
    *,
    enable_checkpointing: bool | None,
    enable_progress_bar: bool | None,
    enable_model_summary: bool | None = False,
    max_time: Any = None,
) -> list[Callback]:
    """Return the user's callbacks and the default ones; those that save checkpoints come last."""
    check_choice("enable_checkpointing", enable_checkpointing, (True, False, None))
    check_choice("enable_progress_bar", enable_progress_bar, (True, False, None))
    check_choice("enable_model_summary", enable_model_summary, (True, False, None))
    enable_checkpointing = enable_checkpointing is not False
    given = _callbacks("callbacks", callbacks)
    if max_time is not None:
        given.append(Timer(max_time))
    saving = [callback for callback in given if isinstance(callback, ModelCheckpoint)]
    others = [callback for callback in given if not isinstance(callback, ModelCheckpoint)]
    given_bars = [callback for callback in given if isinstance(callback, ProgressBar)]
    if saving and not enable_checkpointing:
        raise _contradiction("a ModelCheckpoint", "enable_checkpointing=False")
    if given_bars and enable_progress_bar is False:
        raise _contradiction(f"a {type(given_bars[0]).__name__}", "enable_progress_bar=False")
    if enable_checkpointing and not saving:
        saving = [ModelCheckpoint()]
    wants_bar = TQDMProgressBar.is_available() if enable_progress_bar is None else enable_progress_bar
    bars = [TQDMProgressBar()] if wants_bar and not given_bars else []
    has_summary = any(isinstance(callback, ModelSummary) for callback in given)
    summaries = [ModelSummary()] if enable_model_summary is not False and not has_summary else []
    collected = [*others, *bars, *summaries, *saving]
    _check_state_keys(collected)
    return collected


def with_module_callbacks(callbacks: list[Callback], returned: Any, added: set[type]) -> list[Callback]:
    """Return the trainer's callbacks and the ones of `configure_callbacks`, which replace some; see there.

    Those whose types are among `added` are not added again; mutates `added`.
    """
    if returned == []:
        return callbacks
    given = _callbacks("configure_callbacks()", returned)
    own = [callback for callback in given if type(callback) not in added]
    added.update(map(type, own))
    if not own:
        return callbacks
    kept = [
        callback
        for callback in callbacks
        if type(callback) is Callback or not any(isinstance(each, type(callback)) for each in own)
    ]
    merged = sorted([*kept, *own], key=lambda callback: isinstance(callback, ModelCheckpoint))
    _check_state_keys(merged)
    return merged


def _callbacks(name: str, given: Any) -> list[Callback]:
    """Return one callback or several as a list; Lightning callbacks also get rankwise's class."""
    callbacks = checked_list(name, given, object)
    for each in callbacks:
        if not isinstance(each, Callback):
            from rankwise.compatibility.lightning_classes import give_class_to_callback

            give_class_to_callback(each, Callback)
    return checked_list(name, callbacks, Callback)


def _contradiction(callback: str, argument: str) -> ConfigurationError:
    return ConfigurationError(
        message=f"callbacks holds {callback}, but {argument}.", remedy="leave out one of the two."
    )


def _check_state_keys(callbacks: list[Callback]) -> None:
    keys = [item.state_key for item in callbacks if type(item).state_dict is not Callback.state_dict]
    if twice := {key for key in keys if keys.count(key) > 1}:
        raise ConfigurationError(
            message=f"Two callbacks would keep their state under one name: {sorted(twice)}.",
            remedy="give them different arguments, or override state_key.",
        )


def collect_loggers(logger: Any, default_root_dir: str) -> list[Logger]:
    """Return the user's loggers, a `CSVLogger` for None and True, none for False."""
    if logger is None or logger is True:
        from rankwise.loggers import CSVLogger

        return [CSVLogger(default_root_dir)]
    if logger is False:
        return []
    from rankwise.loggers.names import created_loggers

    return created_loggers("logger", logger, default_root_dir)


def with_known_keywords(init: Callable[P, None]) -> Callable[P, None]:
    """Make a constructor raise UnknownArgumentError for unknown keywords, which suggests alternatives."""
    known = tuple(name for name in inspect.signature(init).parameters if name != "self")

    @functools.wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        for name, value in kwargs.items():
            if name not in known:
                remedy = _remedy(name, value)
                raise UnknownArgumentError(target="Trainer", name=name, known=known, remedy=remedy)
        init(*args, **kwargs)

    return checked


def _remedy(name: str, value: object) -> str:
    if name in TRAINER_ARGUMENTS:
        return TRAINER_ARGUMENTS[name].format(value=value)
    for owner in (DDPStrategy, DistributedDataParallel):
        if name in inspect.signature(owner).parameters and name not in ("module", "ddp_kwargs"):
            return f"it is the strategy's: Trainer(strategy=DDPStrategy({name}={value!r}))."
    return ""
