"""Validation, test and prediction: every sample once, on any number of ranks; and when a fit validates."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from itertools import count, takewhile, zip_longest
from typing import TYPE_CHECKING, Any, Literal, TypeVar, final

import torch
from torch import Tensor, nn

from rankwise.data.batches import batch_sizes
from rankwise.errors import ConfigurationError
from rankwise.gradient_sync.parameters import share_buffers
from rankwise.monitoring.heartbeat import report_phase
from rankwise.nested import to_device
from rankwise.process_group.collectives import ranks_of
from rankwise.process_group.interception import Call, own_calls_intercepted
from rankwise.ranks import warn
from rankwise.seed import isolated_random_state, mixed_seed, random_state_kept
from rankwise.strategies.agreement import check_same_order
from rankwise.trainer.data.loader_shard import LoaderShard, limited
from rankwise.trainer.data.stage_loaders import PHASE_NAMES, BatchTransfer, must_reload
from rankwise.trainer.hooks import num_step_arguments
from rankwise.trainer.loops.stopping import EvaluationStopped
from rankwise.trainer.metrics.metric_objects import empty_lists_refused, metric_objects, states_kept
from rankwise.trainer.metrics.results import Results, StepOfEvaluation
from rankwise.trainer.state import PublishedMetrics, RunningStage
from rankwise.trainer.state_transfer import changing_state

if TYPE_CHECKING:
    from rankwise.strategies import Strategy
    from rankwise.trainer.loops.stopping import Stopping
    from rankwise.trainer.loops.uneven_inputs import BatchSchedule
    from rankwise.trainer.state import LoopContext

Gather = Literal["all", "rank_zero"] | None
EvaluationName = Literal["validate", "test", "predict"]
GATHERINGS: tuple[Gather, ...] = ("all", "rank_zero", None)

T = TypeVar("T")
_NOTHING: Any = object()


@contextmanager
def _modes_kept(module: nn.Module) -> Iterator[ExitStack]:
    """Restore each submodule's mode after the block, unless the block takes that from the stack."""
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    with ExitStack() as stack:
        for submodule, is_training in modes:
            stack.callback(setattr, submodule, "training", is_training)
        yield stack


def _leave_inference_mode(module: nn.Module) -> None:
    """Replace the tensors that a module got in inference mode, as it cannot update them outside of it.

    Metric objects are reset there, for example.
    """
    copies: dict[int, Tensor] = {}  # modules may share a tensor
    for submodule in module.modules():
        for held in (vars(submodule), submodule._buffers):
            for name, value in list(held.items()):
                if isinstance(value, Tensor) and value.is_inference():
                    held[name] = copies.setdefault(id(value), value.clone())


