"""What happens to a strategy: launched twice, and given to two Trainers; importable by workers."""

from typing import Any

import torch
from torch import nn

from rankwise import Trainer
from rankwise.registry import StrategyRegistry
from rankwise.strategies import Strategy
from tests.process.training_tasks import Regression, loader


def step_of_rank(strategy: Strategy, number: int) -> tuple[int, int, float]:
    """Train one step with a new module; return the launch, this rank and the sum of the gradients."""
    wrapped = strategy.setup_module(nn.Linear(1, 1, bias=False))
    strategy.backward(wrapped(torch.tensor([[strategy.global_rank + 1.0]])).sum())
    gradient = strategy.unwrap_module(wrapped).weight.grad
    assert isinstance(gradient, torch.Tensor)
    return number, strategy.global_rank, float(gradient)


def life_of(name: str, devices: int) -> tuple[list[list[Any]], list[Any]]:
    """Return every local rank's values of two launches, and what two Trainers give, of a named strategy."""
    strategy = StrategyRegistry.create(name, accelerator="cpu", devices=devices)
    launched = []
    for number in range(2):
        strategy.launch(step_of_rank, number)
        launched.append(list(strategy.results.values()))
    return launched, fit_with_two_trainers(StrategyRegistry.create(name), devices)


def fit_with_two_trainers(strategy: Strategy, devices: int) -> list[tuple[int, list[float]]]:
    """Fit with two Trainers that are given one strategy; return each one's world size and weights."""
    found = []
    for precision in (None, "64-true"):
        trainer = Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=devices,
            precision=precision,
            max_steps=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        module = Regression()
        trainer.fit(module, loader(8, 4 // devices))
        weights = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
        found.append((trainer.world_size, weights.tolist()))
    return found
