"""A run under a profiler, with a limit of steps and statistics of each callback."""

import lightning.pytorch as pl
import torch
from lightning.pytorch.profilers import SimpleProfiler
from shared import loader, processes, record
from torch import nn


class Convolutional(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
        self.example_input_array = torch.zeros(1, 1, 8, 8)

    def forward(self, x):
        return self.layers(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self(x), y), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main():
    pl.seed_everything(12)
    profiler = SimpleProfiler(dirpath=".", filename="profile")
    model = Convolutional()
    trainer = pl.Trainer(
        max_epochs=2,
        limit_train_batches=4,
        limit_val_batches=2,
        log_every_n_steps=1,
        profiler=profiler,
        enable_progress_bar=False,
        **processes(),
    )
    trainer.fit(model, loader(), loader(512, 128))
    record(trainer, model)


if __name__ == "__main__":
    main()
