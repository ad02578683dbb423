"""Fabric: a language model, with accumulated gradients, a checkpoint, and clipped gradients."""

import lightning as L
import torch
from shared import launch, options, processes, record, text
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(128, 16)
        self.rnn = nn.GRU(16, 32, batch_first=True)
        self.head = nn.Linear(32, 128)

    def forward(self, tokens, target):
        out = self.head(self.rnn(self.embed(tokens))[0])
        return nn.functional.cross_entropy(out.flatten(0, 1), target.flatten())


def train(fabric):
    fabric.seed_everything(15)
    parts = text(16 * 128 + 1)
    data = TensorDataset(parts[:-1].view(-1, 16), parts[1:].view(-1, 16))
    model = Recurrent()
    model = fabric.setup(model)
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.5))
    train_loader = fabric.setup_dataloaders(DataLoader(data, batch_size=16 // options().devices))
    for epoch in range(2):
        for index, (tokens, target) in enumerate(train_loader):
            is_accumulating = (index + 1) % 2 != 0
            with fabric.no_backward_sync(model, enabled=is_accumulating):
                fabric.backward(model(tokens, target) / 2)
            if not is_accumulating:
                fabric.clip_gradients(model, optimizer, max_norm=0.25)
                optimizer.step()
                optimizer.zero_grad()
        state = {"model": model, "optimizer": optimizer, "epoch": epoch}
        fabric.save("lm.ckpt", state)
    fabric.barrier()
    state["epoch"] = -1
    fabric.load("lm.ckpt", state)
    record(fabric, model, epoch=state["epoch"])


if __name__ == "__main__":
    launch(L.Fabric(**processes()), train)
