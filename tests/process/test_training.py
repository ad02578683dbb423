"""Training on two ranks gives one process's weights, with one reduction for each optimizer step."""

from pathlib import Path

import pytest
import torch

from tests.helpers.parameters import first
from tests.helpers.scripts import ScriptRunner
from tests.process.helpers import with_tests
from tests.process.training_tasks import CountingStrategy, train_twenty_steps

SCRIPT = """
    import sys, torch
    from tests.process.training_tasks import CountingStrategy, train_twenty_steps

    strategy = CountingStrategy(start_method="popen")
    state = train_twenty_steps(strategy, 2, int(sys.argv[2]))
    if strategy.is_global_zero:
        torch.save(state, sys.argv[1])
"""

METHODS = ("fork", "popen", "spawn", "forkserver")


@pytest.mark.parametrize(
    ("start_method", "accumulate"),
    [*first(2, [(method, 1) for method in METHODS]), *first(1, [(method, 4) for method in METHODS])],
)
def test_two_ranks_train_as_one(
    start_method: str, accumulate: int, run_script: ScriptRunner, tmp_path: Path
) -> None:
    """20 SGD steps on two ranks give one process's weights to 1e-6, with one all-reduce for each step."""
    expected = train_twenty_steps("single_device", 1, accumulate)
    if start_method == "popen":
        result = tmp_path / "state.pt"
        run_script(SCRIPT, str(result), str(accumulate), env=with_tests(), siblings=1).check_returncode()
        state = torch.load(result)
    else:
        state = train_twenty_steps(CountingStrategy(start_method=start_method), 2, accumulate)
    assert state["reductions"].item() == 20
    torch.testing.assert_close(state, expected | {"reductions": torch.tensor(20)}, rtol=0, atol=1e-6)
