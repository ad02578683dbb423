"""A language model: a transformer over characters, with warm-up by steps and clipped gradients."""

import math

import lightning as L
import torch
from shared import options, record, settings, text
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Text(Dataset):
    def __init__(self, block: int = 32):
        self.data, self.block = text(), block

    def __len__(self):
        return len(self.data) // self.block - 1

    def __getitem__(self, index):
        part = self.data[index * self.block : (index + 1) * self.block + 1]
        return part[:-1], part[1:]


class LanguageModel(L.LightningModule):
    def __init__(self, size: int = 32):
        super().__init__()
        self.embed = nn.Embedding(128, size)
        self.position = nn.Parameter(torch.zeros(32, size))
        layer = nn.TransformerEncoderLayer(size, 2, 64, dropout=0.0, batch_first=True, bias=False)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(size, 128)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.size(1), device=self.device)
        return self.head(self.encoder(self.embed(tokens) + self.position, mask, is_causal=True))

    def training_step(self, batch, batch_idx):
        tokens, target = batch
        loss = nn.functional.cross_entropy(self(tokens).flatten(0, 1), target.flatten())
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        steps = self.trainer.estimated_stepping_batches

        def rate(step):
            return min(1.0, (step + 1) / 4) * 0.5 * (1 + math.cos(math.pi * step / steps))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


if __name__ == "__main__":
    L.seed_everything(3)
    model = LanguageModel()
    data = DataLoader(Text(), batch_size=16 // options().devices, shuffle=False, drop_last=True)
    trainer = L.Trainer(**settings(max_epochs=2, gradient_clip_val=0.25, enable_model_summary=False))
    trainer.fit(model, data)
    record(trainer, model, rate=trainer.optimizers[0].param_groups[0]["lr"])
