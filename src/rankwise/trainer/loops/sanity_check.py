"""The sanity check: a few batches of validation before training, whose results are thrown away."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rankwise.seed import get_random_state, set_random_state
from rankwise.trainer.data_loaders import LoaderShard
from rankwise.trainer.loops.evaluation import EvaluationLoop
from rankwise.trainer.state import PublishedMetrics

if TYPE_CHECKING:
    from rankwise.trainer.state import LoopContext


def run_sanity_check(context: LoopContext, shards: list[LoaderShard]) -> None:
    """Validate on the first `num_sanity_val_steps` batches of each loader. Collective.

    Metrics and random state are afterwards what they were before.
    """
    steps = context.options.num_sanity_val_steps
    limit = math.inf if steps == -1 else steps
    limited = [LoaderShard(shard.loader, min(limit, shard.num_batches)) for shard in shards]
    with _checking(context, limited):
        context.hooks.call("on_sanity_check_start")
        EvaluationLoop(context, limited, "validate").run()
        context.hooks.call("on_sanity_check_end")


@contextlib.contextmanager
def _checking(context: LoopContext, limited: list[LoaderShard]) -> Iterator[None]:
    """Make `limited` the loaders of validation in the block, and restore all that the block changes."""
    state, stage, device = context.state, context.stage, context.strategy.root_device
    metrics, num_batches, shards = state.metrics, state.num_batches["validate"], stage.shards["validate"]
    random_state = get_random_state(device)
    stage.is_sanity_check, state.metrics = True, PublishedMetrics()
    state.num_batches["validate"], stage.shards["validate"] = [each.num_batches for each in limited], limited
    try:
        yield
    finally:
        stage.is_sanity_check, state.metrics = False, metrics
        state.num_batches["validate"], stage.shards["validate"] = num_batches, shards
        set_random_state(random_state, device)
