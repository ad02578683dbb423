"""What happens to a strategy that is given to two Trainers; importable by workers."""

import torch

from rankwise.strategies import Strategy
from tests.process.training_tasks import Regression, loader, quiet_trainer


def fit_with_two_trainers(strategy: Strategy, devices: int) -> list[tuple[int, list[float]]]:
    """Fit with two Trainers that are given one strategy; return each one's world size and weights."""
    found = []
    for precision in (None, "64-true"):
        trainer = quiet_trainer(strategy, devices, precision=precision, max_steps=2)
        module = Regression()
        trainer.fit(module, loader(8, 4 // devices))
        weights = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
        found.append((trainer.world_size, weights.tolist()))
    return found
