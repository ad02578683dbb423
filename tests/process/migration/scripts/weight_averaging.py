"""Averaged weights: a moving average in one run, stochastic weight averaging in another."""

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
)
from shared import loader, record, settings
from torch import nn


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.2)


def fit(callback):
    pl.seed_everything(23)
    model = Net()
    growing = GradientAccumulationScheduler({0: 1, 2: 2})
    trainer = pl.Trainer(**settings(max_epochs=4, callbacks=[callback, growing], enable_checkpointing=False))
    trainer.fit(model, loader(0, 256), loader(512, 128))
    return trainer, model


if __name__ == "__main__":
    _, averaged = fit(EMAWeightAveraging(decay=0.9))
    weight = averaged.net[1].weight.detach().clone()
    trainer, model = fit(StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2, annealing_epochs=1))
    record(trainer, model, moving_average=weight)
