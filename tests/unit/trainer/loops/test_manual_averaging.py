"""How manual optimisation averages gradients on several ranks, here threads: weighted, and through hooks."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from rankwise import TrainingModule
from rankwise.errors import ConfigurationError
from rankwise.precision import MixedPrecision
from tests.helpers.exactness import Case, Model, expected_weights, loader
from tests.unit.gradient_sync.helpers import assert_each, fit_on_ranks

# Batches of 4 and 2 samples on rank 0, of 4 and 1 on rank 1; then rank 1 repeats its last one.
UNEVEN = Case(2, 11, 4, 1, uneven_inputs="join")
SHADOWED = Case(3, 7, 1, 1, uneven_inputs="join", optimizer="adam")


class Manual(Model):
    """Takes its steps itself, in as many backward passes as there are parts, with weights as in the case."""

    def __init__(self, case: Case, *, parts: Sequence[float] = (1.0,), weight: int | None = None) -> None:
        super().__init__(case)
        self.automatic_optimization = False
        self.parts, self.weight = parts, weight

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]  # steps by itself
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for part in self.parts:
            weight = len(batch[0]) if self.case.weighting == "logged" else self.weight
            self.manual_backward(self.loss(batch[0]) * part, weight=weight)
        self.trainer.strategy.precision.clip_gradients_norm(optimizer.optimizer, 1e9)
        optimizer.step()


def train(case: Case, kind: Callable[[Case], Model], **options: Any) -> list[Tensor]:
    """Fit on threads; return each rank's weights."""
    modules = [kind(case) for _ in range(case.world_size)]
    return fit_on_ranks(modules, loader(case), {**case.strategy_options, **options}, **case.trainer_options)


@pytest.mark.full
@pytest.mark.parametrize("parts", [(1.0,), (0.25, 0.75)])
@pytest.mark.parametrize("weighting", ["samples", "logged"])
@pytest.mark.parametrize("case", [UNEVEN, SHADOWED])
def test_weights(case: Case, weighting: str, parts: tuple[float, ...]) -> None:
    """Batches of other sizes and numbers on each rank, in one backward pass or two: one process's weights."""
    case = replace(case, weighting=weighting)
    assert_each(train(case, partial(Manual, parts=parts)), expected_weights(case))


def test_one_process_alone() -> None:
    """A weight is divided by itself where there is nobody else."""
    case = Case(1, 5, 2, 1, weighting="logged")
    assert_each(train(case, Manual), expected_weights(case))


class Blocked(Manual):
    """Does not average its first backward pass."""

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]  # steps by itself
        with self.no_backward_sync():
            super().training_step(batch, batch_idx)


EVEN = Case(2, 8, 2, 1)


@pytest.mark.parametrize(
    ("weighting", "kind", "words"),
    [
        ("logged", Blocked, "is blocked"),
        ("logged", lambda case: Manual(replace(case, weighting=None)), "has no weight"),
        ("samples", partial(Manual, weight=1), "not weighted by it"),
    ],
)
def test_weights_that_cannot_be(weighting: str, kind: Callable[[Case], Model], words: str) -> None:
    """A weight that is missing, one that would be averaged with none, and one that nobody asked for."""
    with pytest.raises(ConfigurationError, match=words):
        train(replace(EVEN, weighting=weighting), kind)


def test_a_hook_of_ones_own_gets_buckets() -> None:
    """It is given what torch's buckets have, and its future is waited for."""
    seen: list[dict[str, Any]] = []

    def hook(state: list[Any], bucket: Any) -> torch.futures.Future[Tensor]:
        gradients, parameters = bucket.gradients(), bucket.parameters()
        fits = [gradient.shape == other.shape for gradient, other in zip(gradients, parameters, strict=True)]
        state.append({"index": bucket.index(), "is_last": bucket.is_last(), "fits": all(fits)})
        bucket.set_buffer(bucket.buffer() / 2)
        work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
        future: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
        return future

    found = train(EVEN, Manual, gradient_weighting=None, comm_hook=hook, comm_state=seen)
    assert_each(found, expected_weights(EVEN))
    assert seen
    assert all(each == {"index": 0, "is_last": True, "fits": True} for each in seen)


@pytest.mark.parametrize(
    ("options", "atol"),
    [
        ({"comm_hook": "allreduce"}, 1e-12),
        ({"comm_hook": "fp16_compress"}, 1e-2),
        ({"comm_hook": "bf16_compress"}, 5e-2),
        ({"comm_hook": "allreduce", "comm_wrapper": "fp16"}, 1e-2),
    ],
)
def test_named_hooks(options: dict[str, Any], atol: float) -> None:
    """All ranks have the same weights, as exact as the hook is; with samples weighted, too."""
    expected = expected_weights(UNEVEN)
    found = train(UNEVEN, Manual, **options)
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], expected, rtol=0, atol=atol)
    assert atol < 1e-9 or not torch.allclose(found[0], expected, rtol=0, atol=1e-9)


class Overflowing(TrainingModule):
    """Steps on gradients that the ranks have not averaged, after a backward pass of another optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        factor = float("inf") if self.global_rank == 1 else 1.0
        with first.toggled(), self.no_backward_sync():
            self.manual_backward(self.first(batch[0]).float().mean() * factor)
        with second.toggled():
            self.manual_backward(self.second(batch[0]).float().mean())
        first.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (self.first, self.second)]


def test_a_skipped_step_of_gradients_of_ones_own() -> None:
    """All ranks skip a step for which one rank's own gradients overflow, whatever was averaged since."""
    modules = [Overflowing() for _ in range(2)]
    before = modules[0].first.weight.detach().clone()
    data = DataLoader(TensorDataset(torch.ones(2, 1)), batch_size=1)
    fit_on_ranks(modules, data, plugins=MixedPrecision("16-mixed", init_scale=2.0**8), max_steps=1)
    for module in modules:
        assert torch.equal(module.first.weight, before)
