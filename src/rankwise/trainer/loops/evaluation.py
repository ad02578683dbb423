"""The loop of validation and test: every sample once, whatever the number of ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, final

import torch
from torch import nn

from rankwise.monitoring.heartbeat import report_phase
from rankwise.trainer.data_loaders import LoaderShard
from rankwise.trainer.metrics import Results

if TYPE_CHECKING:
    from rankwise.trainer.loops.context import LoopContext
    from rankwise.trainer.loops.stopping import Stopping

__all__ = ["EvaluationLoop", "evaluating"]

_NAMES = {"validate": "validation", "test": "test"}


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module and its submodules into evaluation mode, without gradients; then put each back."""
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for submodule, is_training in modes:
            submodule.training = is_training


@final
class EvaluationLoop:
    """Run the module as it is, not wrapped: ranks may have different numbers of batches.

    The ranks meet once, at the end, to reduce the metrics.
    """

    def __init__(
        self,
        context: LoopContext,
        shares: list[LoaderShard],
        stage: Literal["validate", "test"],
    ) -> None:
        self._context = context
        self._strategy = context.strategy
        self._module = context.module
        self._shares = shares
        self._stage = stage
        self._name = _NAMES[stage]
        self._results = Results(is_evaluation=True)

    def run(self, stopping: Stopping | None = None) -> list[dict[str, float]]:
        """Evaluate; return the metrics of each loader, the same on every rank.

        Collective: every rank must call this.

        Args:
            stopping: of the fit that this is a validation of, if it is.

        Raises:
            EvaluationLeft: on every rank, when a signal has made the fit stop here.
        """
        self._results = Results(is_evaluation=True)
        with self._context.metrics.in_phase(self._stage, self._results), evaluating(self._module):
            self._hook("start")
            self._hook("epoch_start")
            self._run_loaders(stopping)
            self._results.suffix = ""
            self._hook("epoch_end")
            values = self._results.epoch_values(self._strategy)
            self._context.metrics.publish(values, is_logged=True)
            if stopping is not None:
                self._context.progress.is_validated = True
            self._hook("end")
        metrics = {value.base_name: value.value.item() for value in values}
        return [self._metrics_of(dataloader_idx, metrics) for dataloader_idx in range(len(self._shares))]

    def _run_loaders(self, stopping: Stopping | None) -> None:
        if stopping is not None:
            stopping.begin_evaluation()
        for dataloader_idx, share in enumerate(self._shares):
            self._run_loader(dataloader_idx, share, stopping)
        if stopping is not None:
            stopping.end_evaluation_batches()

    def _run_loader(self, dataloader_idx: int, share: LoaderShard, stopping: Stopping | None) -> None:
        index = (dataloader_idx,) if len(self._shares) > 1 else ()
        self._results.suffix = self._suffix(dataloader_idx)
        share.set_epoch(self._context.progress.current_epoch)
        for batch_idx, (batch, _) in enumerate(share):
            if stopping is not None:
                stopping.begin_evaluation_batch()
            self._run_batch(batch, (batch_idx, *index))

    def _run_batch(self, batch: Any, indices: tuple[int, ...]) -> None:
        strategy, precision = self._strategy, self._strategy.precision
        report_phase(self._name)
        batch = precision.convert_input(strategy.batch_to_device(batch))
        self._results.begin_batch(batch)
        self._hook("batch_start", batch, *indices)
        with precision.forward_context():
            outputs = getattr(self._module, f"{self._name}_step")(batch, *indices)
        self._hook("batch_end", outputs, batch, *indices)
        self._results.end_batch()

    def _hook(self, moment: str, *args: Any) -> None:
        self._context.hooks.call(f"on_{self._name}_{moment}", *args)

    def _suffix(self, dataloader_idx: int) -> str:
        return f"/dataloader_idx_{dataloader_idx}" if len(self._shares) > 1 else ""

    def _metrics_of(self, dataloader_idx: int, metrics: dict[str, float]) -> dict[str, float]:
        others = [self._suffix(other) for other in range(len(self._shares)) if other != dataloader_idx]
        return {
            name: value
            for name, value in metrics.items()
            if not any(name.endswith(other) for other in others)
        }
