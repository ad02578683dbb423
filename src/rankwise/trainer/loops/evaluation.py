"""The loop of validation and test: every sample once, whatever the number of ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, final

import torch
from torch import nn

from rankwise.monitoring.heartbeat import report_phase
from rankwise.trainer.metrics import Results

if TYPE_CHECKING:
    from rankwise.trainer.data_loaders import LoaderShard
    from rankwise.trainer.loops.context import LoopContext
    from rankwise.trainer.loops.stopping import Stopping

__all__ = ["EvaluationLoop", "evaluating", "run_batch"]

_NAMES = {"validate": "validation", "test": "test"}


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Set evaluation mode without gradients in the block; restore each submodule's mode afterwards."""
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for submodule, is_training in modes:
            submodule.training = is_training


def run_batch(context: LoopContext, results: Results, name: str, batch: Any, *indices: int) -> Any:
    """Run `{name}_step` of the module on a batch, and the hooks around it; return the outputs.

    Args:
        context: what the loop uses of the Trainer.
        results: where the module logs to.
        name: `"validation"`, `"test"` or `"predict"`.
        batch: the batch.
        indices: the number of the batch and, with several loaders, of the loader.
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


@final
class EvaluationLoop:
    """Evaluate the module without its wrapper, since ranks may have different numbers of batches.

    The ranks communicate once, at the end, to reduce the metrics.
    """

    def __init__(
        self, context: LoopContext, shares: list[LoaderShard], stage: Literal["validate", "test"]
    ) -> None:
        self._context = context
        self._shares = shares
        self._stage = stage
        self._name = _NAMES[stage]
        self._suffixes = [f"/dataloader_idx_{index}" for index in range(len(shares))]
        if len(shares) == 1:
            self._suffixes = [""]
        self._results = Results(is_evaluation=True)

    def run(self, stopping: Stopping | None = None) -> list[dict[str, float]]:
        """Evaluate; return the metrics of each loader, the same on every rank.

        Collective: every rank must call this.

        Args:
            stopping: the fit's, in a validation within a fit.

        Raises:
            EvaluationStopped: on all ranks, when a signal stops the fit here.
        """
        context = self._context
        self._results = Results(is_evaluation=True)
        with context.metrics.in_phase(self._stage, self._results), evaluating(context.module):
            self._hook("start")
            self._hook("epoch_start")
            self._run_loaders(stopping)
            self._results.suffix = ""
            self._hook("epoch_end")
            values = self._results.epoch_values(context.strategy)
            context.metrics.publish(values, is_logged=True)
            if stopping is not None:
                context.state.progress.is_validated = True
            self._hook("end")
        metrics = {value.base_name: value.value.item() for value in values}
        return [self._metrics_of(suffix, metrics) for suffix in self._suffixes]

    def _run_loaders(self, stopping: Stopping | None) -> None:
        if stopping is not None:
            stopping.begin_evaluation()
        for dataloader_idx, share in enumerate(self._shares):
            self._run_loader(dataloader_idx, share, stopping)
        if stopping is not None:
            stopping.end_evaluation_batches()

    def _run_loader(self, dataloader_idx: int, share: LoaderShard, stopping: Stopping | None) -> None:
        index = (dataloader_idx,) if len(self._shares) > 1 else ()
        self._results.suffix = self._suffixes[dataloader_idx]
        share.set_epoch(self._context.state.progress.current_epoch)
        for batch_idx, (batch, _) in enumerate(share):
            if stopping is not None:
                stopping.begin_evaluation_batch()
            report_phase(self._name)
            run_batch(self._context, self._results, self._name, batch, batch_idx, *index)

    def _hook(self, moment: str, *args: Any) -> None:
        self._context.hooks.call(f"on_{self._name}_{moment}", *args)

    def _metrics_of(self, suffix: str, metrics: dict[str, float]) -> dict[str, float]:
        """Return the metrics of one loader, and those without a loader's suffix."""
        others = tuple(other for other in self._suffixes if other != suffix)
        return {name: value for name, value in metrics.items() if not name.endswith(others)}
