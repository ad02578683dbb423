"""An autoencoder: the first example of most introductions."""

import lightning as L
import torch
from shared import digits, loader, processes, record
from torch import nn


class LitAutoEncoder(L.LightningModule):
    def __init__(self, hidden: int = 16):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 3))
        self.decoder = nn.Sequential(nn.Linear(3, hidden), nn.ReLU(), nn.Linear(hidden, 64))

    def forward(self, x):
        return self.encoder(x.flatten(1))

    def training_step(self, batch, batch_idx):
        x, _ = batch
        x = x.flatten(1)
        loss = nn.functional.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    L.seed_everything(42)
    model = LitAutoEncoder()
    trainer = L.Trainer(max_epochs=2, log_every_n_steps=2, enable_progress_bar=False, **processes())
    trainer.fit(model, loader())
    model.eval()
    embedding = model(digits(600, 4).tensors[0])
    record(trainer, model, embedding=embedding.detach(), hidden=model.hparams.hidden)
