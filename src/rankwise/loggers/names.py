"""`LoggerRegistry`: loggers by name, built-in and of installed packages."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint
from typing import Any, NamedTuple, final

from rankwise import checks
from rankwise.compatibility.names import MISSING_HOOKS
from rankwise.errors import UnknownNameError
from rankwise.loggers.base import Logger
from rankwise.loggers.mlflow import MLFlowLogger
from rankwise.loggers.run_folders import CSVLogger, TensorBoardLogger
from rankwise.loggers.wandb import WandbLogger
from rankwise.named_options import NameTable, package_of, split_options


@final
class RegisteredLogger(NamedTuple):
    """A class of loggers, or a function that returns a logger."""

    logger: Callable[..., Logger]
    description: str = ""


@final
class _Registry(NameTable[RegisteredLogger]):
    """Maps names, in any case, to loggers."""

    kind = "Logger"
    title = "LoggerRegistry"
    argument = "logger"
    group = "loggers"

    def register(
        self, name: Any, logger: Callable[..., Logger], description: str = "", override: bool = False
    ) -> None:
        """Register a logger, for `Trainer(logger="name:option=value")`.

        Args:
            name: case does not matter.
            logger: a subclass of `Logger`, or a function that returns a logger.
            description: one line.
            override: whether to replace a logger of that name.

        Raises:
            InvalidTypeError: when the name is not a string, or the logger cannot be called.
            DuplicateNameError: when the name is taken.
        """
        key = self._check_name(name, override)
        self._entries[key] = _checked(logger, description)

    def create(self, name: str, save_dir: str) -> Logger:
        """Return a new logger.

        Args:
            name: it may have arguments of the constructor: `"csv:name=digits,version=3"`.
            save_dir: the constructor's argument of that name, if it requires one.

        Raises:
            InvalidTypeError: when the name is not a string, an option has no value, or it makes no `Logger`.
            UnknownNameError: when it is neither registered nor of an installed package.
            UnknownArgumentError: when the logger has no such option.
        """
        plain, options = split_options("logger", name)
        make = self.entry(plain).logger
        parameters = inspect.signature(make).parameters
        checks.check_keywords(f"logger {plain!r}", options, checks.keywords_of(make, options))
        if "save_dir" in parameters and parameters["save_dir"].default is inspect.Parameter.empty:
            options.setdefault("save_dir", save_dir)
        logger = make(**options)
        checks.check_is_a(f"logger {plain!r}", logger, Logger)
        return logger

    def _entries_of(self, point: EntryPoint, loaded: Any) -> Mapping[str, RegisteredLogger]:
        return {point.name: _checked(loaded, f"(package {package_of(point)})")}

    def _unknown(self, name: str) -> UnknownNameError:
        return UnknownNameError(kind="logger", name=name, known=tuple(self))


def _checked(logger: Any, description: str) -> RegisteredLogger:
    checks.check_callable("logger", logger, "a subclass of Logger, or a function that returns a logger")
    return RegisteredLogger(logger, description)


LoggerRegistry = _Registry()
LoggerRegistry.register("csv", CSVLogger, "metrics in a CSV file")
LoggerRegistry.register("mlflow", MLFlowLogger, "a run of MLflow")
LoggerRegistry.register("tensorboard", TensorBoardLogger, "event files for TensorBoard")
LoggerRegistry.register("wandb", WandbLogger, "a run of Weights & Biases")


def created_loggers(argument: str, given: Any, save_dir: str) -> list[Logger]:
    """Return the loggers of an argument that is a logger, a name, or a sequence of them; check each."""
    items = checks.checked_list(argument, given, (Logger, str), "a Logger, a name, or a list of them")
    loggers = [LoggerRegistry.create(item, save_dir) if isinstance(item, str) else item for item in items]
    for each in loggers:
        checks.check_overrides(each, MISSING_HOOKS["logger"])
    return loggers
