"""Fabric: a loop of one's own over a classifier."""

import torch
from lightning.fabric import Fabric, seed_everything
from shared import launch, loader, processes, record
from torch import nn


def train(fabric):
    seed_everything(14)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(model, optimizer)
    train_loader, test_loader = fabric.setup_dataloaders(loader(), loader(512, 256))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    for _epoch in range(3):
        model.train()
        for _, (data, target) in enumerate(train_loader):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(data), target)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=5.0)
            optimizer.step()
        scheduler.step()
    model.eval()
    correct = torch.tensor(0.0, device=fabric.device)
    with torch.no_grad():
        for data, target in test_loader:
            correct += (model(data).argmax(1) == target).sum()
    correct = fabric.all_reduce(correct, reduce_op="sum")
    fabric.print(f"accuracy {correct / 256:.3f}")
    record(fabric, model, correct=float(correct))


if __name__ == "__main__":
    launch(Fabric(**processes()), train)