@final
class EvaluationLoop:
    """Run the module without its wrapper, since ranks may have different numbers of batches.

    The ranks communicate once, at the end, to reduce the metrics or to gather the predictions.
    """

    def __init__(self, context: LoopContext, shares: list[LoaderShard], stage: EvaluationName) -> None:
        self.shares = shares
        self._context = context
        self._stage = stage
        self._name = "validation" if stage == "validate" else stage  # in the names of methods
        self._share_in_step: LoaderShard | None = None
        context.profiler.instrument(self, _run_batch=f"run_{self._name}_batch")

    def run(self, stopping: Stopping | None = None) -> list[dict[str, float]]:
        """Evaluate; return the metrics of each loader, the same on every rank.

        Within a fit, `stopping` is the fit's, and raises `EvaluationStopped` for a signal. Collective.
        """
        context, results = self._context, self._new_results()
        with self._running(results):
            batches = self._batches(results)
            for dataloader_idx, batch_idx, batch in stopping.evaluated(batches) if stopping else batches:
                self._run_batch(results, batch, batch_idx, dataloader_idx)
            results.end_loaders()
            context.show_so_far(results, f"on_{self._name}_epoch_end")
            with self._empty_metrics_refused():
                self._hook("epoch_end")
            values = results.epoch_values(context.strategy)
            if not context.stage.is_sanity_check:
                self._publish_steps(results.steps)
            context.publish(values, () if context.stage.is_sanity_check else values)
            if stopping is not None:
                context.state.progress.is_validated = True
        return [
            {value.name: value.value.item() for value in values if value.loader in (None, loader)}
            for loader in range(len(self.shares))
        ]

    def predict(self, gather: Gather) -> list[Any]:
        """Predict this rank's batches; return the outputs, batch by batch, in dataset order.

        Collective: every rank must call this. The ranks of `gather` get all ranks' outputs; with several
        loaders, a list for each.
        """
        results, strategy = self._new_results(), self._context.strategy
        own: list[list[Any]] = [[] for _ in self.shares]
        with self._running(None):
            for dataloader_idx, batch_idx, batch in self._batches(results):
                output = self._run_batch(results, batch, batch_idx, dataloader_idx)
                output = strategy.precision.convert_output(output)
                own[dataloader_idx].append(to_device(output, "cpu"))
            by_rank = _gathered(strategy, own, gather)
            predictions = [interleaved(list(lists)) for lists in zip(*by_rank, strict=True)]
            self._hook("epoch_end")
        outputs = [output for of_loader in own for output in of_loader]
        if outputs and strategy.is_global_zero and all(output is None for output in outputs):
            warn(f"{type(self._context.module).__name__}.predict_step() returned None for every batch.")
        return predictions[0] if len(predictions) == 1 else predictions

    def predict_only(self) -> list[Any]:
        """Predict this rank's batches and keep no outputs; return []."""
        results = self._new_results()
        with self._running(None):
            for dataloader_idx, batch_idx, batch in self._batches(results):
                self._run_batch(results, batch, batch_idx, dataloader_idx)
            self._hook("epoch_end")
        return []

    @contextmanager
    def _running(self, results: Results | None) -> Iterator[None]:
        context, module, name = self._context, self._context.module, self._name
        has_others = context.strategy.world_size > 1
        with context.in_phase(self._stage, results), self._without_gradients(), _modes_kept(module) as kept:
            getattr(module, f"on_{name}_model_eval")()
            self._hook("start")
            self._hook("epoch_start")
            with own_calls_intercepted(self._check_collective) if has_others else nullcontext():
                yield
            self._hook("end")
            if name != "predict" and (set_mode := context.hooks.own(f"on_{name}_model_train")) is not None:
                kept.pop_all()
                set_mode()

    @contextmanager
    def _without_gradients(self) -> Iterator[None]:
        """Use torch's inference mode, or within a fit `no_grad`: training may use what a step keeps."""
        context = self._context
        is_inference = context.options.inference_mode and context.stage.name != "fit"
        try:
            with torch.inference_mode() if is_inference else torch.no_grad():
                yield
        finally:
            _leave_inference_mode(context.module)

    def _batches(self, results: Results) -> Iterator[tuple[int, int, Any]]:
        """Yield the number of the loader, the number of the batch in it, and the batch."""
        for share in self.shares if self._stage != "predict" else []:  # which keeps the order of the data set
            share.set_epoch(self._context.state.progress.current_epoch)
        loaders = [share.loader for share in self.shares]
        check_same_order(self._context.strategy, PHASE_NAMES[self._stage], loaders)
        for dataloader_idx, share in enumerate(self.shares):
            suffix = f"/dataloader_idx_{dataloader_idx}" if len(self.shares) > 1 else ""
            results.begin_loader(dataloader_idx, suffix)
            batches = self._context.profiler.iterated(f"{self._name}_dataloader_next", share)
            for batch_idx, batch in enumerate(batches):
                yield dataloader_idx, batch_idx, batch

    def _run_batch(self, results: Results, batch: Any, batch_idx: int, dataloader_idx: int) -> Any:
        """Run the module's step on a batch, and the hooks around it; return the outputs."""
        context, name, share = self._context, self._name, self.shares[dataloader_idx]
        indices = batch_idx, dataloader_idx
        report_phase(PHASE_NAMES[self._stage])
        self._share_in_step = share
        batch = self._transfer(batch, dataloader_idx)
        results.begin_batch(share.take_size())
        context.hooks.call(f"on_{name}_batch_start", batch, *indices)
        with context.strategy.precision.forward_context():
            outputs = self._step(batch, *indices)
        context.hooks.call(f"on_{name}_batch_end", outputs, batch, *indices)
        results.end_batch()
        self._share_in_step = None
        return outputs

    def _check_collective(self, call: Call) -> None:
        """Refuse a collective in a step if ranks have different numbers of batches.

        Some would never call it.
        """
        share, replicas = self._share_in_step, ranks_of(self._context.strategy.data_parallel_group)
        is_of_replicas = len({*replicas} & {*ranks_of(call.group)}) > 1  # others have the same data
        numbers = self._numbers_of_batches(share) if share is not None and is_of_replicas else []
        if len(set(numbers)) > 1:
            raise ConfigurationError(
                message=f"{call.name} in {self._name}_step, which the ranks do not call equally often.",
                facts=f"{call.where}; the ranks have {numbers} batches, as each sample is evaluated once.",
                remedy=f"collect in the step, and call it in on_{self._name}_epoch_end; or self.log(...), "
                "which reduces over all ranks; or evaluate data that the ranks divide evenly.",
            )

    def _numbers_of_batches(self, share: LoaderShard) -> list[int]:
        """Return each rank's number of batches; [] if it is not known."""
        sizes = batch_sizes(share.loader)
        if sizes is None:
            return []
        options, limit = self._context.options, self._context.options.limit(self._stage)
        numbers: list[float] = [
            sum(1 for _ in takewhile(partial(sizes.size_of, rank), count()))
            for rank in range(sizes.num_replicas)
        ]
        if self._stage == "predict":  # the limit is one of all ranks' batches
            whole = int(limited(sum(numbers), limit))
            return [len(range(rank, whole, sizes.num_replicas)) for rank in range(sizes.num_replicas)]
        most = options.num_sanity_val_steps if self._context.stage.is_sanity_check else -1
        return [int(min(limited(number, limit), number if most < 0 else most)) for number in numbers]

    def _hook(self, moment: str) -> None:
        self._context.hooks.call(f"on_{self._name}_{moment}")

    def _empty_metrics_refused(self) -> AbstractContextManager[None]:
        """Return the block of the last hook, in which a rank without batches cannot compute all metrics."""
        if self._context.strategy.world_size == 1 or any(share.num_batches for share in self.shares):
            return nullcontext()
        remedy = "self.log(name, metric), which needs no batch on each rank; or more samples than ranks."
        return empty_lists_refused(metric_objects(self._context.module), remedy)

    @cached_property
    def _transfer(self) -> BatchTransfer:
        return BatchTransfer(self._context)

    @cached_property
    def _step(self) -> Callable[..., Any]:
        """The module's step, which may take fewer arguments."""
        module, name = self._context.module, f"{self._name}_step"
        step = self._context.profiler.profiled(name, getattr(module, name))
        count = num_step_arguments(module, name, len(self.shares))
        return lambda *arguments: step(*arguments[:count])

    def _new_results(self) -> Results:
        rank = self._context.strategy.global_rank
        return Results(self._context.module, is_evaluation=True, global_rank=rank)

    def _publish_steps(self, steps: list[StepOfEvaluation]) -> None:
        """Give loggers each batch's values by step, numbered over all evaluations of this kind."""
        context = self._context
        counts = context.state.evaluated_batches.setdefault(f"{context.stage.name} {self._stage}", {})
        before = dict(counts)
        for step in steps:
            number = before.get(step.dataloader_idx, 0) + step.batch_idx
            context.log({value.name: value.value for value in step.values if value.logger}, number)
            counts[step.dataloader_idx] = number + 1


