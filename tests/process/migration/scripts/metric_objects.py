"""Metrics of torchmetrics: objects that are logged, and one that is computed at the end of the epoch."""

import lightning.pytorch as pl
import torch
import torchmetrics
from lightning.pytorch.callbacks import LambdaCallback, Timer
from shared import loader, record, settings
from torch import nn


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        self.train_acc = torchmetrics.Accuracy("multiclass", num_classes=10)
        self.valid = torchmetrics.MetricCollection(
            {
                "acc": torchmetrics.Accuracy("multiclass", num_classes=10),
                "f1": torchmetrics.F1Score("multiclass", num_classes=10, average="macro"),
            },
            prefix="val_",
        )
        self.confusion = torchmetrics.ConfusionMatrix("multiclass", num_classes=10)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        self.train_acc(logits, y)
        self.log("train_acc", self.train_acc, on_step=False, on_epoch=True)
        return nn.functional.cross_entropy(logits, y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        self.valid.update(logits, y)
        self.confusion.update(logits, y)
        self.log_dict(self.valid, on_step=False, on_epoch=True)

    def on_validation_epoch_end(self):
        matrix = self.confusion.compute()
        self.log("diagonal", matrix.diag().sum().float())
        self.confusion.reset()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


if __name__ == "__main__":
    pl.seed_everything(27)
    model = Net()
    seen = []
    counting = LambdaCallback(on_train_epoch_end=lambda trainer, module: seen.append(trainer.current_epoch))
    trainer = pl.Trainer(**settings(max_epochs=3, callbacks=[counting, Timer("00:01:00:00")]))
    trainer.fit(model, loader(0, 256), loader(512, 128))
    record(trainer, model)
