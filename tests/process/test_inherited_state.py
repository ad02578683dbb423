"""Workers begin with the random state and torch's flags of the process that launches them."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from rankwise import DDPStrategy, seed_everything
from rankwise.launchers.process_state import ProcessState
from rankwise.seed import given_seed
from rankwise.strategies import Strategy
from tests.helpers.parameters import first
from tests.process.host_cases import strategy_of
from tests.process.test_given_launchers import PlainLauncher

Facts = dict[str, Any]
MEMORY: Any = torch.utils.deterministic  # typed without its attribute


def facts(strategy: Strategy | None = None) -> Facts:
    return {
        "precision": (torch.get_float32_matmul_precision(), torch.get_default_dtype(), torch.ones(1).dtype),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warns only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "cuDNN": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        "TF32": torch.backends.cudnn.allow_tf32,
        "attention": torch.backends.cuda.flash_sdp_enabled(),
        "anomalies": torch.is_anomaly_enabled(),
        "memory": (MEMORY.fill_uninitialized_memory, torch.multiprocessing.get_sharing_strategy()),
        "seeds": (given_seed(), torch.initial_seed()),
        "drawn": (float(torch.rand(())), random.random(), float(np.random.rand())),
    }


@pytest.fixture
def caller() -> Iterator[Facts]:
    """What this process has seeded and set, and the numbers that it would draw next."""
    before = ProcessState.of_this_process()
    seed_everything(42)
    torch.set_float32_matmul_precision("medium")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_default_dtype(torch.float64)
    torch.backends.cudnn.benchmark = torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.enable_flash_sdp(False)
    torch.autograd.set_detect_anomaly(True)
    MEMORY.fill_uninitialized_memory = False
    torch.multiprocessing.set_sharing_strategy("file_system")
    random.random()  # the state is not that of a seed
    state = ProcessState.of_this_process()
    try:
        expected = facts()
        state.take_over()
        yield expected
    finally:
        before.take_over()


@pytest.mark.quick
@pytest.mark.parametrize(
    "method",
    [*first(2, ["fork", "elastic-fork", "spawn", "forkserver", "elastic-spawn", "elastic-forkserver"])],
)
def test_ranks_begin_as_the_caller_is(method: str, caller: Facts) -> None:
    """Each rank has the caller's flags, and draws what the caller would draw; so do those of a second job."""
    strategy = strategy_of(method)
    for _ in range(2):
        strategy.launch(facts)
        assert strategy.results == {0: caller, 1: caller}


@pytest.mark.soak
def test_ranks_of_a_given_launcher(caller: Facts) -> None:
    """A new interpreter that the user's own launcher has started does, too."""
    strategy = DDPStrategy(launcher=PlainLauncher("spawn"), accelerator="cpu", devices=1)
    assert strategy.launch(facts) == caller
