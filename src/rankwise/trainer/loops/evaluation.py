"""The loops of validation, test and prediction: every sample once, on any number of ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import count, takewhile, zip_longest
from typing import TYPE_CHECKING, Any, Literal, TypeVar, final

import torch
from torch import Tensor, nn

from rankwise.data.batches import batch_sizes
from rankwise.errors import ConfigurationError
from rankwise.monitoring.heartbeat import report_phase
from rankwise.nested import to_device
from rankwise.process_group.collectives import ranks_of
from rankwise.process_group.interception import Call, own_calls_intercepted
from rankwise.ranks import warn
from rankwise.strategies.agreement import check_same_order
from rankwise.trainer.data.batch_transfer import BatchTransfer
from rankwise.trainer.data.loader_shard import PHASE_NAMES, limited
from rankwise.trainer.hooks import num_step_arguments
from rankwise.trainer.metrics.metric_objects import empty_lists_refused, metric_objects
from rankwise.trainer.metrics.results import Results, StepOfEvaluation

if TYPE_CHECKING:
    from rankwise.strategies import Strategy
    from rankwise.trainer.data.loader_shard import LoaderShard
    from rankwise.trainer.loops.stopping import Stopping
    from rankwise.trainer.state import LoopContext

Gather = Literal["all", "rank_zero"] | None
EvaluationName = Literal["validate", "test", "predict"]
GATHERINGS: tuple[Gather, ...] = ("all", "rank_zero", None)

T = TypeVar("T")
_NOTHING: Any = object()
_NAMES = {  # the phase that is reported, and the name in methods
    "validate": ("validation", "validation"),
    "test": ("test", "test"),
    "predict": ("prediction", "predict"),
}


@contextlib.contextmanager
def _modes_kept(module: nn.Module) -> Iterator[ExitStack]:
    """Restore each submodule's mode after the block, unless the block takes that from the stack."""
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    with ExitStack() as stack:
        for submodule, is_training in modes:
            stack.callback(setattr, submodule, "training", is_training)
        yield stack


def _leave_inference_mode(module: nn.Module) -> None:
    """Replace the tensors that a module got in inference mode, as it cannot update them outside of it.

    The states of metric objects are reset there, for example.
    """
    copies: dict[int, Tensor] = {}  # modules may share a tensor
    for submodule in module.modules():
        for held in (vars(submodule), submodule._buffers):
            for name, value in list(held.items()):
                if isinstance(value, Tensor) and value.is_inference():
                    held[name] = copies.setdefault(id(value), value.clone())


@final
class _StepCollectives:
    """Refuse the user's collectives in the steps of a loader if ranks have different numbers of batches.

    Only some ranks would reach the last collective. A rank compares only the numbers that it can compute.

    Attributes:
        share: this rank's part of the loader that is evaluated; None outside of steps.
    """

    def __init__(self, context: LoopContext, stage: EvaluationName) -> None:
        self._context = context
        self._stage = stage
        self.share: LoaderShard | None = None

    def checked(self) -> AbstractContextManager[None]:
        """Return the block of an evaluation."""
        has_others = self._context.strategy.world_size > 1
        return own_calls_intercepted(self._check) if has_others else contextlib.nullcontext()

    def _check(self, call: Call) -> None:
        replicas = ranks_of(self._context.strategy.data_parallel_group)
        is_of_replicas = len({*replicas} & {*ranks_of(call.group)}) > 1  # others have the same data
        numbers = self._numbers(self.share) if self.share is not None and is_of_replicas else []
        if len(set(numbers)) > 1:
            name = _NAMES[self._stage][1]
            raise ConfigurationError(
                message=f"{call.name} in {name}_step, which the ranks do not call equally often.",
                facts=f"{call.where}; the ranks have {numbers} batches, as each sample is evaluated once.",
                remedy=f"collect in the step, and call it in on_{name}_epoch_end; or self.log(...), which "
                "reduces over all ranks; or evaluate data that the ranks divide evenly.",
            )

    def _numbers(self, share: LoaderShard) -> list[int]:
        """Return each rank's number of batches; [] if it is not known."""
        sizes = batch_sizes(share.loader)
        if sizes is None:
            return []
        limit, stage = self._context.options.limit(self._stage), self._context.stage
        numbers: list[float] = [
            sum(1 for _ in takewhile(partial(sizes.size_of, rank), count()))
            for rank in range(sizes.num_replicas)
        ]
        if self._stage == "predict":  # the limit is one of all ranks' batches
            whole = int(limited(sum(numbers), limit))
            return [len(range(rank, whole, sizes.num_replicas)) for rank in range(sizes.num_replicas)]
        most = self._context.options.num_sanity_val_steps if stage.is_sanity_check else -1
        return [int(min(limited(number, limit), number if most < 0 else most)) for number in numbers]


