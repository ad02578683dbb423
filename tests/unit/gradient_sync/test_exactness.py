"""Property: N ranks, here threads, get the weights of one process on the same global data."""

import warnings

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from tests.helpers.exactness import Case, Model, cases, expected_weights, loader
from tests.unit.gradient_sync.helpers import assert_each, fit_on_ranks


def train(case: Case) -> list[Tensor]:
    """Fit on threads; return each rank's weights."""
    modules = [Model(case) for _ in range(case.world_size)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="find_unused_parameters")  # not what this is about
        return fit_on_ranks(modules, loader(case), case.strategy_options, **case.trainer_options)


def check(case: Case) -> None:
    """All ranks have one process's weights."""
    assert_each(train(case), expected_weights(case), 1e-6)


SLOW = [HealthCheck.too_slow]
FEW = settings(max_examples=15, deadline=None, derandomize=True, database=None, suppress_health_check=SLOW)
MANY = settings(max_examples=250, deadline=None, database=None, suppress_health_check=SLOW)


@FEW
@given(cases())
def test_ranks_equal_one_process(case: Case) -> None:
    """The weights after two epochs are those of one process on the concatenated data, to 1e-6."""
    check(case)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@MANY
@given(cases())
def test_ranks_equal_one_process_again_and_again(case: Case) -> None:
    """The same with many more examples, which differ from run to run."""
    check(case)


@pytest.mark.parametrize("mode", ["single_auto_sync", "multi_auto_sync", "forced_sync"])
def test_a_parameter_that_only_an_early_microbatch_uses(mode: str) -> None:
    """DDP's last reduction does not change its gradient, but the gradient is weighted like the others."""
    check(Case(1, 2, 1, 2, kind="branching", weighting="logged", sync_mode=mode))
    check(Case(2, 8, 1, 3, kind="branching", weighting="logged", sync_mode=mode))


def test_without_weights_they_differ() -> None:
    """The property is not trivial: without weights, different batch sizes give another model."""
    case = Case(2, 11, 4, 2, weighting="samples", uneven_inputs="join")
    unweighted = Case(2, 11, 4, 2, weighting=None, uneven_inputs="join")
    assert not torch.allclose(train(unweighted)[0], expected_weights(case), rtol=0, atol=1e-4)
