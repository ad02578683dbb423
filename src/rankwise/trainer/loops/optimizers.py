"""What `configure_optimizers` may return, put into one form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from rankwise.errors import ConfigurationError, InvalidArgumentError, InvalidTypeError, UnknownArgumentError

if TYPE_CHECKING:
    from rankwise.trainer.module import TrainingModule

__all__ = ["SchedulerConfig", "configure"]

_METHOD = "configure_optimizers()"
_KEYS = ("scheduler", "interval", "frequency", "monitor", "name", "strict")


@final
@dataclass
class SchedulerConfig:
    """A learning rate scheduler and when it steps: after every `frequency`-th `interval`.

    Attributes:
        scheduler: torch's.
        interval: `"epoch"` or `"step"`.
        frequency: after how many of them.
        monitor: the metric that `ReduceLROnPlateau` looks at.
        name: what it is called.
        strict: whether a metric that was not logged is an error.
    """

    scheduler: Any
    interval: str = "epoch"
    frequency: int = 1
    monitor: str | None = None
    name: str | None = None
    strict: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.scheduler, (LRScheduler, ReduceLROnPlateau)):
            raise InvalidTypeError(
                argument=f"lr_scheduler in {_METHOD}",
                value=self.scheduler,
                expected="a torch LRScheduler",
            )
        if self.interval not in ("epoch", "step"):
            raise InvalidArgumentError(argument="interval", value=self.interval, expected="'epoch' or 'step'")
        if self.frequency < 1:
            raise InvalidArgumentError(argument="frequency", value=self.frequency, expected="1 or more")
        if self.needs_metric and self.monitor is None:
            raise ConfigurationError(
                message="ReduceLROnPlateau needs a metric to look at.",
                remedy='return {"optimizer": ..., "lr_scheduler": scheduler, "monitor": "val_loss"}.',
            )

    @property
    def needs_metric(self) -> bool:
        """Whether its `step` takes the monitored metric."""
        return isinstance(self.scheduler, ReduceLROnPlateau)


def configure(module: TrainingModule) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    """Call `configure_optimizers` and return what it means.

    Raises:
        InvalidTypeError: when it returned something else than it may.
        ConfigurationError: when it returned more than one optimizer, with automatic optimisation.
    """
    optimizers, schedulers = _split(module.configure_optimizers())
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise InvalidTypeError(
                argument=_METHOD,
                value=optimizer,
                expected="an optimizer, [optimizer], ([optimizer], [scheduler]) or a dictionary",
            )
    if len(optimizers) > 1 and module.automatic_optimization:
        raise ConfigurationError(
            message=f"{_METHOD} returned {len(optimizers)} optimizers.",
            facts="automatic optimisation steps exactly one.",
            remedy="give one optimizer several parameter groups, or step by hand: "
            "self.automatic_optimization = False, and self.optimizers() in training_step.",
        )
    return optimizers, [_scheduler_config(scheduler) for scheduler in schedulers]


def _split(returned: Any) -> tuple[list[Any], list[Any]]:
    match returned:
        case None:
            return [], []
        case Mapping():
            if unknown := set(returned) - {"optimizer", "lr_scheduler", "monitor"}:
                raise UnknownArgumentError(
                    target=f"the dictionary of {_METHOD}",
                    name=str(unknown.pop()),
                    known=("optimizer", "lr_scheduler", "monitor"),
                )
            scheduler = returned.get("lr_scheduler")
            if "monitor" in returned and not isinstance(scheduler, Mapping):
                scheduler = {"scheduler": scheduler, "monitor": returned["monitor"]}
            return [returned.get("optimizer")], [] if scheduler is None else [scheduler]
        case [[*optimizers], [*schedulers]] | [[*optimizers], Mapping() as schedulers]:
            return optimizers, [schedulers] if isinstance(schedulers, Mapping) else schedulers
        case [*optimizers]:
            return optimizers, []
        case _:
            return [returned], []


def _scheduler_config(given: Any) -> SchedulerConfig:
    if not isinstance(given, Mapping):
        return SchedulerConfig(given)
    for key in given:
        if key not in _KEYS:
            raise UnknownArgumentError(target=f"lr_scheduler in {_METHOD}", name=str(key), known=_KEYS)
    return SchedulerConfig(**{"scheduler": None, **given})
