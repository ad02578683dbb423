"""The validation of a fit: before training, as a sanity check, and when it falls due."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, final

from rankwise.errors import ConfigurationError
from rankwise.gradient_sync.parameters import share_buffers
from rankwise.ranks import warn
from rankwise.seed import get_random_state, isolated_random_state, mixed_seed, set_random_state
from rankwise.trainer.data.loader_shard import LoaderShard, must_reload
from rankwise.trainer.loops.evaluation import EvaluationLoop
from rankwise.trainer.loops.stopping import EvaluationStopped
from rankwise.trainer.metrics.metric_objects import metric_objects, set_states, states_of
from rankwise.trainer.state import PublishedMetrics, RunningStage
from rankwise.trainer.state_transfer import changing_state

if TYPE_CHECKING:
    from rankwise.trainer.loops.stopping import Stopping
    from rankwise.trainer.loops.uneven_inputs import BatchSchedule
    from rankwise.trainer.state import LoopContext

MakeValidation = Callable[["LoopContext"], EvaluationLoop | None]


@final
class Validation:
    """Validate within a fit when that is due: after so many batches or so much time, at the epoch's end.

    Args:
        context: of the fit.
        schedule: the training batches.
        loop: validates; None where the loaders are asked for only when the first validation falls due.
        make_loop: asks for the loaders, and returns a new loop.
        stopping: stops a fit within a validation, too.
    """

    def __init__(
        self,
        context: LoopContext,
        schedule: BatchSchedule,
        loop: EvaluationLoop | None,
        make_loop: MakeValidation,
        stopping: Stopping,
    ) -> None:
        self._context = context
        self._strategy = context.strategy
        self._progress = context.state.progress
        self._options = context.options
        self._schedule = schedule
        self._loop = loop
        self._make_loop = make_loop
        self._stopping = stopping
        self._ended_at = time.monotonic()  # at first when training began

    def check(self, num_batches: float) -> None:
        """Raise for an interval that does not fit an epoch of so many batches; warn if none is validated."""
        if self._options.check_val_every_n_epoch is not None:
            _check_interval(self._options.val_check_interval, num_batches)
        _warn_if_never(self._context)

    def is_due(self, batch_idx: int, is_last: bool) -> bool:
        """Return whether a validation fell due in the window that this batch ends.

        Within a window the weights do not change, and a checkpoint that validation triggers could not be
        continued from there.
        """
        context, options, progress = self._context, self._options, self._progress
        if not (context.state.has_validation and context.has_validation_in_epoch):
            return False
        if isinstance(options.val_check_interval, timedelta):
            return self._has_passed(options.val_check_interval)
        interval = self._interval(options.val_check_interval)
        is_per_epoch = options.check_val_every_n_epoch is not None
        before = 0 if is_per_epoch else progress.total_batches - progress.batches_done
        first = before + batch_idx - batch_idx % options.accumulate_grad_batches
        return is_last if math.isinf(interval) else (before + batch_idx + 1) // interval > first // interval

    def _has_passed(self, interval: timedelta) -> bool:
        """Return whether `interval` has passed on rank 0 since the last validation. Collective."""
        elapsed = time.monotonic() - self._ended_at
        return self._strategy.broadcast(elapsed >= interval.total_seconds())

    def _interval(self, interval: float) -> float:
        """Return the number of batches between validations; `inf` for one at the end of the epoch."""
        if isinstance(interval, int):
            return interval
        if interval == 1.0 or math.isinf(self._schedule.num_batches):
            return math.inf
        return max(1, int(self._schedule.num_batches * interval))

    def run(self) -> None:
        """Validate. Collective."""
        self._strategy.gradients.average_models()  # validate one model
        share_buffers(self._context.wrapped)  # validate the buffers that rank 0 saves
        self._context.hooks.call("on_validation_model_zero_grad")
        if self._loop is None or must_reload(self._context, "validate"):
            self._load()
        if self._loop is not None:
            self._context.stage.before_validation = changing_state(self._context)
            try:
                self._loop.run(self._stopping)
            except EvaluationStopped:
                self._stopping.stop()
            self._context.stage.before_validation = None
            self._ended_at = time.monotonic()

    def _load(self) -> None:
        """Reload the loaders of validation without changing the random numbers of training."""
        state = self._context.state
        with isolated_random_state(mixed_seed(state.seed, 0)):
            self._loop = self._make_loop(self._context) or self._loop
        state.has_validation = self._loop is not None

    def warn_if_none(self) -> None:
        """Warn of an epoch, of unknown length until now, in which no validation fell due."""
        if self._progress.is_epoch_done and math.isinf(self._schedule.num_batches):
            _warn_of_none(self._context)


def run_sanity_check(
    context: LoopContext, make_validation: Callable[[], EvaluationLoop | None]
) -> EvaluationLoop | None:
    """Validate on the first `num_sanity_val_steps` batches of each loader; return the loop. Collective.

    Metrics and random state are restored afterwards. `make_validation` asks for the loaders.
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


def _check_interval(interval: float | timedelta, num_batches: float) -> None:
    """Raise ConfigurationError unless an epoch's first validation falls due; for a time it may not."""
    if isinstance(interval, timedelta):
        return
    if isinstance(interval, int):
        is_possible, instead = interval <= num_batches, "fewer batches"
    else:
        is_possible, instead = interval == 1.0 or not math.isinf(num_batches), "a number of batches (int)"
    if not is_possible:
        how_many = "an unknown number of" if math.isinf(num_batches) else int(num_batches)
        raise ConfigurationError(
            message=f"val_check_interval={interval} does not fit an epoch of {how_many} batches.",
            remedy=f"{instead}, or 1.0 for the end of the epoch; for no validation limit_val_batches=0.",
        )


def _warn_if_never(context: LoopContext) -> None:
    """Warn on rank 0 if no epoch will be validated; a later fit, with a higher limit, may reach one."""
    interval, limit = context.options.check_val_every_n_epoch, context.options.epoch_limit
    if interval is not None and 0 <= limit < interval and context.strategy.is_global_zero:
        warn(
            f"Validation never runs: check_val_every_n_epoch={interval} is more than max_epochs={limit}. "
            "Choose fewer epochs; for no validation limit_val_batches=0.",
        )


def _warn_of_none(context: LoopContext) -> None:
    """Warn on rank 0 of an epoch, of unknown length until now, in which no validation fell due."""
    interval, batches = context.options.val_check_interval, context.state.progress.batches_done
    is_per_epoch = context.options.check_val_every_n_epoch is not None
    is_late = is_per_epoch and isinstance(interval, int) and batches < interval
    if is_late and context.strategy.is_global_zero:
        warn(
            f"An epoch has ended without validation: it had {batches} batches, and val_check_interval="
            f"{interval}. Choose fewer, or 1.0 for the end of each epoch.",
        )
