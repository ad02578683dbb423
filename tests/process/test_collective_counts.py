"""The number of collectives of a step on two processes, by gloo's own sequence numbers."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from rankwise.callbacks import Callback
from rankwise.process_group import gather_all_tensors
from rankwise.strategies import DDPStrategy
from rankwise.testing import run_distributed
from tests.helpers.shared import computed_once
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


def count_steps(strategy: DDPStrategy) -> dict[tuple[str, str | None, str], tuple[int, int]]:
    """Return the collectives of some windows and the number of DDP's buckets."""
    found = {}
    for mode in MODES:
        for weighting in WEIGHTINGS:
            for hook in (None, "fp16_compress") if mode != "forced_sync" else (None,):
                options: dict[str, Any] = {"sync_mode": mode, "gradient_weighting": weighting}
                strategy.gradients = DDPStrategy(comm_hook=hook, **options).gradients
                strategy.ddp_kwargs = {"bucket_cap_mb": 0.0005}
                wrapped: Any = strategy.setup_module(deep())
                window(strategy, wrapped)
                window(strategy, wrapped)  # DDP has rebuilt its buckets by now
                buckets = len(wrapped.reducer._get_zeros_like_grad_buckets())
                count = Count()
                for _ in range(WINDOWS):
                    window(strategy, wrapped)
                found[mode, weighting, str(hook)] = count.now(), buckets
    return found


def count_gathers(strategy: DDPStrategy) -> list[int]:
    """Return the collectives of gathering small and large tensors of uneven sizes."""
    found = []
    for size in (3, 30_000):
        count = Count()
        gather_all_tensors(torch.ones(size + strategy.global_rank))
        found.append(count.now())
    return found


def count_everything(strategy: DDPStrategy) -> Any:
    """Count steps and gathers on this rank."""
    return count_steps(strategy), count_gathers(strategy)


@pytest.fixture
@computed_once
def counts() -> Any:
    """Return what both ranks counted."""
    return run_distributed(count_everything)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("mode", MODES)
def test_one_collective_for_each_bucket_and_step(mode: str, weighting: str | None, counts: Any) -> None:
    """Under accumulation there is one for each bucket and optimizer step, whatever weighs the batches.

    With `multi_auto_sync` each microbatch reduces; forced sync makes one bucket of all. Hooks change nothing.
    """
    hooks = ["None"] if mode == "forced_sync" else ["None", "fp16_compress"]
    for found, _ in counts:
        for hook in hooks:
            calls, buckets = found[mode, weighting, hook]
            assert buckets > 2 or mode == "forced_sync"
            each = {"single_auto_sync": buckets, "multi_auto_sync": buckets * MICROBATCHES, "forced_sync": 1}
            assert calls == each[mode] * WINDOWS, hook


def test_gather_all_tensors_takes_at_most_two_collectives(counts: Any) -> None:
    """Small tensors take one collective; large ones also one message sent and one received."""
    for _, gathers in counts:
        assert gathers == [1, 1 + 2]


class Counting(Callback):
    """Notes how many collectives there were at the end of each step, and asks to stop on rank 1."""

    STOPS_AT = 4

    def __init__(self) -> None:
        self.count: Count | None = None
        self.found: list[int] = []

    @override
    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.count = Count()

    @override
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 1 and trainer.global_step == self.STOPS_AT:
            trainer.should_stop = True
        assert self.count is not None
        self.found.append(self.count.now())

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"found": self.found}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.found = list(state["found"])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "count": None}


class Silent(Regression):
    """Logs nothing, since what is logged is reduced too, and has no buffers, since DDP sends rank 0's."""

    def __init__(self) -> None:
        super().__init__()
        del self.reductions

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = nn.functional.mse_loss(self(batch[0]), batch[1])
        return loss


@pytest.mark.quick
def test_stopping_takes_no_collective() -> None:
    """One rank asks to stop, all stop after the same step, and each step has one all-reduce only."""
    noted = Counting()
    trainer = quiet_trainer("ddp_fork", 2, max_steps=400, callbacks=[noted])
    trainer.fit(Silent(), loader(4000, 4))
    assert Counting.STOPS_AT <= trainer.global_step < 400
    assert len(noted.found) == trainer.global_step
    # The second step has one more: DDP agrees on new buckets, once.
    each = [after - before for before, after in pairwise(noted.found)]
    assert set(each[2:]) == {1}, noted.found


class Telling(Silent):
    """Logs several values of each step that are reduced over the ranks."""

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log_dict({"loss": loss, "half": loss / 2}, sync_dist=True)
        self.log("largest", loss, sync_dist=True, reduce_fx="max", on_step=True, on_epoch=True)
        return loss


def test_logged_values_take_one_collective() -> None:
    """All values of a step are reduced at once, after the gradients."""
    noted = Counting()
    quiet_trainer("ddp_fork", 2, max_steps=8, callbacks=[noted]).fit(Telling(), loader(4000, 4))
    each = [after - before for before, after in pairwise(noted.found)]
    assert set(each[2:]) == {2}, noted.found
