"""Text classification with a recurrent network: packed batches of a collate function, and early stopping."""

import argparse
import re
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks.early_stopping import EarlyStopping
from shared import options, record, settings
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

WORDS = sorted(set(re.findall("[a-z_]{3,}", Path(argparse.__file__).read_text())))[:256]


def collate(items):
    tokens = pad_sequence([item[0] for item in items], batch_first=True)
    return {"tokens": tokens, "label": torch.tensor([item[1] for item in items])}


def words(part: int):
    items = [
        (torch.tensor([ord(c) % 128 for c in word]), int("_" in word or len(word) > 7)) for word in WORDS
    ]
    chosen = items[part::4] if part else [item for i, item in enumerate(items) if i % 4]
    chosen = chosen[: len(chosen) // 32 * 32]
    return DataLoader(chosen, batch_size=32 // options().devices, collate_fn=collate)


class Tagger(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(128, 8)
        self.lstm = nn.LSTM(8, 16, batch_first=True)
        self.head = nn.Linear(16, 2)

    def forward(self, tokens):
        out, _ = self.lstm(self.embedding(tokens))
        return self.head(out.mean(1))

    def loss(self, batch):
        return nn.functional.cross_entropy(self(batch["tokens"]), batch["label"])

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, batch_size=len(batch["label"]))
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val_loss", self.loss(batch), batch_size=len(batch["label"]), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5),
            "monitor": "val_loss/dataloader_idx_0",
        }


if __name__ == "__main__":
    pl.seed_everything(21)
    model = Tagger()
    stopping = EarlyStopping(monitor="val_loss/dataloader_idx_1", patience=2, min_delta=0.3, mode="min")
    trainer = pl.Trainer(**settings(max_epochs=6, callbacks=[stopping]))
    trainer.fit(model, words(0), [words(1), words(2)])
    record(trainer, model, epochs=trainer.current_epoch, stopped=stopping.stopped_epoch)