@final
@dataclass(frozen=True)
class EvaluationLoop:
    """Run the module without its wrapper, since ranks may have different numbers of batches.

    The ranks communicate once, at the end, to reduce the metrics or to gather the predictions.
    """

    context: LoopContext
    shares: list[LoaderShard]
    stage: EvaluationName

    def __post_init__(self) -> None:
        self.context.profiler.instrument(self, _run_batch=f"run_{_NAMES[self.stage][1]}_batch")

    def run(self, stopping: Stopping | None = None) -> list[dict[str, float]]:
        """Evaluate; return the metrics of each loader, the same on every rank.

        Within a fit, `stopping` is the fit's, and raises `EvaluationStopped` for a signal. Collective.
        """
        context, results = self.context, self._new_results()
        with self._running(results):
            batches = self._batches(results)
            for dataloader_idx, batch_idx, batch in stopping.evaluated(batches) if stopping else batches:
                self._run_batch(results, batch, batch_idx, dataloader_idx)
            results.end_loaders()
            context.show_so_far(results, f"on_{_NAMES[self.stage][1]}_epoch_end")
            with self._empty_metrics_refused():
                self._hook("epoch_end")
            values = results.epoch_values(context.strategy)
            if not context.stage.is_sanity_check:
                self._publish_steps(results.steps)
            context.publish(values, is_logged=not context.stage.is_sanity_check)
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
        results, strategy = self._new_results(), self.context.strategy
        own: list[list[Any]] = [[] for _ in self.shares]
        with self._running(None):
            for dataloader_idx, batch_idx, batch in self._batches(results):
                output = self._run_batch(results, batch, batch_idx, dataloader_idx)
                output = strategy.precision.convert_output(output)
                output = to_device(output, "cpu")
                own[dataloader_idx].append(output)
            by_rank = _gathered(strategy, own, gather)
            predictions = [interleaved(list(lists)) for lists in zip(*by_rank, strict=True)]
            self._hook("epoch_end")
        outputs = [output for of_loader in own for output in of_loader]
        if outputs and strategy.is_global_zero and all(output is None for output in outputs):
            name = type(self.context.module).__name__
            warn(f"{name}.predict_step() returned None for every batch.")
        return predictions[0] if len(predictions) == 1 else predictions

    def predict_only(self) -> list[Any]:
        """Predict this rank's batches and keep no outputs; return []."""
        results = self._new_results()
        with self._running(None):
            for dataloader_idx, batch_idx, batch in self._batches(results):
                self._run_batch(results, batch, batch_idx, dataloader_idx)
            self._hook("epoch_end")
        return []

    @contextlib.contextmanager
    def _running(self, results: Results | None) -> Iterator[None]:
        module, hooks, name = self.context.module, self.context.hooks, _NAMES[self.stage][1]
        with (
            self.context.in_phase(self.stage, results),
            self._without_gradients(),
            _modes_kept(module) as kept,
        ):
            getattr(module, f"on_{name}_model_eval")()
            self._hook("start")
            self._hook("epoch_start")
            with self._collectives.checked():
                yield
            self._hook("end")
            if name != "predict" and (set_mode := hooks.own(f"on_{name}_model_train")) is not None:
                kept.pop_all()
                set_mode()

    @contextlib.contextmanager
    def _without_gradients(self) -> Iterator[None]:
        """Use torch's inference mode, or within a fit `no_grad`: training may use what a step keeps."""
        context = self.context
        is_inference = context.options.inference_mode and context.stage.name != "fit"
        try:
            with torch.inference_mode() if is_inference else torch.no_grad():
                yield
        finally:
            _leave_inference_mode(context.module)

    def _batches(self, results: Results) -> Iterator[tuple[int, int, Any]]:
        """Yield the number of the loader, the number of the batch in it, and the batch."""
        for share in self.shares if self.stage != "predict" else []:  # which keeps the order of the data set
            share.set_epoch(self.context.state.progress.current_epoch)
        check_same_order(
            self.context.strategy, PHASE_NAMES[self.stage], [share.loader for share in self.shares]
        )
        for dataloader_idx, share in enumerate(self.shares):
            results.begin_loader(dataloader_idx, self._suffixes[dataloader_idx])
            batches = self.context.profiler.iterated(f"{_NAMES[self.stage][1]}_dataloader_next", share)
            for batch_idx, batch in enumerate(batches):
                yield dataloader_idx, batch_idx, batch

    def _run_batch(self, results: Results, batch: Any, batch_idx: int, dataloader_idx: int) -> Any:
        """Run the module's step on a batch, and the hooks around it; return the outputs."""
        context, precision = self.context, self.context.strategy.precision
        phase, name = _NAMES[self.stage]
        indices = batch_idx, dataloader_idx
        report_phase(phase)
        self._collectives.share = self.shares[dataloader_idx]
        batch = self._transfer(batch, dataloader_idx)
        results.begin_batch(self.shares[dataloader_idx].take_size())
        arguments = (batch, batch_idx, dataloader_idx)[: self._step_arguments]
        context.hooks.call(f"on_{name}_batch_start", batch, *indices)
        with precision.forward_context():
            outputs = self._step(*arguments)
        context.hooks.call(f"on_{name}_batch_end", outputs, batch, *indices)
        results.end_batch()
        self._collectives.share = None
        return outputs

    def _hook(self, moment: str) -> None:
        self.context.hooks.call(f"on_{_NAMES[self.stage][1]}_{moment}")

    def _empty_metrics_refused(self) -> AbstractContextManager[None]:
        """Return the block of the last hook, in which a rank without batches cannot compute all metrics."""
        if self.context.strategy.world_size == 1 or any(share.num_batches for share in self.shares):
            return contextlib.nullcontext()
        remedy = "self.log(name, metric), which needs no batch on each rank; or more samples than ranks."
        return empty_lists_refused(metric_objects(self.context.module), remedy)

    @cached_property
    def _collectives(self) -> _StepCollectives:
        return _StepCollectives(self.context, self.stage)

    @cached_property
    def _transfer(self) -> BatchTransfer:
        return BatchTransfer(self.context)

    @cached_property
    def _step(self) -> Callable[..., Any]:
        name = f"{_NAMES[self.stage][1]}_step"
        step: Callable[..., Any] = getattr(self.context.module, name)
        return self.context.profiler.profiled(name, step)

    @cached_property
    def _step_arguments(self) -> int:
        step = f"{_NAMES[self.stage][1]}_step"
        return num_step_arguments(self.context.module, step, len(self.shares))

    @property
    def _suffixes(self) -> list[str]:
        count = len(self.shares)
        return [f"/dataloader_idx_{index}" for index in range(count)] if count > 1 else [""]

    def _new_results(self) -> Results:
        rank = self.context.strategy.global_rank
        return Results(self.context.module, is_evaluation=True, global_rank=rank)

    def _publish_steps(self, steps: list[StepOfEvaluation]) -> None:
        """Give loggers each batch's values by step, numbered over all evaluations of this kind."""
        context = self.context
        counts = context.state.evaluated_batches.setdefault(f"{context.stage.name} {self.stage}", {})
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
