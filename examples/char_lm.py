"""Train a small transformer to continue Python source code, on the text of the standard library."""

from __future__ import annotations

import argparse
import inspect
import textwrap
import typing

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from rankwise import Trainer, TrainingModule, rank_zero_only, seed_everything

CONTEXT = 64


class Characters(Dataset[Tensor]):
    """Windows of CONTEXT + 1 characters (ASCII codes) of some modules' sources."""

    def __init__(self) -> None:
        text = inspect.getsource(typing) + inspect.getsource(inspect) + inspect.getsource(textwrap)
        self.codes = torch.tensor([min(ord(character), 127) for character in text])

    def __len__(self) -> int:
        return (len(self.codes) - 1) // CONTEXT

    def __getitem__(self, index: int) -> Tensor:
        return self.codes[index * CONTEXT : index * CONTEXT + CONTEXT + 1]


class CharacterModel(TrainingModule):
    """Two transformer layers over characters."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, width)
        self.position = nn.Parameter(torch.zeros(CONTEXT, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 128)

    def forward(self, codes: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(codes.shape[1])
        hidden = self.layers(self.embed(codes) + self.position[: codes.shape[1]], mask, is_causal=True)
        logits: Tensor = self.head(hidden)
        return logits

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    """Train on two processes; print the loss, in nats per character."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", default="ddp_forkserver")
    parser.add_argument("--epochs", type=int, default=2)
    arguments = parser.parse_args()
    seed_everything(0)
    trainer = Trainer(strategy=arguments.strategy, devices=2, max_epochs=arguments.epochs, logger=False)
    trainer.fit(CharacterModel(), DataLoader(Characters(), batch_size=16, shuffle=True))
    rank_zero_only(print)(f"loss {trainer.callback_metrics['loss']:.2f} nats per character")


if __name__ == "__main__":
    main()
