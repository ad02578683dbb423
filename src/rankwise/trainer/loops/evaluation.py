"""The loops of validation, test and prediction: every sample once, whatever the number of ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal, TypeVar, final

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from rankwise.monitoring.heartbeat import report_phase
from rankwise.trainer.metrics import Results

if TYPE_CHECKING:
    from rankwise.strategies import Strategy
    from rankwise.trainer.data_loaders import LoaderShard
    from rankwise.trainer.loops.context import LoopContext
    from rankwise.trainer.loops.stopping import Stopping

Gather = Literal["all", "rank_zero"] | None
GATHERINGS: tuple[Gather, ...] = ("all", "rank_zero", None)

T = TypeVar("T")
_NOTHING: Any = object()
_NAMES = {"validate": "validation", "test": "test"}


@contextlib.contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Set evaluation mode without gradients in the block; restore each submodule's mode afterwards."""
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for submodule, is_training in modes:
            submodule.training = is_training


def _run_batch(context: LoopContext, results: Results, name: str, batch: Any, *indices: int) -> Any:
    """Run `{name}_step` of the module on a batch, and the hooks around it; return the outputs.

    `indices` are the number of the batch and, with several loaders, of the loader.
    """
    precision = context.strategy.precision
    batch = precision.convert_input(context.strategy.batch_to_device(batch))
    results.begin_batch(batch)
    context.hooks.call(f"on_{name}_batch_start", batch, *indices)
    with precision.forward_context():
        outputs = getattr(context.module, f"{name}_step")(batch, *indices)
    context.hooks.call(f"on_{name}_batch_end", outputs, batch, *indices)
    results.end_batch()
    return outputs


# ------------------------------------------------------------------ validation and test


@final
@dataclass(frozen=True)
class EvaluationLoop:
    """Evaluate the module without its wrapper, since ranks may have different numbers of batches.

    The ranks communicate once, at the end, to reduce the metrics.
    """

    context: LoopContext
    shares: list[LoaderShard]
    stage: Literal["validate", "test"]

    def run(self, stopping: Stopping | None = None) -> list[dict[str, float]]:
        """Evaluate; return the metrics of each loader, the same on every rank.

        Collective: every rank must call this.

        Args:
            stopping: the fit's, in a validation within a fit.

        Raises:
            EvaluationStopped: on all ranks, when a signal stops the fit here.
        """
        context, results = self.context, Results(is_evaluation=True)
        with context.metrics.in_phase(self.stage, results), _evaluating(context.module):
            self._hook("start")
            self._hook("epoch_start")
            self._run_loaders(results, stopping)
            self._hook("epoch_end")
            values = results.epoch_values(context.strategy)
            context.metrics.publish(values, is_logged=True)
            if stopping is not None:
                context.state.progress.is_validated = True
            self._hook("end")
        return self._by_loader({value.base_name: value.value.item() for value in values})

    def _run_loaders(self, results: Results, stopping: Stopping | None) -> None:
        if stopping is not None:
            stopping.begin_evaluation()
        for dataloader_idx, share in enumerate(self.shares):
            self._run_loader(results, stopping, dataloader_idx, share)
        results.suffix = ""
        if stopping is not None:
            stopping.end_evaluation_batches()

    def _run_loader(
        self, results: Results, stopping: Stopping | None, dataloader_idx: int, share: LoaderShard
    ) -> None:
        name = _NAMES[self.stage]
        index = (dataloader_idx,) if len(self.shares) > 1 else ()
        results.suffix = self._suffixes[dataloader_idx]
        share.set_epoch(self.context.state.progress.current_epoch)
        for batch_idx, (batch, _) in enumerate(share):
            if stopping is not None:
                stopping.begin_evaluation_batch()
            report_phase(name)
            _run_batch(self.context, results, name, batch, batch_idx, *index)

    def _hook(self, moment: str) -> None:
        self.context.hooks.call(f"on_{_NAMES[self.stage]}_{moment}")

    @property
    def _suffixes(self) -> list[str]:
        count = len(self.shares)
        return [f"/dataloader_idx_{index}" for index in range(count)] if count > 1 else [""]

    def _by_loader(self, metrics: dict[str, float]) -> list[dict[str, float]]:
        """Return the metrics of each loader, and those without a loader's suffix."""
        suffixes = self._suffixes
        others = [tuple(other for other in suffixes if other != suffix) for suffix in suffixes]
        return [
            {name: value for name, value in metrics.items() if not name.endswith(endings)}
            for endings in others
        ]


# ------------------------------------------------------------------ prediction


def predict(context: LoopContext, shares: list[LoaderShard], gather: Gather) -> list[Any]:
    """Run `predict_step` on this rank's batches; return the outputs, batch by batch, in dataset order.

    Collective: every rank must call this. The ranks of `gather` get all ranks' outputs; with several loaders,
    a list for each.
    """
    results = Results(is_evaluation=True)
    with context.metrics.in_phase("predict", results), _evaluating(context.module):
        context.hooks.call("on_predict_start")
        context.hooks.call("on_predict_epoch_start")
        own = []
        for dataloader_idx, share in enumerate(shares):
            index = (dataloader_idx,) if len(shares) > 1 else ()
            own.append(_predict_loader(context, results, share, *index))
        by_rank = _gathered(context.strategy, own, gather)
        predictions = [interleaved(list(lists)) for lists in zip(*by_rank, strict=True)]
        context.hooks.call("on_predict_epoch_end")
        context.hooks.call("on_predict_end")
    return predictions[0] if len(predictions) == 1 else predictions


def _predict_loader(context: LoopContext, results: Results, share: LoaderShard, *index: int) -> list[Any]:
    outputs = []
    for batch_idx, (batch, _) in enumerate(share):
        report_phase("prediction")
        output = _run_batch(context, results, "predict", batch, batch_idx, *index)
        output = context.strategy.precision.convert_output(output)
        outputs.append(apply_to_collection(output, Tensor, lambda tensor: tensor.cpu()))
    return outputs


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
