"""A project that records with Weights & Biases, offline: parameters, metrics, and a summary at the end."""

import os

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from shared import loader, record, settings
from torch import nn


class LitClassifier(pl.LightningModule):
    def __init__(self, n_layer_1: int = 32, lr: float = 0.1):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, n_layer_1), nn.ReLU(), nn.Linear(n_layer_1, 10))
        self.save_hyperparameters()

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        self.log("valid/loss_epoch", nn.functional.cross_entropy(logits, y), sync_dist=True)
        self.log("valid/acc_epoch", (logits.argmax(1) == y).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


if __name__ == "__main__":
    os.environ["WANDB_MODE"] = "offline"
    os.environ["WANDB_SILENT"] = "true"
    pl.seed_everything(19)
    model = LitClassifier()
    wandb_logger = WandbLogger(project="digits", save_dir=".", offline=True)
    callbacks = [
        ModelCheckpoint(monitor="valid/acc_epoch", mode="max"),
        EarlyStopping("valid/loss_epoch", min_delta=10.0, patience=2),
        LearningRateMonitor(),
    ]
    loggers = [CSVLogger("."), wandb_logger]
    trainer = pl.Trainer(**settings(max_epochs=8, log_every_n_steps=3, callbacks=callbacks, logger=loggers))
    trainer.fit(model, loader(0, 256), loader(512, 128))
    record(trainer, model, stopped=trainer.current_epoch)
