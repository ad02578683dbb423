"""The number of collectives of a step on two processes, by gloo's own sequence numbers."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rankwise.process_group import gather_all_tensors
from rankwise.strategies import DDPStrategy
from tests.process.training_tasks import Regression, loader, quiet_trainer

MODES = ("single_auto_sync", "multi_auto_sync", "forced_sync")
WEIGHTINGS = (None, "logged")  # "samples" scales losses, and is nothing more to DDP
WINDOWS, MICROBATCHES = 2, 4


class Count:
    """How many collectives and messages the group of all ranks has begun since this was made.

    Whoever asked for them: gloo itself numbers them, those that DDP starts from C++ included.
    """

    def __init__(self) -> None:
        self._before = self._number()

    @staticmethod
    def _number() -> int:
        world: Any = torch.distributed.group.WORLD
        number: int = world._get_backend(torch.device("cpu"))._get_sequence_number_for_group()
        return number

    def now(self) -> int:
        """Return how many by now."""
        return self._number() - self._before


def deep() -> nn.Module:
    """Return a model of six layers; with small buckets it has several."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))


def window(strategy: DDPStrategy, wrapped: nn.Module) -> None:
    """Accumulate, weighing the losses where that is asked for."""
    for number in range(MICROBATCHES):
        with strategy.gradient_sync_context(wrapped, is_final_microbatch=number == MICROBATCHES - 1):
            loss: Tensor = wrapped(torch.ones(2, 8)).sum()
            is_logged = strategy.gradient_weighting == "logged"
            (strategy.weighted_loss(loss, number + 1) if is_logged else loss).backward()
    wrapped.zero_grad()


@pytest.mark.distributed
@pytest.mark.parametrize("mode", MODES)
def test_one_collective_for_each_bucket_and_step(mode: str, rank_strategy: DDPStrategy) -> None:
    """Under accumulation there is one for each bucket and optimizer step, whatever weighs the batches.

    With `multi_auto_sync` each microbatch reduces; forced sync makes one bucket of all. Hooks change nothing.
    """
    rank_strategy.ddp_kwargs = {"bucket_cap_mb": 0.0005}
    hooks = (None,) if mode == "forced_sync" else (None, "fp16_compress")
    for weighting, hook in itertools.product(WEIGHTINGS, hooks):
        options: dict[str, Any] = {"sync_mode": mode, "gradient_weighting": weighting, "comm_hook": hook}
        rank_strategy.gradients = DDPStrategy(**options).gradients
        wrapped: Any = rank_strategy.setup_module(deep())
        window(rank_strategy, wrapped)
        window(rank_strategy, wrapped)  # DDP has rebuilt its buckets by now
        buckets = len(wrapped.reducer._get_zeros_like_grad_buckets())
        count = Count()
        for _ in range(WINDOWS):
            window(rank_strategy, wrapped)
        each = {"single_auto_sync": buckets, "multi_auto_sync": buckets * MICROBATCHES, "forced_sync": 1}
        assert count.now() == each[mode] * WINDOWS, options
        assert buckets > 2 or mode == "forced_sync"


@pytest.mark.distributed
def test_gather_all_tensors_takes_at_most_two_collectives(rank_strategy: DDPStrategy) -> None:
    """Small tensors take one collective; large ones also one message sent and one received."""
    for size, expected in ((3, 1), (30_000, 1 + 2)):
        count = Count()
        gather_all_tensors(torch.ones(size + rank_strategy.global_rank))
        assert count.now() == expected


class Silent(Regression):
    """Notes how many collectives there were at the end of each step; on rank 1 it asks to stop.

    It logs nothing, since what is logged is reduced too, and has no buffers, since DDP sends rank 0's.
    """

    STOPS_AT = 4

    def __init__(self) -> None:
        super().__init__()
        del self.reductions
        self.found: list[int] = []

    def on_train_start(self) -> None:
        self.count = Count()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = nn.functional.mse_loss(self(batch[0]), batch[1])
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 1 and self.trainer.global_step == self.STOPS_AT:
            self.trainer.should_stop = True
        self.found.append(self.count.now())


class Telling(Silent):
    """Logs several values of each step that are reduced over the ranks."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log_dict({"loss": loss, "half": loss / 2}, sync_dist=True)
        self.log("largest", loss, sync_dist=True, reduce_fx="max", on_step=True, on_epoch=True)
        return loss


@pytest.mark.parametrize(
    ("module", "count"), [pytest.param(Silent(), 1, marks=pytest.mark.quick), (Telling(), 2)]
)
def test_collectives_of_a_step(module: Silent, count: int) -> None:
    """One all-reduce has the gradients, and one all logged values; to stop on all ranks takes none."""
    trainer = quiet_trainer("ddp_fork", 2, max_steps=400)
    trainer.fit(module, loader(4000, 4))
    assert module.STOPS_AT <= trainer.global_step < 400
    assert len(module.found) == trainer.global_step
    # The second step has one more: DDP agrees on new buckets, once.
    each = [after - before for before, after in itertools.pairwise(module.found)]
    assert set(each[2:]) == {count}, module.found
