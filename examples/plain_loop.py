"""A training loop without a Trainer: the strategy launches, wraps and synchronises."""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

from rankwise import Strategy, StrategyRegistry


def train(strategy: Strategy, epochs: int) -> float:
    """Train on this rank's part of the digits; return the accuracy over all of them."""
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images / 16, dtype=torch.float32)[strategy.global_rank :: strategy.world_size]
    y = torch.tensor(labels)[strategy.global_rank :: strategy.world_size]
    model = strategy.setup_module(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batches = len(x) // 64  # the same number on every rank

    for _ in range(epochs):
        for batch in range(batches):
            part = slice(batch * 64, (batch + 1) * 64)
            loss = nn.functional.cross_entropy(model(x[part]), y[part])
            optimizer.zero_grad()
            strategy.backward(loss)
            strategy.optimizer_step(optimizer)

    with torch.no_grad():
        right = (strategy.unwrap_module(model)(x).argmax(dim=1) == y).sum()
    counts = strategy.all_reduce(torch.stack([right, torch.tensor(len(y))]), reduce_op="sum")
    return (counts[0] / counts[1]).item()


def main() -> None:
    """Launch on two processes and print rank zero's value."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", default="ddp_spawn")
    arguments = parser.parse_args()
    strategy = StrategyRegistry.create(arguments.strategy, devices=2)
    accuracy = strategy.launch(train, epochs=5)
    if strategy.is_global_zero:
        print(f"accuracy {accuracy:.1%}, the same on every rank: {strategy.results}")


if __name__ == "__main__":
    main()
