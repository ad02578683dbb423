"""An unseeded script under "ddp" draws the same random numbers in all processes that run it."""

import pytest

from tests.helpers.scripts import ScriptRunner
from tests.process.helpers import with_tests

SCRIPT = """
    import json, random, sys
    {first}
    import rankwise
    import numpy as np
    import torch
    from torch.utils.data import random_split
    from tests.process.training_tasks import Regression, loader, quiet_trainer

    numbers = [random.random(), float(torch.rand(())), float(np.random.rand()), float(torch.randn(()))]
    training, _ = random_split(torch.arange(40).tolist(), [32, 8])
    numbers += list(training.indices)
    sys.stdout.write(json.dumps(numbers) + "\\n")
    {second}
    quiet_trainer("ddp", 3, max_epochs=1).fit(Regression(), loader(12, 2))
"""


@pytest.mark.parametrize(
    ("first", "second"),
    [("", ""), ("import torch", ""), ("import torch; torch.manual_seed(3)", "random.seed(4)")],
    ids=["before all others", "after torch", "seeded"],
)
def test_processes_begin_with_the_same_random_state(
    first: str, second: str, run_script: ScriptRunner
) -> None:
    """Numbers of torch, NumPy and Python, and a random split, are the same before the launch."""
    siblings = 2 if first else 0  # without `first`, nothing has been imported before
    result = run_script(SCRIPT.format(first=first, second=second), env=with_tests(), siblings=siblings)
    assert result.returncode == 0, result
    numbers, *others = result.stdout.splitlines()
    assert others == [numbers] * 2
