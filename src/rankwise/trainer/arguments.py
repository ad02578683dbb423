"""The checks of the Trainer's arguments: everything that is wrong is said before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rankwise.callbacks import Callback, EarlyStopping, ModelCheckpoint, Timer, TQDMProgressBar
from rankwise.checkpoint import CheckpointIO
from rankwise.environments import ClusterEnvironment
from rankwise.errors import ConfigurationError, InvalidArgumentError, InvalidTypeError
from rankwise.loggers import CSVLogger, Logger
from rankwise.precision import Precision, create_precision
from rankwise.registry import StrategyRegistry
from rankwise.strategies import Strategy

__all__ = [
    "Plugins",
    "check_choice",
    "check_interval",
    "check_limit",
    "check_number",
    "check_whole",
    "collect_callbacks",
    "collect_loggers",
    "collect_precision",
    "collect_strategy",
]


def check_whole(name: str, value: Any, minimum: int, *, also: int | None = None) -> Any:
    """Return `value` if it is a whole number from `minimum` on, or the one that is allowed `also`."""
    _check_is_a(name, value, int, "a whole number")
    if value < minimum and value != also:
        extra = "" if also is None else f", or {also} for no limit"
        raise InvalidArgumentError(argument=name, value=value, expected=f"{minimum} or more{extra}")
    return value


def check_number(name: str, value: Any) -> float:
    """Return `value` if it is a number that is not negative."""
    _check_is_a(name, value, (int, float), "a number")
    if not value >= 0:
        raise InvalidArgumentError(argument=name, value=value, expected="0 or more")
    return float(value)


def check_limit(name: str, value: Any) -> int | float:
    """Return `value` if it is a number of batches (int) or a fraction of them (float)."""
    _check_is_a(name, value, (int, float), "a number of batches, or a fraction of them as a float")
    if isinstance(value, float) and not 0.0 <= value <= 1.0:
        raise InvalidArgumentError(
            argument=name, value=value, expected="a fraction from 0.0 to 1.0, or a whole number of batches"
        )
    if value < 0:
        raise InvalidArgumentError(argument=name, value=value, expected="0 or more batches")
    limit: int | float = value
    return limit


def check_interval(name: str, value: Any) -> int | float:
    """Return `value` if it is a limit that is not zero."""
    limit = check_limit(name, value)
    if not limit:
        raise InvalidArgumentError(argument=name, value=value, expected="more than 0")
    return limit


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> Any:
    """Return `value` if it is one of `choices`."""
    if value not in choices:
        raise InvalidArgumentError(
            argument=name, value=value, expected=" or ".join(repr(choice) for choice in choices)
        )
    return value


class Plugins:
    """What `plugins=[...]` holds, by kind; at most one of each.

    Raises:
        InvalidTypeError: for something that is no plug-in, or a class where an instance is needed.
        ConfigurationError: for two of a kind.
    """

    def __init__(self, plugins: Any) -> None:
        if plugins is None:
            plugins = []
        self._plugins = list(plugins) if isinstance(plugins, (list, tuple)) else [plugins]
        for plugin in self._plugins:
            _check_is_a(
                "plugins",
                plugin,
                (str, ClusterEnvironment, Precision, CheckpointIO, Strategy),
                "a ClusterEnvironment or its name, a Precision, a CheckpointIO or a Strategy",
            )
        self.environment = self._only((ClusterEnvironment, str), "cluster environment")
        self.precision: Precision | None = self._only(Precision, "precision")
        self.checkpoint_io: CheckpointIO | None = self._only(CheckpointIO, "checkpoint IO")
        self.strategy: Strategy | None = self._only(Strategy, "strategy")

    def _only(self, kind: Any, name: str) -> Any:
        found = [plugin for plugin in self._plugins if isinstance(plugin, kind)]
        if len(found) > 1:
            raise ConfigurationError(
                message=f"plugins holds {len(found)} of one kind ({name}).",
                facts=", ".join(repr(plugin) for plugin in found),
                remedy="keep one of them.",
            )
        return found[0] if found else None


def collect_strategy(strategy: Any, plugins: Plugins) -> Strategy:
    """Return the strategy that is meant: a name, an instance, or one among the plug-ins."""
    _check_is_a("strategy", strategy, (str, Strategy), "a name, or an instance of Strategy")
    if plugins.strategy is not None:
        if strategy != "auto":
            raise ConfigurationError(
                message=f"strategy={strategy!r} and a strategy among the plug-ins contradict each other.",
                facts=f"plugins holds {plugins.strategy!r}.",
                remedy="keep one of them.",
            )
        return plugins.strategy
    return StrategyRegistry.create(strategy) if isinstance(strategy, str) else strategy


def collect_precision(precision: Any, plugins: Plugins) -> Precision | None:
    """Return the precision that is meant, or None to leave it to the strategy."""
    if precision is not None and plugins.precision is not None:
        raise ConfigurationError(
            message=f"precision={precision!r} and a precision among the plug-ins contradict each other.",
            facts=f"plugins holds {plugins.precision!r}.",
            remedy="keep one of them.",
        )
    if precision is None:
        return plugins.precision
    _check_is_a("precision", precision, (str, int), 'a name such as "32-true"')
    return create_precision(precision)


def collect_callbacks(
    callbacks: Any, *, enable_checkpointing: bool, enable_progress_bar: bool | None, max_time: Any = None
) -> list[Callback]:
    """Return the user's callbacks and those that every run has; those that save checkpoints come last."""
    given: list[Callback] = _as_list("callbacks", callbacks, Callback)
    if max_time is not None:
        given.append(Timer(max_time))
    saving = [callback for callback in given if isinstance(callback, ModelCheckpoint)]
    if saving and not enable_checkpointing:
        raise ConfigurationError(
            message="callbacks holds a ModelCheckpoint, but enable_checkpointing=False.",
            remedy="leave out one of the two.",
        )
    others = [callback for callback in given if not isinstance(callback, ModelCheckpoint)]
    if enable_checkpointing and not saving:
        saving = [ModelCheckpoint()]
    has_bar = any(isinstance(callback, TQDMProgressBar) for callback in given)
    wants_bar = TQDMProgressBar.is_available() if enable_progress_bar is None else enable_progress_bar
    if has_bar and enable_progress_bar is False:
        raise ConfigurationError(
            message="callbacks holds a TQDMProgressBar, but enable_progress_bar=False.",
            remedy="leave out one of the two.",
        )
    bars = [TQDMProgressBar()] if wants_bar and not has_bar else []
    collected = [*others, *bars, *saving]
    _check_states(collected)
    return collected


