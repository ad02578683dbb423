"""The loop of prediction: each rank runs whole batches, and the outputs are returned in dataset order."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal, TypeVar, final

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from rankwise.monitoring.heartbeat import report_phase
from rankwise.trainer.loops.evaluation import evaluating, run_batch
from rankwise.trainer.metrics import Results

if TYPE_CHECKING:
    from rankwise.trainer.data_loaders import LoaderShard
    from rankwise.trainer.loops.context import LoopContext

__all__ = ["GATHERINGS", "Gather", "PredictionLoop", "interleaved"]

Gather = Literal["all", "rank_zero"] | None
GATHERINGS: tuple[Gather, ...] = ("all", "rank_zero", None)

T = TypeVar("T")
_NOTHING: Any = object()


def interleaved(lists: list[list[T]]) -> list[T]:
    """Return item i of the whole from list i % n: the inverse of splitting by batches.

    >>> interleaved([[0, 3, 6], [1, 4], [2, 5]])
    [0, 1, 2, 3, 4, 5, 6]
    """
    return [item for row in zip_longest(*lists, fillvalue=_NOTHING) for item in row if item is not _NOTHING]


@final
class PredictionLoop:
    """Run `predict_step` on this rank's batches of each loader, then put all ranks' outputs in order."""

    def __init__(self, context: LoopContext, shares: list[LoaderShard]) -> None:
        self._context = context
        self._shares = shares
        self._results = Results(is_evaluation=True)

    def run(self, gather: Gather = "all") -> list[Any]:
        """Return the outputs, batch by batch, on the ranks of `gather`; with several loaders a list for each.

        Collective: every rank must call this.
        """
        context = self._context
        with context.metrics.in_phase("predict", self._results), evaluating(context.module):
            context.hooks.call("on_predict_start")
            context.hooks.call("on_predict_epoch_start")
            own = [self._run_loader(index, share) for index, share in enumerate(self._shares)]
            by_rank = self._gathered(own, gather)
            predictions = [interleaved(list(lists)) for lists in zip(*by_rank, strict=True)]
            context.hooks.call("on_predict_epoch_end")
            context.hooks.call("on_predict_end")
        return predictions[0] if len(predictions) == 1 else predictions

    def _gathered(self, own: list[list[Any]], gather: Gather) -> list[list[list[Any]]]:
        """Return the outputs of all ranks, or of those that this rank gets."""
        strategy = self._context.strategy
        if gather is None:
            return [own]
        if gather == "all" or strategy.data_parallel_group is not None:
            return strategy.all_gather_object(own)
        return strategy.gather_object(own) or [[[] for _ in own]]

    def _run_loader(self, dataloader_idx: int, share: LoaderShard) -> list[Any]:
        index = (dataloader_idx,) if len(self._shares) > 1 else ()
        outputs = []
        for batch_idx, (batch, _) in enumerate(share):
            report_phase("prediction")
            output = run_batch(self._context, self._results, "predict", batch, batch_idx, *index)
            output = self._context.strategy.precision.convert_output(output)
            outputs.append(apply_to_collection(output, Tensor, lambda tensor: tensor.cpu()))
        return outputs
