"""Padding steps of models that do not use all parameters for all batches: optimizers see one process's."""

import warnings
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor
from torch.utils.data import DataLoader

from tests.helpers.exactness import Case, Model, expected_weights, loader
from tests.helpers.threaded import counted_reductions
from tests.unit.gradient_sync.helpers import assert_each, fit_on_ranks, step_by_hand
from tests.unit.trainer.helpers import Stream

# Rank 0 has three batches, rank 1 two; the one that rank 1 repeats uses the branch, rank 0's third does not.
CASE = Case(2, 5, 1, 1, kind="branching", weighting="logged", uneven_inputs="join")
MODES = ["single_auto_sync", "multi_auto_sync", "forced_sync"]


class Manual(Model):
    """The same, optimised manually."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]  # steps by itself
        step_by_hand(self, self.loss(batch[0]))


def train(case: Case, kind: type[Model] = Model, *, is_sized: bool = True, **options: Any) -> list[Tensor]:
    """Fit on two threads; return each rank's weights."""
    modules = [kind(case) for _ in range(2)]
    options = {**case.strategy_options, **options}
    batches = list(loader(case))
    data = loader(case) if is_sized else lambda rank: DataLoader(Stream(batches[rank::2]), batch_size=None)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="find_unused_parameters")  # not what this is about
        return fit_on_ranks(modules, data, options, use_distributed_sampler=is_sized, **case.trainer_options)


def check(found: list[Tensor], case: Case) -> None:
    assert_each(found, expected_weights(case))


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_what_only_a_repeated_batch_uses_is_left_alone(mode: str, accumulate: int) -> None:
    """Momentum does not move a parameter that no real batch of the window has used, on any rank."""
    case = replace(CASE, sync_mode=mode, accumulate=accumulate)
    check(train(case), case)


@pytest.mark.parametrize("mode", MODES)
def test_numbers_of_batches_that_nobody_knows(mode: str) -> None:
    """The same, where ranks learn only step by step who has run out."""
    case = replace(CASE, sync_mode=mode)
    check(train(case, is_sized=False), case)


def test_manual_optimisation() -> None:
    """The same, where the module itself runs backward passes."""
    check(train(CASE, Manual, gradient_weighting=None), CASE)


def test_what_it_costs() -> None:
    """One more all-reduce in the windows that have a padding step, and none where gradients are forced."""
    length = sum(1 for _ in Model(CASE).parameters())

    def flags(case: Case) -> int:
        with counted_reductions() as counted:
            train(case)
        return counted[0].count(length)

    uneven = replace(CASE, weighting="samples")  # logged weights would travel as one parameter more
    even = replace(uneven, num_samples=6)
    of_torch = flags(even)  # torch's own search reduces as many flags, in each step
    assert of_torch == 3 * CASE.max_epochs
    assert flags(uneven) == of_torch + CASE.max_epochs
    assert flags(replace(uneven, sync_mode="forced_sync")) == flags(replace(even, sync_mode="forced_sync"))
