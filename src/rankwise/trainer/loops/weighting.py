"""The weight of each batch within its accumulation window, by the strategy's `gradient_weighting`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from rankwise.data.batches import BatchSizes
from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from rankwise.trainer.loops.uneven_inputs import BatchSchedule
    from rankwise.trainer.state import LoopContext


@contextmanager
def zero_gradients(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Replace the gradients that backward passes in the block compute by zeros.

    A batch of weight 0 may have a loss of NaN (a mean over no token), and NaN times 0 is NaN. The same
    parameters get gradients as for every other batch, so the averaging over ranks does not change.
    """
    with ExitStack() as handles:
        for parameter in parameters:
            if parameter.requires_grad:
                handles.enter_context(parameter.register_hook(torch.zeros_like))
        yield


@contextmanager
def gradients_kept(parameters: Iterable[Tensor], remedy: str) -> Iterator[None]:
    """Raise if the block, a hook, changes gradients that the ranks average later."""
    before = [(each, each.grad, getattr(each.grad, "_version", None)) for each in parameters]
    yield
    if any(
        each.grad is not gradient or getattr(gradient, "_version", None) != version
        for each, gradient, version in before
    ):
        raise ConfigurationError(
            message="on_after_backward has changed gradients of this rank's own batch, before their average.",
            facts="several ranks average gradients in the last backward pass before a step.",
            remedy=f"change averaged gradients, in on_before_optimizer_step; or {remedy}.",
        )


