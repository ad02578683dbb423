"""When learning rate schedulers step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from rankwise.trainer.loops.context import LoopContext
    from rankwise.trainer.loops.optimizers import SchedulerConfig

__all__ = ["step_schedulers"]


def step_schedulers(context: LoopContext, interval: str, *, needs_metric: bool) -> None:
    """Step the schedulers whose turn it is, those that look at a metric or those that do not.

    In manual optimisation the module steps them.
    """
    if not context.module.automatic_optimization:
        return
    count = context.progress.global_step if interval == "step" else context.progress.current_epoch + 1
    for config in context.schedulers:
        is_due = config.interval == interval and count % config.frequency == 0
        if not is_due or config.needs_metric != needs_metric:
            continue
        if not config.needs_metric:
            config.scheduler.step()
        elif (metric := _agreed_metric(context, config)) is not None:
            config.scheduler.step(metric)


def _agreed_metric(context: LoopContext, config: SchedulerConfig) -> float | None:
    """Return rank 0's value on every rank, so that learning rates stay the same."""
    value = context.metrics.callback_metrics.get(config.monitor or "")
    agreed = context.strategy.broadcast(None if value is None else float(value))
    if agreed is None and config.strict:
        raise ConfigurationError(
            message=f"ReduceLROnPlateau looks at {config.monitor!r}, which was not logged.",
            facts=f"logged so far: {sorted(context.metrics.callback_metrics)}.",
            remedy=f'self.log("{config.monitor}", value), or another "monitor".',
        )
    return agreed
