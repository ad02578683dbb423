"""How much each batch of an accumulation window counts, by the strategy's `gradient_weighting`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from rankwise.data import BatchSizes, batch_sizes
from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from rankwise.trainer.loops.batch_schedule import BatchSchedule
    from rankwise.trainer.loops.context import LoopContext

__all__ = ["BatchWeighting", "only_zeros"]


@contextmanager
def only_zeros(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Let backward passes in the block give the parameters gradients of 0, whatever they compute.

    A mean over no token is NaN, and so may its gradients be, 0 times or not. They come for the same
    parameters as in every other batch, so whoever averages them notices nothing.
    """
    handles = [
        parameter.register_hook(torch.zeros_like) for parameter in parameters if parameter.requires_grad
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@final
class BatchWeighting:
    """Scale each batch's loss, so that a window's gradients are the average that was asked for.

    Args:
        context: of this rank.
        turns: which batches the ranks take together.
    """

    def __init__(self, context: LoopContext, schedule: BatchSchedule) -> None:
        self._strategy = context.strategy
        self._module = context.module
        self._progress = context.progress
        self._settings = context.settings
        self._schedule = schedule
        self._sizes: BatchSizes | None = None
        self._begin = 0

    def begin_epoch(self) -> None:
        """Learn where in the epoch training begins, and its batch sizes where they are needed.

        Raises:
            ConfigurationError: when nobody knows those of all ranks.
        """
        self._begin = self._progress.batches_done
        if self._strategy.gradient_weighting != "samples" or not self._matters:
            return
        self._sizes = batch_sizes(self._schedule.loader)
        replicas = self._strategy.distributed_sampler_kwargs["num_replicas"]
        if self._sizes is not None and self._sizes.num_replicas == replicas:
            return
        name = type(self._schedule.loader).__name__
        raise ConfigurationError(
            message='gradient_weighting="samples" needs batch sizes that are known beforehand.',
            facts=f"nobody knows those of this {name}: its samples have no index stream that rankwise split."
            if self._sizes is None
            else f"this {name} is split over {self._sizes.num_replicas}, not over {replicas} ranks, so a "
            "rank does not know the others'; rankwise did not split it.",
            remedy=self._how_to_log,
        )

    @property
    def _matters(self) -> bool:
        """Whether there is more than one batch to weigh against each other."""
        return self._strategy.world_size > 1 or self._settings.accumulate_grad_batches > 1

    def weight(self, outputs: Any, batch_idx: int) -> float | Tensor:
        """Return what a batch counts.

        Args:
            outputs: what `training_step` has returned.
            batch_idx: the batch's number.

        Raises:
            ConfigurationError: when a weight is missing, or nobody asked for the one that is there.
        """
        logged = self._take_logged(outputs)
        if self._strategy.gradient_weighting == "logged":
            if logged is None:
                raise ConfigurationError(
                    message=f'gradient_weighting="logged", but batch {batch_idx} has no weight.',
                    facts=f"global_rank={self._strategy.global_rank}; the others wait.",
                    remedy='self.log_weight(n) in training_step, or return {"loss": loss, "weight": n}.',
                )
            weight: float | Tensor = 0.0 if self._schedule.is_shadow else logged
            return weight
        if logged is not None and self._matters:
            raise ConfigurationError(
                message="training_step logged a weight, but gradients are not weighted by it.",
                facts=f"gradient_weighting={self._strategy.gradient_weighting!r}.",
                remedy='DDPStrategy(gradient_weighting="logged").',
            )
        return self.factor(batch_idx)

    def refuse_logged(self) -> None:
        """Make sure that nothing was logged in manual optimisation, whose backward passes have weights.

        Raises:
            ConfigurationError: when a weight was.
        """
        if self._module.take_weight() is None or not (
            self._matters or self._strategy.gradient_weighting == "logged"
        ):
            return
        raise ConfigurationError(
            message="training_step logged a weight, but gradients are not weighted by it: it optimises "
            "manually.",
            facts=f"gradient_weighting={self._strategy.gradient_weighting!r}.",
            remedy='self.manual_backward(loss, weight=n), with DDPStrategy(gradient_weighting="logged").',
        )

    @property
    def _how_to_log(self) -> str:
        if self._module.automatic_optimization:
            return 'gradient_weighting="logged", and self.log_weight(len(batch)) in training_step.'
        return 'gradient_weighting="logged", and self.manual_backward(loss, weight=len(batch)).'

    def _take_logged(self, outputs: Any) -> Any:
        logged = self._module.take_weight()
        returned = outputs.get("weight") if isinstance(outputs, Mapping) else None
        return logged if returned is None else returned

    def scaled(self, loss: Tensor, weight: float | Tensor) -> Tensor:
        """Return what to compute gradients of, for a batch that counts so much.

        Raises:
            InvalidArgumentError: for a logged weight that is negative or not finite.
        """
        if self._strategy.gradient_weighting == "logged":
            return self._strategy.weighted_loss(loss, weight)
        scaled: Tensor = loss * weight
        return scaled

    def window(self, batch_idx: int) -> tuple[int, int]:
        """Return the first batch of a batch's window, and the number behind its last one.

        The first window after a checkpoint from a run with other windows may be a shorter one.
        """
        length = self._settings.accumulate_grad_batches
        first = batch_idx - batch_idx % length
        return max(first, self._begin), int(min(first + length, self._schedule.num_batches))

    def factor(self, batch_idx: int) -> float:
        """Return what a batch counts in its window; DDP then divides by the number of ranks."""
        first, ends_by_rank = self.window(batch_idx)
        if self._sizes is None:
            return self._schedule.weight(first, ends_by_rank)
        sizes = self._sizes
        total = sizes.total(first, self._schedule.ends_by_rank(ends_by_rank, sizes.num_replicas))
        own = 0 if self._schedule.is_shadow else sizes.own(batch_idx)
        return own * sizes.num_replicas / total