def _gathered(strategy: Strategy, own: list[list[Any]], gather: Gather) -> list[list[list[Any]]]:
    """Return the outputs of all ranks, or of those that this rank gets."""
    if gather is None:
        return [own]
    if gather == "all" or strategy.data_parallel_group is not None:
        return strategy.all_gather_object(own)
    return strategy.gather_object(own) or [[[] for _ in own]]


def interleaved(lists: list[list[T]]) -> list[T]:
    """Return item i of the whole from list i % n: the inverse of splitting by batches.

    >>> interleaved([[0, 3, 6], [1, 4], [2, 5]])
    [0, 1, 2, 3, 4, 5, 6]
    """
    return [item for row in zip_longest(*lists, fillvalue=_NOTHING) for item in row if item is not _NOTHING]


# ------------------------------------------------------------------ the validation of a fit


@final
@dataclass
class Validation:
    """Validate within a fit when that is due: after so many batches or so much time, at the epoch's end.

    `loop` is None where the loaders are asked for only when the first validation falls due; `make_loop` asks
    for them.
    """

    context: LoopContext
    schedule: BatchSchedule
    loop: EvaluationLoop | None
    make_loop: Callable[[LoopContext], EvaluationLoop | None]
    stopping: Stopping

    def __post_init__(self) -> None:
        self.ended_at = time.monotonic()  # of the last validation; at first when training began

    def check(self, num_batches: float) -> None:
        """Raise for an interval that does not fit an epoch of so many batches; warn if none is validated."""
        options, every = self.context.options, self.context.options.check_val_every_n_epoch
        if every is None:
            return
        interval, is_unknown = options.val_check_interval, math.isinf(num_batches)
        is_possible, instead = interval == 1.0 or not is_unknown, "a number of batches (int)"
        if isinstance(interval, int):
            is_possible, instead = interval <= num_batches, "fewer batches"
        if not is_possible and not isinstance(interval, timedelta):  # after a time, it may fall due later
            how_many = "an unknown number of" if is_unknown else int(num_batches)
            raise ConfigurationError(
                message=f"val_check_interval={interval} does not fit an epoch of {how_many} batches.",
                remedy=f"{instead}, or 1.0 for the end of the epoch; for no validation limit_val_batches=0.",
            )
        # A later fit, with a higher limit, may reach an epoch that is validated.
        if 0 <= options.epoch_limit < every and self.context.strategy.is_global_zero:
            warn(
                f"Validation never runs: check_val_every_n_epoch={every} is more than max_epochs="
                f"{options.epoch_limit}. Choose fewer epochs; for no validation limit_val_batches=0.",
            )

    def is_due(self, batch_idx: int, is_last: bool) -> bool:
        """Return whether a validation fell due in the window that this batch ends.

        Within a window the weights do not change, and a checkpoint that validation triggers could not be
        continued from there. Collective if the interval is a time.
        """
        context, options, progress = self.context, self.context.options, self.context.state.progress
        if not (context.state.has_validation and context.has_validation_in_epoch):
            return False
        interval, num_batches = options.val_check_interval, self.schedule.num_batches
        if isinstance(interval, timedelta):
            elapsed = time.monotonic() - self.ended_at  # on rank 0, since the last validation
            return context.strategy.broadcast(elapsed >= interval.total_seconds())
        if not isinstance(interval, int):  # a fraction
            if interval == 1.0 or math.isinf(num_batches):
                return is_last
            interval = max(1, int(num_batches * interval))
        is_per_epoch = options.check_val_every_n_epoch is not None
        before = 0 if is_per_epoch else progress.total_batches - progress.batches_done
        first = before + batch_idx - batch_idx % options.accumulate_grad_batches
        return (before + batch_idx + 1) // interval > first // interval

    def run(self) -> None:
        """Validate. Collective."""
        context, state, stage = self.context, self.context.state, self.context.stage
        context.strategy.gradients.average_models()  # validate one model
        share_buffers(context.wrapped)  # validate the buffers that rank 0 saves
        context.hooks.call("on_validation_model_zero_grad")
        if self.loop is None or must_reload(context, "validate"):
            with isolated_random_state(mixed_seed(state.seed, 0)):  # training's random numbers do not change
                self.loop = self.make_loop(context) or self.loop
            state.has_validation = self.loop is not None
        if self.loop is not None:
            stage.before_validation = changing_state(context)
            try:
                self.loop.run(self.stopping)
            except EvaluationStopped:
                self.stopping.stop()
            stage.before_validation = None
            self.ended_at = time.monotonic()

    def warn_if_none(self) -> None:
        """Warn on rank 0 of an epoch, of unknown length until now, in which no validation fell due."""
        options, progress = self.context.options, self.context.state.progress
        interval, batches = options.val_check_interval, progress.batches_done
        is_per_epoch = options.check_val_every_n_epoch is not None
        is_late = is_per_epoch and isinstance(interval, int) and batches < interval
        was_unknown = progress.is_epoch_done and math.isinf(self.schedule.num_batches)
        if was_unknown and is_late and self.context.strategy.is_global_zero:
            warn(
                f"An epoch has ended without validation: it had {batches} batches, and val_check_interval="
                f"{interval}. Choose fewer, or 1.0 for the end of each epoch.",
            )


