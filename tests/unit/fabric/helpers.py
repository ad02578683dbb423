"""A classifier, its data, and the loop that trains it with a Fabric."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from rankwise import Fabric

CLASSES = 3


class Classifier(nn.Module):
    """Two layers, with a method beside `forward` that computes a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 8)
        self.layers = nn.Sequential(self.first, nn.ReLU(), nn.Linear(8, CLASSES))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        output: Tensor = self.layers(x)
        return output

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.loss(*batch)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self(x), y)

    def count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())


def data(count: int = 32) -> TensorDataset:
    """Return `count` samples of four features, each with a class."""
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(count, 4, generator=generator), torch.randint(0, CLASSES, (count,), generator=generator)
    )


def fabric(**options: Any) -> Fabric:
    """Return a Fabric for this process alone."""
    return Fabric(**{"accelerator": "cpu", "devices": 1, **options})


def train(
    fabric: Fabric,
    own: nn.Module | None = None,
    *,
    epochs: int = 2,
    accumulate: int = 1,
    clip: float | None = None,
    shuffle: bool = True,
) -> dict[str, Tensor]:
    """Train a classifier on global batches of eight samples; return its weights."""
    own = Classifier() if own is None else own
    module, optimizer = fabric.setup(own, torch.optim.Adam(own.parameters(), lr=0.01))
    size = 8 // fabric.world_size // accumulate
    loader = fabric.setup_dataloaders(DataLoader(data(), batch_size=size, shuffle=shuffle))
    for _ in range(epochs):
        for number, batch in enumerate(loader, 1):
            is_last = number % accumulate == 0
            with fabric.no_backward_sync(module, enabled=not is_last):
                fabric.backward(module.training_step(batch) / accumulate)
            if is_last:
                if clip is not None:
                    fabric.clip_gradients(module, optimizer, max_norm=clip)
                optimizer.step()
                optimizer.zero_grad()
    return {name: value.clone() for name, value in module.state_dict().items()}


def largest_difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """Return the largest difference of any weight."""
    assert list(first) == list(second)
    return max(float((first[name] - second[name]).abs().max()) for name in first)
