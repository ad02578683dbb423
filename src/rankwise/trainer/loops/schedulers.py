"""When learning rate schedulers step in automatic optimisation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rankwise.errors import ConfigurationError
from rankwise.trainer.loops.optimizers import shared_numbers

if TYPE_CHECKING:
    from rankwise.trainer.loops.optimizers import SchedulerConfig
    from rankwise.trainer.state import LoopContext


def step_schedulers(context: LoopContext, interval: str, *, needs_metric: bool) -> None:
    """Step the schedulers that are due, either those that read a metric or those that do not.

    In manual optimisation the module steps them.
    """
    if not context.module.automatic_optimization:
        return
    progress = context.state.progress
    count = progress.batches_done if interval == "step" else progress.current_epoch + 1
    for config in context.schedulers:
        if config.interval != interval or count % config.frequency or config.needs_metric != needs_metric:
            continue
        metric = _agreed_metric(context, config) if needs_metric else None
        if needs_metric and metric is None:
            continue
        value = None if metric is None else torch.tensor(metric, dtype=torch.double)  # as in Lightning
        step = context.hooks.own("lr_scheduler_step") or context.module.lr_scheduler_step
        with shared_numbers(context.stage.random, config.scheduler, "lr_scheduler_step"):
            step(config.scheduler, value)


def _agreed_metric(context: LoopContext, config: SchedulerConfig) -> float | None:
    """Return rank 0's value of the metric on every rank, so that learning rates stay equal."""
    metrics = context.state.metrics.callback
    value = metrics.get(config.monitor or "")
    agreed = context.strategy.broadcast(None if value is None else float(value))
    if agreed is None and config.strict:
        raise ConfigurationError(
            message=f"{type(config.scheduler).__name__} monitors {config.monitor!r}, which was not logged.",
            facts=f"logged so far: {sorted(metrics)}.",
            remedy=f'self.log("{config.monitor}", value), another "monitor", or "strict": False to skip it.',
        )
    return agreed
