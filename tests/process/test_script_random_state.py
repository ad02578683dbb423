"""An unseeded script under "ddp" draws the same random numbers in all processes that run it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.helpers.shared import computed_once
from tests.process.helpers import module_runner, with_tests

SCRIPT = """
    import random
    {first}
    from rankwise import Trainer, TrainingModule
    import numpy as np
    import torch
    from torch.utils.data import DataLoader, TensorDataset, random_split
    from tests.process.training_tasks import Regression, loader, quiet_trainer

    numbers = [random.random(), float(torch.rand(())), float(np.random.rand()), float(torch.randn(()))]
    training, _ = random_split(torch.arange(40).tolist(), [32, 8])
    numbers += list(training.indices)

    class Gathering(Regression):
        def on_train_end(self):
            found = self.trainer.strategy.all_gather_object((numbers, float(torch.rand(()))))
            if self.global_rank == 0:
                print("FOUND", __import__("json").dumps(found))

    {second}
    quiet_trainer("ddp", {devices}, max_epochs=1).fit(Gathering(), loader(12, 2))
"""
PLACES = {
    "before all others": ("", ""),
    "after torch": ("import torch", ""),
    "seeded": ("import torch; torch.manual_seed(3)", "random.seed(4)"),
}


@pytest.fixture(params=list(PLACES))
@computed_once
def found(request: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each process has drawn before the launch."""
    first, second = PLACES[request.param]
    with module_runner(tmp_path_factory.mktemp("script")) as runner:
        script = SCRIPT.format(first=first, second=second, devices=3)
        is_start = not first and not second  # then nothing has been imported before
        result = runner(script, env=with_tests(), siblings=0 if is_start else 2)
    assert result.returncode == 0, result
    [line] = [line for line in result.stdout.splitlines() if line.startswith("FOUND")]
    ranks: list[Any] = json.loads(line.removeprefix("FOUND"))
    return ranks


def test_processes_begin_with_the_same_random_state(found: list[Any]) -> None:
    """Numbers of torch, NumPy and Python, and a random split, are the same before the launch."""
    assert len(found) == 3
    first, *others = [before for before, _ in found]
    assert all(numbers == first for numbers in others)