def run_sanity_check(
    context: LoopContext, make_validation: Callable[[], EvaluationLoop | None]
) -> EvaluationLoop | None:
    """Validate on the first `num_sanity_val_steps` batches of each loader; return the loop. Collective.

    Metrics and random state are restored afterwards. `make_validation` asks for the loaders.
    """
    state, stage, steps = context.state, context.stage, context.options.num_sanity_val_steps
    with ExitStack() as stack:
        stack.enter_context(random_state_kept(context.strategy.root_device))
        stack.enter_context(states_kept(context.module))
        _set_until_end(stack, vars(stage), is_sanity_check=True)
        _set_until_end(stack, vars(state), metrics=PublishedMetrics(), stage=RunningStage.SANITY_CHECKING)
        context.hooks.call("on_sanity_check_start")
        validation = make_validation()
        if validation is not None:
            limit = math.inf if steps == -1 else steps
            first = [LoaderShard(shard.loader, min(limit, shard.num_batches)) for shard in validation.shares]
            _set_until_end(stack, state.num_batches, validate=[shard.num_batches for shard in first])
            _set_until_end(stack, stage.shards, validate=first)
            EvaluationLoop(context, first, "validate").run()
        context.hooks.call("on_sanity_check_end")
    return validation


def _set_until_end(stack: ExitStack, target: dict[str, Any], **values: Any) -> None:
    """Set items of a dictionary, and restore them when `stack` ends."""
    stack.callback(target.update, {name: target[name] for name in values})
    target.update(values)