def without_side_effects(callbacks: list[Callback]) -> list[Callback]:
    """Return the callbacks of a `fast_dev_run`, which writes nothing and stops by itself."""
    return [callback for callback in callbacks if not isinstance(callback, (ModelCheckpoint, EarlyStopping))]


def collect_loggers(logger: Any, default_root_dir: str) -> list[Logger]:
    """Return the loggers that are meant: the user's, a `CSVLogger` for None and True, none for False."""
    if logger is None or logger is True:
        return [CSVLogger(default_root_dir)]
    return [] if logger is False else _as_list("logger", logger, Logger)


def _check_states(callbacks: list[Callback]) -> None:
    keys = [item.state_key for item in callbacks if type(item).state_dict is not Callback.state_dict]
    if twice := {key for key in keys if keys.count(key) > 1}:
        raise ConfigurationError(
            message=f"Two callbacks would keep their state under one name: {sorted(twice)}.",
            remedy="give them different arguments, or override state_key.",
        )


def _as_list(name: str, given: Any, kind: type[Any]) -> list[Any]:
    items = [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]
    for item in items:
        _check_is_a(name, item, kind, f"an instance of {kind.__name__}, or a list of them")
    return items


def _check_is_a(name: str, value: Any, kinds: Any, expected: str) -> None:
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
