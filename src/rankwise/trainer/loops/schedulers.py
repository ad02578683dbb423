"""When learning rate schedulers step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from rankwise.trainer.loops.context import LoopContext
    from rankwise.trainer.loops.optimizers import SchedulerConfig

__all__ = ["step_schedulers"]


def step_schedulers(context: LoopContext, interval: str, *, needs_metric: bool) -> None:
    """Step the schedulers that are due, either those that read a metric or those that do not.

    In manual optimisation the module steps them.

    Raises:
        ConfigurationError: when a metric that a scheduler reads was not logged.
    """
    if not context.schedulers or not context.module.automatic_optimization:
        return
    progress = context.state.progress
    count = progress.global_step if interval == "step" else progress.current_epoch + 1
    for config in context.schedulers:
        if config.interval != interval or count % config.frequency or config.needs_metric != needs_metric:
            continue
        if not needs_metric:
            config.scheduler.step()
        elif (metric := _agreed_metric(context, config)) is not None:
            config.scheduler.step(metric)


def _agreed_metric(context: LoopContext, config: SchedulerConfig) -> float | None:
    """Return rank 0's value of the metric on every rank, so that learning rates stay equal."""
    metrics = context.state.callback_metrics
    value = metrics.get(config.monitor or "")
    agreed = context.strategy.broadcast(None if value is None else float(value))
    if agreed is None and config.strict:
        raise ConfigurationError(
            message=f"ReduceLROnPlateau monitors {config.monitor!r}, which was not logged.",
            facts=f"logged so far: {sorted(metrics)}.",
            remedy=f'self.log("{config.monitor}", value), or another "monitor".',
        )
    return agreed
