"""The sanity check: a few batches of validation before training, whose results are thrown away."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rankwise.seed import get_random_state, set_random_state
from rankwise.trainer.data_loaders import LoaderShard
from rankwise.trainer.loops.evaluation import EvaluationLoop
from rankwise.trainer.metrics.metric_objects import metric_objects, set_states, states_of
from rankwise.trainer.state import PublishedMetrics, RunningStage

if TYPE_CHECKING:
    from rankwise.trainer.state import LoopContext


def run_sanity_check(
    context: LoopContext, make_validation: Callable[[], EvaluationLoop | None]
) -> EvaluationLoop | None:
    """Validate on the first `num_sanity_val_steps` batches of each loader; return the loop. Collective.

    Metrics and random state are afterwards what they were before. `make_validation` asks for the loaders.
    """
    with _checking(context):
        context.hooks.call("on_sanity_check_start")
        validation = make_validation()
        with _limited(context, validation) as shards:
            if validation is not None:
                EvaluationLoop(context, shards, "validate").run()
            context.hooks.call("on_sanity_check_end")
    return validation


@contextlib.contextmanager
def _checking(context: LoopContext) -> Iterator[None]:
    """Restore the metrics, metric objects, the stage and the random state after the block."""
    state, stage, device = context.state, context.stage, context.strategy.root_device
    objects = metric_objects(context.module)
    object_states = states_of(objects)
    metrics, running, random_state = state.metrics, state.stage, get_random_state(device)
    stage.is_sanity_check, state.metrics = True, PublishedMetrics()
    state.stage = RunningStage.SANITY_CHECKING
    try:
        yield
    finally:
        stage.is_sanity_check, state.metrics, state.stage = False, metrics, running
        set_states(objects, object_states)
        set_random_state(random_state, device)


@contextlib.contextmanager
def _limited(context: LoopContext, validation: EvaluationLoop | None) -> Iterator[list[LoaderShard]]:
    """Limit the loaders of validation to the batches of the check, in the block."""
    if validation is None:
        yield []
        return
    state, stage, steps = context.state, context.stage, context.options.num_sanity_val_steps
    num_batches, shards = state.num_batches["validate"], stage.shards["validate"]
    limit = math.inf if steps == -1 else steps
    limited = [LoaderShard(shard.loader, min(limit, shard.num_batches)) for shard in validation.shares]
    state.num_batches["validate"], stage.shards["validate"] = [each.num_batches for each in limited], limited
    try:
        yield limited
    finally:
        state.num_batches["validate"], stage.shards["validate"] = num_batches, shards
