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

from rankwise.callbacks import Callback, ModelCheckpoint, ModelSummary, ProgressBar, Timer, TQDMProgressBar
from rankwise.callbacks.stopping import parse_duration
from rankwise.checks import check_choice, check_is_a, check_keywords, check_value, checked_list
from rankwise.compatibility.names import TRAINER_ARGUMENTS
from rankwise.errors import ConfigurationError
from rankwise.loggers import Logger
from rankwise.paths import absolute_path
from rankwise.ranks import warn
from rankwise.strategies import DDPStrategy

P = ParamSpec("P")
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
    expected = "a fraction from 0.0 to 1.0, or a whole number of batches"
    check_value(name, value, not isinstance(value, float) or 0.0 <= value <= 1.0, expected)
    expected = "0 or more batches" if is_zero_allowed else "more than 0"
    check_value(name, value, value > 0 or (value == 0 and is_zero_allowed), expected)


def _option(
    check: Callable[..., None], *, is_optional: bool = False, default: Any = None, **arguments: Any
) -> Any:
    """Return a checked field. None stands for `default`; with `is_optional` it is accepted as None."""
    checked = partial(check, **arguments)
    return field(metadata={"check": checked, "is_optional": is_optional, "default": default})


@final
@dataclass
class TrainerOptions:
    """The plain options of a Trainer, which documents them. Every assignment is checked."""

    default_root_dir: str
    max_epochs: int | None = _option(_check_number, minimum=0, is_endless=True, is_optional=True)
    max_steps: int = _option(_check_number, minimum=0, is_endless=True)
    min_epochs: int = _option(_check_number, minimum=0, default=0)
    min_steps: int = _option(_check_number, minimum=0, default=0)
    limit_train_batches: int | float = _option(_check_limit, default=1.0)
    limit_val_batches: int | float = _option(_check_limit, default=1.0)
    limit_test_batches: int | float = _option(_check_limit, default=1.0)
    limit_predict_batches: int | float = _option(_check_limit, default=1.0)
    val_check_interval: int | float | timedelta = _option(_check_limit, is_zero_allowed=False, default=1.0)  # noqa: RUF009  _option returns a field()
    check_val_every_n_epoch: int | None = _option(_check_number, minimum=1, is_optional=True)
    overfit_batches: int | float = _option(_check_limit)
    num_sanity_val_steps: int = _option(_check_number, minimum=0, is_endless=True, default=2)
    accumulate_grad_batches: int = _option(_check_number, minimum=1)
    gradient_clip_val: float = _option(_check_number, minimum=0, kinds=_NUMBER, default=0.0)
    gradient_clip_algorithm: str | None = _option(check_choice, choices=(None, "norm", "value"))
    on_nonfinite: str | None = _option(check_choice, choices=("raise", "skip"), is_optional=True)
    sync_batchnorm: bool = _option(check_choice, choices=_FLAG)
    deterministic: bool | str = _option(check_choice, choices=(True, False, "warn"), default=False)
    benchmark: bool | None = _option(check_choice, choices=_FLAG, is_optional=True)
    detect_anomaly: bool = _option(check_choice, choices=_FLAG)
    inference_mode: bool = _option(check_choice, choices=_FLAG)
    use_distributed_sampler: bool = _option(check_choice, choices=_FLAG)
    reload_dataloaders_every_n_epochs: int = _option(_check_number, minimum=0)
    uneven_inputs: str = _option(check_choice, choices=("error", "truncate", "join"))
    log_every_n_steps: int = _option(_check_number, minimum=1, default=50)
    check_ranks_every_n_steps: int | None = _option(_check_number, minimum=0, is_optional=True)
    enable_autolog_hparams: bool = _option(check_choice, choices=_FLAG)
    model_registry: None = _option(
        check_choice, choices=(None,), expected="None: models are in files, as ModelCheckpoint writes them"
    )
    fast_dev_run: int = _option(_check_number, minimum=0)
    barebones: bool = _option(check_choice, choices=_FLAG)

    def __post_init__(self) -> None:
        self.gradient_clip_val = float(self.gradient_clip_val)
        limits = {"epochs": (self.min_epochs, self.epoch_limit), "steps": (self.min_steps, self.max_steps)}
        for kind, (least, most) in limits.items():
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
        elif metadata:
            value = metadata["default"] if value is None else value
            if value is not None or not metadata["is_optional"]:
                metadata["check"](name, value)
        if name == "default_root_dir":
            value = absolute_path(value or ".")
        super().__setattr__(name, value)

    def limit(self, phase: str) -> int | float:
        """Return how many batches of a phase run (int), or which fraction of them (float)."""
        limit: int | float = getattr(self, _LIMITS[phase])
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


def collect_callbacks(given: Mapping[str, Any]) -> list[Callback]:
    """Return the callbacks of a Trainer's arguments and the default ones; those that save come last."""
    for name in ("enable_checkpointing", "enable_progress_bar", "enable_model_summary"):
        check_choice(name, given[name], (True, False, None))
    callbacks, shows_bar = _callbacks("callbacks", given["callbacks"]), given["enable_progress_bar"]
    if given["max_time"] is not None:
        callbacks.append(Timer(given["max_time"]))
    saving = [callback for callback in callbacks if isinstance(callback, ModelCheckpoint)]
    others = [callback for callback in callbacks if not isinstance(callback, ModelCheckpoint)]
    given_bars = [callback for callback in callbacks if isinstance(callback, ProgressBar)]
    if saving and given["enable_checkpointing"] is False:
        raise _contradiction("a ModelCheckpoint", "enable_checkpointing=False")
    if given_bars and shows_bar is False:
        raise _contradiction(f"a {type(given_bars[0]).__name__}", "enable_progress_bar=False")
    if given["enable_checkpointing"] is not False and not saving:
        saving = [ModelCheckpoint()]
    if not given_bars and (TQDMProgressBar.is_available() if shows_bar is None else shows_bar):
        others.append(TQDMProgressBar())
    has_summary = any(isinstance(callback, ModelSummary) for callback in callbacks)
    if given["enable_model_summary"] is not False and not has_summary:
        others.append(ModelSummary())
    collected = [*others, *saving]
    _check_state_keys(collected)
    return collected


def with_module_callbacks(callbacks: list[Callback], returned: Any, added: set[type]) -> list[Callback]:
    """Return callbacks with those of `configure_callbacks`, which replace some.

    Leaves out types in `added`, and adds to it.
    """
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
        remedies = {name: _remedy(name, value) for name, value in kwargs.items() if name not in known}
        check_keywords("Trainer", kwargs, known, remedies)
        init(*args, **kwargs)

    return checked


def _remedy(name: str, value: object) -> str:
    if name in TRAINER_ARGUMENTS:
        return TRAINER_ARGUMENTS[name].format(value=value)
    for owner in (DDPStrategy, DistributedDataParallel):
        if name in inspect.signature(owner).parameters and name not in ("module", "ddp_kwargs"):
            return f"it is the strategy's: Trainer(strategy=DDPStrategy({name}={value!r}))."
    return ""
