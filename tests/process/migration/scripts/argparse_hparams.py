"""Arguments of the command line as hyperparameters, a checkpoint that is loaded again, and predictions."""

from argparse import ArgumentParser

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.types import STEP_OUTPUT
from shared import loader, record, settings
from torch import nn


class Regression(L.LightningModule):
    def __init__(self, lr: float = 0.1, hidden: int = 8, **kwargs):
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.Tanh(), nn.Linear(hidden, 1))

    @staticmethod
    def add_model_specific_args(parent_parser):
        parser = parent_parser.add_argument_group("Regression")
        parser.add_argument("--lr", type=float, default=0.05)
        parser.add_argument("--hidden", type=int, default=12)
        return parent_parser

    def forward(self, x):
        return self.layers(x).squeeze(1)

    def training_step(self, batch, batch_idx) -> STEP_OUTPUT:
        loss = nn.functional.l1_loss(self(batch[0]), batch[1].float())
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx) -> STEP_OUTPUT:
        loss = nn.functional.l1_loss(self(batch[0]), batch[1].float())
        self.log("val_mae", loss, sync_dist=True)
        return loss

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        return torch.optim.RMSprop(self.parameters(), lr=self.hparams.lr, alpha=0.9)


if __name__ == "__main__":
    parser = Regression.add_model_specific_args(ArgumentParser())
    args = parser.parse_args([])
    L.seed_everything(20)
    model = Regression(**vars(args), note="a run")
    saving = ModelCheckpoint(filename="{epoch}-{val_mae:.2f}", monitor="val_mae", save_top_k=1)
    trainer = L.Trainer(**settings(max_epochs=3, callbacks=saving, gradient_clip_val=0.5))
    trainer.fit(model, loader(0, 256), loader(512, 128))
    loaded = Regression.load_from_checkpoint(saving.best_model_path)
    alone = L.Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False)
    predictions = torch.cat(alone.predict(loaded, loader(768, 128)))
    record(
        trainer, loaded, predictions=predictions, hidden=loaded.hparams["hidden"], note=loaded.hparams.note
    )
