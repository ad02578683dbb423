"""A classifier, its data in a data module; fit, validate, test and predict."""

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from shared import loader, processes, record
from torch import nn


class DigitsDataModule(pl.LightningDataModule):
    def __init__(self, batch_size: int = 64):
        super().__init__()
        self.save_hyperparameters()
        self.prepared = False

    def prepare_data(self):
        self.prepared = True

    def setup(self, stage):
        self.sizes = {"fit": 512, "validate": 256, "test": 256, "predict": 256}[stage]

    def train_dataloader(self):
        return loader(0, 512, self.hparams.batch_size)

    def val_dataloader(self):
        return loader(512, 256)

    def test_dataloader(self):
        return loader(768, 256)

    def predict_dataloader(self):
        return loader(1024, 256)


class Classifier(pl.LightningModule):
    def __init__(self, hidden_dim: int = 32, learning_rate: float = 0.01):
        super().__init__()
        self.save_hyperparameters()
        self.l1 = nn.Linear(64, hidden_dim)
        self.l2 = nn.Linear(hidden_dim, 10)

    def forward(self, x):
        return self.l2(torch.relu(self.l1(x.flatten(1))))

    def _shared_step(self, batch, name):
        x, y = batch
        logits = self(x)
        self.log(f"{name}_acc", (logits.argmax(1) == y).float().mean(), sync_dist=True, prog_bar=True)
        loss = nn.functional.cross_entropy(logits, y)
        self.log(f"{name}_loss", loss, sync_dist=True)
        return loss

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def validation_step(self, batch, batch_idx):
        self._shared_step(batch, "val")

    def test_step(self, batch, batch_idx):
        self._shared_step(batch, "test")

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return self(batch[0]).argmax(1)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.learning_rate)


if __name__ == "__main__":
    pl.seed_everything(1234)
    dm = DigitsDataModule()
    model = Classifier()
    saving = ModelCheckpoint(monitor="val_loss", mode="min")
    trainer = pl.Trainer(max_epochs=3, callbacks=[saving], enable_progress_bar=False, **processes())
    trainer.fit(model, datamodule=dm)
    [validated] = trainer.validate(model, datamodule=dm)
    [tested] = trainer.test(model, datamodule=dm)
    record(trainer, model, validated=validated, tested=tested, best=float(saving.best_model_score))
