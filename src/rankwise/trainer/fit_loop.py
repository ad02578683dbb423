"""The loop of training: epochs, batches, accumulation, optimizer steps, and when to validate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from typing_extensions import final

from rankwise.errors import ConfigurationError, UnevenInputsError
from rankwise.trainer.hooks import call_hook
from rankwise.trainer.loaders import LoaderShare
from rankwise.trainer.optimizers import step_schedulers
from rankwise.trainer.results import Results

if TYPE_CHECKING:
    from rankwise.trainer.evaluation_loop import EvaluationLoop
    from rankwise.trainer.module import TrainingModule
    from rankwise.trainer.trainer import Trainer

__all__ = ["FitLoop"]


@final
class FitLoop:
    """Train until the trainer's limits are reached, or somebody sets `should_stop`.

    Args:
        trainer: keeps progress and metrics.
        module: the user's.
        wrapped: the same, as the strategy has wrapped it.
        share: this rank's training batches.
        validation: what to run in between; None for nothing.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: TrainingModule,
        wrapped: nn.Module,
        share: LoaderShare,
        validation: EvaluationLoop | None,
    ) -> None:
        self._trainer = trainer
        self._strategy = trainer.strategy
        self._progress = trainer.progress
        self._module = module
        self._wrapped = wrapped
        self._share = share
        self._validation = validation
        self._results = Results(is_evaluation=False)
        self._has_gradients = False

    def run(self) -> None:
        """Train.

        Collective: every rank must call this.

        Raises:
            UnevenInputsError: when the ranks have different numbers of batches.
        """
        trainer = self._trainer
        self._module.train()
        with trainer.in_phase("train", self._results):
            call_hook(trainer, "on_train_start")
            trainer.warn_if_done()
            while not trainer.is_done and self._agreed_num_batches():
                self._run_epoch()
            call_hook(trainer, "on_train_end")

    def _agreed_num_batches(self) -> float:
        """Return how many batches each rank has, after making sure that they are as many on all."""
        lengths = self._strategy.all_gather_object(self._share.num_batches)
        if len(set(lengths)) > 1:
            known = tuple(-1 if math.isinf(length) else int(length) for length in lengths)
            raise UnevenInputsError(loader="The training loader", lengths=known)
        return lengths[0]

    def _run_epoch(self) -> None:
        trainer, progress = self._trainer, self._progress
        progress.begin_epoch()
        self._results = trainer.results = Results(is_evaluation=False)
        self._share.set_epoch(progress.current_epoch)
        call_hook(trainer, "on_train_epoch_start")
        for batch_idx, (batch, is_last) in enumerate(self._share):
            self._run_batch(batch, batch_idx, is_last)
            if trainer.is_done:
                break
        call_hook(trainer, "on_train_epoch_end", before_monitoring=self._end_metrics)
        progress.end_epoch()

    def _end_metrics(self) -> None:
        self._trainer.publish(self._results.epoch_values(self._strategy), is_logged=True)
        if self._progress.is_epoch_done:
            step_schedulers(self._trainer, "epoch", needs_metric=True)

    # ------------------------------------------------------------------ a batch

    def _run_batch(self, batch: Any, batch_idx: int, is_last: bool) -> None:
        trainer = self._trainer
        window = trainer.accumulate_grad_batches
        is_window_end = is_last or (batch_idx + 1) % window == 0
        batch = self._strategy.precision.convert_input(self._strategy.batch_to_device(batch))
        self._results.begin_batch(batch)
        call_hook(trainer, "on_train_batch_start", batch, batch_idx)
        if batch_idx % window == 0:
            self._clear_gradients()
        outputs = self._forward_backward(batch, batch_idx, is_window_end)
        if is_window_end:
            self._optimizer_step()
        self._progress.end_batch(is_last)
        if is_window_end:
            self._step_schedulers("step")
        if is_last:
            self._step_schedulers("epoch")
        publish = self._publish_step if is_window_end else None
        call_hook(trainer, "on_train_batch_end", outputs, batch, batch_idx, before_monitoring=publish)
        self._results.end_batch()
        self._validate_if_due(batch_idx, is_last)

    def _forward_backward(self, batch: Any, batch_idx: int, is_window_end: bool) -> Any:
        """Compute gradients; only the last batch of a window averages them over the ranks."""
        strategy = self._strategy
        with strategy.no_backward_sync(self._wrapped, enabled=not is_window_end):
            with strategy.precision.forward_context():
                outputs = strategy.call_method(self._wrapped, "training_step", batch, batch_idx)
            loss = self._loss_of(outputs, batch_idx)
            if loss is not None and self._trainer.optimizers:
                loss = loss / self._window_size(batch_idx)
                self._module.on_before_backward(loss)
                strategy.backward(loss)
                self._module.on_after_backward()
                self._has_gradients = True
        return outputs

    def _loss_of(self, outputs: Any, batch_idx: int) -> Tensor | None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor) or (loss is None and self._strategy.world_size == 1):
            return loss
        raise ConfigurationError(
            message=f"training_step returned {loss!r} instead of a loss tensor.",
            facts=f"global_rank={self._strategy.global_rank}, batch {batch_idx}; the others wait.",
            remedy="return the loss, or a dictionary with 'loss'; to skip a batch, return the loss times 0.",
        )

    def _window_size(self, batch_idx: int) -> int:
        """Return how many batches the optimizer step is made of; the last window may be shorter."""
        window = self._trainer.accumulate_grad_batches
        start = batch_idx - batch_idx % window
        return int(min(window, self._share.num_batches - start))

    def _clear_gradients(self) -> None:
        self._has_gradients = False
        for optimizer in self._trainer.optimizers:
            self._module.on_before_zero_grad(optimizer)
            optimizer.zero_grad()

    def _optimizer_step(self) -> None:
        for optimizer in self._trainer.optimizers if self._has_gradients else []:
            self._module.on_before_optimizer_step(optimizer)
            self._clip_gradients(optimizer)
            self._strategy.optimizer_step(optimizer)
        self._progress.global_step += 1

    def _clip_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        limit = self._trainer.gradient_clip_val
        if not limit:
            return
        if self._trainer.gradient_clip_algorithm == "norm":
            self._strategy.precision.clip_gradients_norm(optimizer, limit)
        else:
            self._strategy.precision.clip_gradients_value(optimizer, limit)

    def _step_schedulers(self, interval: str) -> None:
        step_schedulers(self._trainer, interval, needs_metric=False)
        if interval == "step":
            step_schedulers(self._trainer, interval, needs_metric=True)

    def _publish_step(self) -> None:
        is_logged = self._progress.global_step % self._trainer.log_every_n_steps == 0
        values = self._results.step_values(self._strategy, is_synced=is_logged)
        self._trainer.publish(values, is_logged=is_logged)

    # ------------------------------------------------------------------ validation

    def _validate_if_due(self, batch_idx: int, is_last: bool) -> None:
        if (
            self._validation is None
            or (self._progress.current_epoch + 1) % self._trainer.check_val_every_n_epoch
        ):
            return
        interval = self._validation_interval()
        if is_last if math.isinf(interval) else (batch_idx + 1) % interval == 0:
            self._validation.run()

    def _validation_interval(self) -> float:
        """Return after how many batches to validate; `inf` stands for the end of the epoch."""
        interval = self._trainer.val_check_interval
        if isinstance(interval, int):
            return interval
        if interval == 1.0 or math.isinf(self._share.num_batches):
            return math.inf
        return max(1, int(self._share.num_batches * interval))
