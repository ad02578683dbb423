"""`Logger`, the base class of loggers; `rank_zero_experiment`."""

from __future__ import annotations

import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, final

from rankwise import ranks
from rankwise.errors import text_of

if TYPE_CHECKING:
    from torch import nn

    from rankwise.loggers.values import HyperParameters

_log = logging.getLogger(__name__)
T = TypeVar("T")


class Logger(ABC):
    """Base class of loggers, which record metrics.

    The Trainer calls a logger on global rank 0 only. Its `state_dict` is loaded on the other ranks and in the
    calling process, so that version and folder are equal everywhere. A module may call a logger on every
    rank: decorate methods that write with `rank_zero_only`, and `experiment` with `rank_zero_experiment`.
    """

    @property
    def experiment(self) -> Any:
        """The object of the library that records the run; None for a logger that has none."""
        return None

    @property
    def name(self) -> str | None:
        """The name of the runs that belong together."""
        return None

    @property
    def version(self) -> int | str | None:
        """The number or name of this run."""
        return None

    @property
    def save_dir(self) -> str | None:
        """The parent folder of all runs, or None if the logger writes no files."""
        return None

    @property
    def log_dir(self) -> str | None:
        """The folder of this run, or None if the logger writes no files."""
        return None

    @property
    def log_dirs(self) -> list[str]:
        """The folders of this run and, if each run has a folder of its own, of earlier runs."""
        return [] if self.log_dir is None else [self.log_dir]

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Record metrics of the optimizer step `step`."""

    def log_hyperparams(self, params: HyperParameters, *args: Any, **kwargs: Any) -> None:
        """Record the hyper parameters of a run, a mapping or an `argparse.Namespace`."""

    def log_graph(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Record the graph of a module; called when `fit` begins."""

    def save(self) -> None:
        """Write buffered metrics."""

    def finalize(self, status: str) -> None:
        """End a stage; `status` is `"success"` or `"failed"`. Write buffered values."""
        self.save()

    def state_dict(self) -> dict[str, Any]:
        """Return what other processes need, such as the version."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned in another process."""


@final
class NoExperiment:
    """Stands for an experiment on the ranks that do not write: each attribute and result is this object."""

    def __getattr__(self, name: str) -> NoExperiment:
        if name.startswith("__"):
            raise AttributeError(name)  # protocols, such as copying, must not take it for something else
        return self

    def _itself(self, *args: Any, **kwargs: Any) -> NoExperiment:
        return self

    __call__ = __getitem__ = __enter__ = _itself

    def __setattr__(self, name: Any, value: object) -> None:
        """Set nothing."""

    __setitem__ = __setattr__

    def __exit__(self, *exception: object) -> None:
        """End nothing."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


@final
class NoLogger(Logger):
    """Stands for the loggers of a trainer in a fit that is not to be logged: its methods do nothing."""

    @property
    def experiment(self) -> NoExperiment:
        """An object whose methods do nothing."""
        return NoExperiment()

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log nothing."""

    def __getattr__(self, name: str) -> Any:
        return getattr(NoExperiment(), name)  # also for methods that only some loggers have


def rank_zero_experiment(experiment: Callable[[Any], T]) -> Callable[[Any], T | NoExperiment]:
    """Make a logger's `experiment` return the real object on global rank 0 only.

    On the other ranks it returns an object whose methods do nothing and return that object.

    Example:
        >>> from rankwise import rank_zero_only
        >>>
        >>> class MyLogger(Logger):
        ...     @property
        ...     @rank_zero_experiment
        ...     def experiment(self) -> Any:
        ...         return open("metrics.txt", "a")
        ...
        ...     @rank_zero_only
        ...     def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        ...         self.experiment.write(f"{step} {dict(metrics)}")
    """

    @functools.wraps(experiment)
    def on_rank_zero(self: Any) -> T | NoExperiment:
        rank: int = getattr(ranks.rank_zero_only, "rank", 0)
        return experiment(self) if rank == 0 else NoExperiment()

    return on_rank_zero


def finalize_all(loggers: Iterable[Logger], status: str) -> None:
    """Finalize each logger once, also after one of them has failed.

    After a failure of the stage an error of a logger is only reported: the stage's own is raised.

    Raises:
        Exception: the first logger's that a `"success"` could not be told to.
    """
    errors = []
    for logger in {id(logger): logger for logger in loggers}.values():
        try:
            logger.finalize(status)
        except Exception as error:  # noqa: BLE001  whatever a library, or the user's logger, raises
            errors.append(error)
    reported = errors[1:] if status == "success" else errors
    for each in reported:
        _log.warning("A logger could not be finalized: %s", text_of(each))
    if status == "success" and errors:
        raise errors[0]
