"""The training loop: epochs and batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, final

from rankwise.data.sampler import length_of
from rankwise.gradient_sync.parameters import share_buffers, shares_buffers
from rankwise.monitoring.heartbeat import report_phase
from rankwise.ranks import warn
from rankwise.stores.waiting import StoreCounter
from rankwise.strategies.agreement import check_same_order
from rankwise.trainer.consistency import check_unowned, compare_before_epoch, compare_ranks
from rankwise.trainer.data.stage_loaders import PHASE_NAMES, BatchTransfer, must_reload
from rankwise.trainer.hooks import training_outputs
from rankwise.trainer.loops.automatic import AutomaticOptimization
from rankwise.trainer.loops.bucket_order import record_gradient_order
from rankwise.trainer.loops.evaluation import Validation
from rankwise.trainer.loops.manual import ManualOptimization
from rankwise.trainer.loops.schedulers import step_schedulers
from rankwise.trainer.loops.stopping import Stopping
from rankwise.trainer.loops.uneven_inputs import BatchSchedule, no_batch_error
from rankwise.trainer.metrics.results import Results
from rankwise.trainer.state_transfer import RankState, gather_rank_states

if TYPE_CHECKING:
    from rankwise.profilers import Profiler
    from rankwise.trainer.data.loader_shard import TrainData
    from rankwise.trainer.loops.evaluation import EvaluationLoop
    from rankwise.trainer.state import LoopContext


@final
class FitLoop:
    """Train until a limit is reached or a stop is requested.

    `share` has this rank's batches. Training continues from `rank_state`, this rank's part of the checkpoint
    or of the last fit. The loop of `validation` runs in between. `reload` makes the data of a phase.
    """

    def __init__(
        self,
        context: LoopContext,
        share: TrainData,
        validation: EvaluationLoop | None,
        rank_state: RankState | None,
        reload: Mapping[str, Callable[[LoopContext], Any]],
    ) -> None:
        self._context = context
        self._strategy = context.strategy
        self._progress = context.state.progress
        self._settings = context.options
        self._hooks = context.hooks
        self._stage = context.stage
        self._share = share
        policy = context.options.uneven_inputs
        self._schedule = schedule = BatchSchedule(context.strategy, context.module, share, policy)
        self._stage.schedule = schedule
        self._rank_state = rank_state
        self._results = self._new_results()
        is_automatic = context.module.automatic_optimization
        kind = AutomaticOptimization if is_automatic else ManualOptimization
        self._optimization = kind(context, schedule)
        self._stage.manual_optimization = None if is_automatic else self._optimization
        self._stopping = stopping = Stopping(context)
        self._reload = reload["train"]
        self._validation: Validation | None = None
        if context.state.has_validation:
            self._validation = Validation(context, schedule, validation, reload["validate"], stopping)
        self._has_begun = False
        self._num_windows = 0
        self._transfer = BatchTransfer(context)
        self._skip_votes: StoreCounter | None = None
        if context.strategy.world_size > 1 and context.hooks.own("on_train_batch_start") is not None:
            self._skip_votes = StoreCounter(context.strategy.data_parallel_group, context.strategy.timeout)
        self._num_skip_votes = 0

    def profile(self, profiler: Profiler) -> None:
        """Profile epochs, batches, and the time to get each batch."""
        batches = self._remaining_batches
        profiler.instrument(self, _run_epoch="run_training_epoch", _run_batch="run_training_batch")
        self._remaining_batches = lambda: profiler.iterated(  # type: ignore[method-assign]
            "train_dataloader_next", batches()
        )

    def run(self) -> None:
        """Train; exit on every rank when a signal has stopped training. Collective."""
        context, progress = self._context, self._progress
        progress.repeat_window()
        if self._rank_state is not None and progress.is_within_epoch:
            self._results = self._rank_state.results()
        self._stage.epoch_results = self._results
        with context.in_phase("train", self._results), self._stopping:
            _warn_of_evaluation_mode(context)
            self._hooks.call("on_train_start")
            context.warn_if_done()
            if self._strategy.world_size > 2 or self._strategy.gradients.hook is not None:
                record_gradient_order(context)  # sums of two gradients do not depend on buckets
            context.part_streams(context.state.seed)
            while (progress.is_epoch_open or self._stopping.may_continue()) and self._agree_on_num_batches():
                self._run_epoch()
            self._stopping.finish()
            share_buffers(context.wrapped)  # every rank continues with the buffers that rank 0 saves
            self._strategy.sync_models()
            compare_ranks(context, "at the end of fit", with_buffers=shares_buffers(context.wrapped))
            context.state.rank_states = gather_rank_states(context)
            self._hooks.call("on_train_end")
            if isinstance(self._optimization, ManualOptimization):
                self._optimization.end()

    def _new_results(self) -> Results:
        return Results(self._context.module, is_evaluation=False, global_rank=self._strategy.global_rank)

    def _agree_on_num_batches(self) -> float:
        """Return the epoch's number of batches, the same on every rank."""
        if must_reload(self._context, "train"):
            self._share = self._schedule.share = self._reload(self._context)
        self._share.place(self._progress)
        number = self._schedule.agree()
        if not number and self._share.limit:
            length = length_of(self._share.loader)
            if not length:  # the stage has warned of it
                return 0
            raise no_batch_error(f"its length is {length}, and limit_train_batches={self._share.limit!r}.")
        if self._validation is not None and number and not self._has_begun:
            self._validation.check(number)
        self._has_begun = True
        return number

    def _run_epoch(self) -> None:
        progress = self._progress
        if not progress.is_within_epoch:
            progress.begin_epoch()
            self._restore_random()
        if not self._results.is_open:
            self._results = self._new_results()
        self._stage.results = self._stage.epoch_results = self._results
        compare_before_epoch(self._context)
        if not progress.is_epoch_begun:
            self._hooks.call("on_train_epoch_start")  # may change a sampler
            progress.is_epoch_begun = True
        check_same_order(self._strategy, PHASE_NAMES["train"], self._share.loaders)
        if self._strategy.world_size > 1:
            self._strategy.gradients.check_module(self._context.module, self._strategy)
        self._optimization.begin_epoch()
        report_phase("data loading", step=progress.global_step)
        for batch_idx, (batch, is_last) in self._remaining_batches():
            is_window_end = is_last or (batch_idx + 1) % self._settings.accumulate_grad_batches == 0
            if not self._run_batch(batch, batch_idx, is_last, is_window_end):
                break
            if is_window_end and not is_last and not self._stopping.may_continue():
                break
            report_phase("data loading", step=progress.global_step)
        report_phase("end of the epoch")
        if not progress.is_epoch_done:
            self._results.stop()
        self._context.show_so_far(self._results, "on_train_epoch_end")
        self._hooks.call("on_train_epoch_end", before_monitoring=self._end_metrics)
        if self._validation is not None:
            self._validation.warn_if_none()
        end_epoch(self._context)

    def _remaining_batches(self) -> Iterator[tuple[int, tuple[Any, bool]]]:
        """Return the epoch's batches that are left; restore the random state of the checkpoint first."""
        progress = self._progress
        batches = self._share.start(progress)
        self._restore_random()
        is_open = progress.is_within_epoch and not progress.is_epoch_done
        if is_open and self._schedule.num_batches <= progress.batches_done:
            # An earlier run, with another limit or number of ranks, has left no batch of the epoch.
            progress.is_epoch_done = True
            self._step_schedulers("epoch", needs_metric=False)
        if progress.is_within_epoch and not progress.is_validated:
            self._look_for_validation(progress.batches_done - 1, progress.is_epoch_done)
            self._validate_if_due()
        if progress.is_epoch_done or (progress.is_epoch_open and not self._stopping.may_continue()):
            return iter(())
        return enumerate(self._schedule.batches(batches, progress.batches_done), progress.batches_done)

    def _restore_random(self) -> None:
        """Restore the random state of the fit that continues, once."""
        if self._rank_state is not None:
            self._rank_state.restore_random()
            self._rank_state = None

    def _end_metrics(self) -> None:
        values = self._results.epoch_values(self._strategy, is_continued=not self._progress.is_epoch_done)
        self._context.publish(values, values)
        self._progress.is_epoch_closed = True

    def _run_batch(self, batch: Any, batch_idx: int, is_last: bool, is_window_end: bool) -> bool:
        """Train on a batch; return False if a hook has ended the epoch before it instead."""
        before = self._progress.global_step
        self._stage.is_last_batch = is_last
        batch = self._transfer(batch)
        is_padding = self._schedule.is_padding
        size = 0 if is_padding else self._share.take_size()
        if size is None:
            self._optimization.weighting.check_unknown_size(batch_idx)
        self._results.begin_batch(size, is_muted=is_padding)
        if self._must_skip(self._hooks.call("on_train_batch_start", batch, batch_idx)):
            self._skip_rest()
            return False
        returned = self._optimization.run_batch(batch, batch_idx, is_window_end)
        outputs = {}
        if self._hooks.is_defined("on_train_batch_end"):
            outputs = training_outputs(returned, self._settings.accumulate_grad_batches)
        self._progress.end_batch(is_last, self._share.samples_per_batch, is_window_end)
        if is_window_end and self._optimization.has_stepped:
            self._step_schedulers("step", needs_metric=False)
        if is_last:
            self._step_schedulers("epoch", needs_metric=False)
        if is_window_end:
            self._look_for_validation(batch_idx, is_last)
        publish = self._publish_step if is_window_end else None
        if self._hooks.is_before_metrics("on_train_batch_end"):
            self._context.publish(self._results.own_step_values(self._strategy))
        self._hooks.call("on_train_batch_end", outputs, batch, batch_idx, before_monitoring=publish)
        self._results.end_batch()
        if is_window_end:
            self._compare_ranks(before)
            self._validate_if_due()
        return True

    def _look_for_validation(self, batch_idx: int, is_last: bool) -> None:
        """Note whether a validation follows this batch: hooks may read it."""
        validation = self._validation
        self._stage.is_validation_due = validation is not None and validation.is_due(batch_idx, is_last)

    def _validate_if_due(self) -> None:
        if self._validation is not None and self._stage.is_validation_due:
            self._validation.run()
            self._stage.is_validation_due = False

    def _step_schedulers(self, interval: str, *, needs_metric: bool) -> None:
        if self._context.schedulers:
            step_schedulers(self._context, interval, needs_metric=needs_metric)

    def _compare_ranks(self, steps_before: int) -> None:
        """Compare the ranks' values at the set interval, and sometimes parameters without an optimizer."""
        interval, step = self._settings.check_ranks_every_n_steps, self._progress.global_step
        if interval and step // interval > steps_before // interval:
            compare_ranks(self._context, f"after step {step}")
        self._num_windows += 1
        if self._num_windows.bit_count() == 1:  # 1, 2, 4, 8, ...
            check_unowned(self._context)

    def _must_skip(self, returned: object) -> bool:
        """Return whether `on_train_batch_start` has returned -1 on any rank.

        The ranks vote in the store, without a collective operation. All ranks must call this if the module
        defines the hook.
        """
        is_for = isinstance(returned, int) and returned == -1
        if self._skip_votes is None:
            return is_for
        self._num_skip_votes += 1
        report_phase("agreement on the epoch's end", waits=True)
        return self._skip_votes.count(self._num_skip_votes, is_for=is_for) > 0

    def _skip_rest(self) -> None:
        """End the epoch as if it had no further batch, without validation."""
        self._results.end_batch()
        self._progress.skip_rest()
        self._step_schedulers("step", needs_metric=False)  # as in Lightning
        self._step_schedulers("epoch", needs_metric=False)

    def _publish_step(self) -> None:
        is_logged = self._progress.counted_steps % self._settings.log_every_n_steps == 0
        values = self._results.step_values(self._strategy, is_checked=is_logged)
        if values or is_logged:
            self._context.publish(values, self._results.latest_steps.values() if is_logged else ())
        if self._optimization.has_stepped:
            self._step_schedulers("step", needs_metric=True)


def end_epoch(context: LoopContext) -> None:
    """Step the schedulers that read a metric of the epoch, and begin the next; a stopped epoch stays open.

    As in Lightning, this follows the hooks of the epoch's end. A run that resumes from a checkpoint which was
    saved in them does it first.
    """
    if context.state.progress.is_epoch_done and context.schedulers:
        step_schedulers(context, "epoch", needs_metric=True)
    context.state.progress.end_epoch()


def _warn_of_evaluation_mode(context: LoopContext) -> None:
    """Warn on rank 0 of modules in evaluation mode, which training keeps as they are."""
    names = [name or "the module" for name, module in context.module.named_modules() if not module.training]
    if names and context.strategy.is_global_zero:
        warn(
            f"Training begins with modules in evaluation mode, which it does not change ({len(names)}): "
            f"{names[0]}{', ...' if len(names) > 1 else ''}. Call train() on those that should be trained.",
        )