@final
class BatchWeighting:
    """Scale each batch's loss, so that the gradients of a window are the configured average."""

    def __init__(self, context: LoopContext, schedule: BatchSchedule) -> None:
        self._strategy = context.strategy
        self._is_logged = context.strategy.gradient_weighting == "logged"
        self._module = context.module
        self._progress = context.state.progress
        self._settings = context.options
        self._schedule = schedule
        self._sizes: BatchSizes | None = None
        self._begin = 0
        self._num_real = 0  # batches of all ranks so far in this window, where they are counted
        self._counted_weight = 1.0

    def begin_epoch(self) -> None:
        """Read the number of the epoch's first batch, and the batch sizes of all ranks if they are needed."""
        self._begin = self._progress.batches_done
        if self._strategy.gradient_weighting != "samples" or not self._has_effect:
            return
        self._sizes = sizes = self._schedule.share.batch_sizes()
        replicas = self._strategy.distributed_sampler_kwargs["num_replicas"]
        if sizes is not None and sizes.num_replicas == replicas:
            return
        name = type(self._schedule.share.loader).__name__
        split = "has no index stream that rankwise has split"
        if sizes is not None:
            split = f"is split over {sizes.num_replicas}, not over {replicas} ranks by rankwise"
        raise ConfigurationError(
            message='gradient_weighting="samples" needs batch sizes that are known beforehand.',
            facts=f"this {name} {split}, so a rank cannot compute the batch sizes of the others.",
            remedy=f'gradient_weighting="logged", and {self._by_hand} in training_step.',
        )

    def check_unknown_size(self, batch_idx: int) -> None:
        """Raise ConfigurationError if a batch is weighted that may have other samples than its indices."""
        if self._sizes is not None:
            raise ConfigurationError(
                message=f'gradient_weighting="samples" does not know the size of batch {batch_idx}.',
                facts="nothing in it has the length of its list of indices: a collate function, __getitems__ "
                "or the loader has left samples out, or made more of them.",
                remedy=f'gradient_weighting="logged", and {self._by_hand} in training_step.',
            )

    @property
    def _by_hand(self) -> str:
        """How to log a weight."""
        is_automatic = self._module.automatic_optimization
        return "self.log_weight(n)" if is_automatic else "self.manual_backward(loss, weight=n)"

    @property
    def _has_effect(self) -> bool:
        """Whether a window has more than one batch; a callback may change how many it has."""
        return self._strategy.world_size > 1 or self._settings.accumulate_grad_batches > 1

    def begin_batch(self, batch_idx: int, is_window_end: bool) -> float:
        """Return the factor for the gradients of the window's earlier batches.

        Where the ranks count their batches one by one, a window counts as full until its last batch. Only
        then it is known how many batches of how many ranks it has.
        """
        if not self._schedule.is_counted or self._is_logged:
            return 1.0
        first, end = self._window(batch_idx)
        self._num_real = self._schedule.num_real + (0 if batch_idx == first else self._num_real)
        self._counted_weight = expected = 1 / (end - first)
        if is_window_end:
            self._counted_weight = len(self._schedule.lengths) / self._num_real
        return self._counted_weight / expected

    def weight(self, outputs: Any, batch_idx: int) -> float | Tensor:
        """Return the weight of a batch for which `training_step` returned `outputs`."""
        logged = self._module.take_weight()
        if not self._is_logged and not self._has_effect:
            return 1.0
        if isinstance(outputs, Mapping) and outputs.get("weight") is not None:
            logged = outputs["weight"]
        if self._is_logged:
            if logged is None:
                remedy = 'self.log_weight(n) in training_step, or return {"loss": loss, "weight": n}.'
                raise self.error(f"Batch {batch_idx} has no weight", remedy)
            return 0.0 if self._schedule.is_padding else logged
        if logged is not None:
            raise self.error("training_step logged a weight, but gradients are not weighted by it")
        return self.factor(batch_idx)

    def refuse_logged(self) -> None:
        """Check that `log_weight` was not called: in manual optimisation, backward passes have weights."""
        logged = self._module.take_weight()
        if logged is not None and (self._has_effect or self._is_logged):
            raise self.error(
                "training_step logged a weight, but gradients are not weighted by it: it optimises manually",
                'self.manual_backward(loss, weight=n), with DDPStrategy(gradient_weighting="logged").',
            )

    def error(self, problem: str, remedy: str = "") -> ConfigurationError:
        """Return the error for a weight that is missing, or that would have no effect."""
        others = "; the others wait" if self._strategy.world_size > 1 else ""
        return ConfigurationError(
            message=f"{problem}.",
            facts=f"gradient_weighting={self._strategy.gradient_weighting!r}, "
            f"global_rank={self._strategy.global_rank}{others}.",
            remedy=remedy or 'DDPStrategy(gradient_weighting="logged").',
        )

    def scaled(self, loss: Tensor, weight: float | Tensor) -> Tensor:
        """Return the loss times its weight."""
        if self._is_logged:
            return self._strategy.weighted_loss(loss, weight)
        scaled: Tensor = loss if weight == 1 else loss * weight
        return scaled

    def factor(self, batch_idx: int) -> float:
        """Return the weight of a batch in its window where weights are not logged.

        DDP divides the sum of the ranks' gradients by the number of ranks afterwards.
        """
        if not self._has_effect:
            return 1.0
        first, end = self._window(batch_idx)
        sizes = self._sizes
        if sizes is None and self._schedule.is_counted:
            return 0.0 if self._schedule.is_padding else self._counted_weight
        if sizes is None:
            return self._schedule.weight(first, end)
        # ends: after each rank's last batch before `end`; all alike if these replicas' lengths are unknown
        lengths = self._schedule.lengths
        if len(lengths) != sizes.num_replicas:
            lengths = (end,) * sizes.num_replicas
        ends = (int(min(length, end)) for length in lengths)
        batches = ((rank, batch) for rank, after in enumerate(ends) for batch in range(first, after))
        total = sum(sizes.size_of(rank, batch) for rank, batch in batches)
        own = 0 if self._schedule.is_padding else sizes.size_of(sizes.rank, batch_idx)
        return own * sizes.num_replicas / total

    def _window(self, batch_idx: int) -> tuple[int, int]:
        """Return the first batch of a batch's window, and the one after its last, unless data end before."""
        length = self._settings.accumulate_grad_batches
        start = batch_idx - batch_idx % length
        first = max(start, self._begin)  # it may be later after a checkpoint from a run with other windows
        return first, int(min(start + length, self._schedule.num_batches))
