"""torchmetrics' metric objects in `self.log`: computed once for an epoch, from all ranks' states."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from typing_extensions import final

from rankwise.errors import ConfigurationError

__all__ = ["LoggedObject", "check_by_epoch", "computed", "is_metric_object"]


def is_metric_object(value: object) -> bool:
    """Return whether a value is a metric of torchmetrics; imports nothing."""
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(value, torchmetrics.Metric)


@final
@dataclass
class LoggedObject:
    """A metric object that was logged, and how it is to be shown."""

    metric: Any
    prog_bar: bool
    logger: bool
    on_step: bool = False
    on_epoch: bool = True

    def state(self) -> Any:
        """Return a copy of the metric that can be sent to other ranks."""
        return self.metric.clone().cpu()

    def reset(self) -> None:
        """Start anew for the next epoch."""
        self.metric.reset()


def check_by_epoch(name: str, on_step: bool | None, on_epoch: bool | None) -> None:
    """Make sure that a metric object is logged by epoch, and only that.

    Raises:
        ConfigurationError: when it is not.
    """
    if on_step or on_epoch is False:
        raise ConfigurationError(
            message=f"log({name!r}) got a metric object, which is computed once for the whole epoch.",
            facts=f"on_step={on_step}, on_epoch={on_epoch}.",
            remedy="leave both out; for each step's value: value = metric(...), then self.log(name, value).",
        )


def computed(copies: Sequence[Any]) -> Tensor:
    """Return the value of a metric over what all ranks have seen, from a copy of each rank's.

    torchmetrics itself reduces the states, as it does for its own `sync`; a rank whose metric has seen
    nothing adds nothing.
    """
    seen = [metric for metric in copies if metric.update_count > 0] or copies[:1]
    states = [_states(metric.clone()) for metric in seen]
    merged = seen[0].clone()
    if len(seen) > 1:
        by_state = iter(zip(*states, strict=True))
        _sync(merged, lambda state, group=None: list(next(by_state)))
    value: Tensor = type(merged).compute(merged)  # not the wrapper, which asks the ranks again
    return value


def _states(metric: Any) -> list[Tensor]:
    """Return a metric's states in the order, and in the form, in which torchmetrics exchanges them."""
    states: list[Tensor] = []

    def note(state: Tensor, group: Any = None) -> list[Tensor]:
        states.append(state)
        return [state]

    _sync(metric, note)
    return states


def _sync(metric: Any, exchange: Any) -> None:
    metric.sync(dist_sync_fn=exchange, distributed_available=lambda: True)
