"""A variational autoencoder, with hooks for gradients and a scheduler by steps."""

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.utilities import grad_norm
from shared import loader, noise, record, settings
from torch import nn


class VAE(pl.LightningModule):
    def __init__(self, latent: int = 4, kl_coeff: float = 0.1, lr: float = 1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(64, 32), nn.ReLU())
        self.mu, self.log_var = nn.Linear(32, latent), nn.Linear(32, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, 32), nn.ReLU(), nn.Linear(32, 64), nn.Sigmoid())

    def step(self, batch, batch_idx):
        x = batch[0].flatten(1)
        hidden = self.encoder(x)
        mu, log_var = self.mu(hidden), self.log_var(hidden)
        z = mu + torch.exp(log_var / 2) * noise(batch_idx, *mu.shape).to(mu)
        recon = nn.functional.mse_loss(self.decoder(z), x)
        kl = -0.5 * (1 + log_var - mu.pow(2) - log_var.exp()).mean() * self.hparams.kl_coeff
        return kl + recon, {"recon_loss": recon, "kl": kl, "loss": kl + recon}

    def training_step(self, batch, batch_idx):
        loss, logs = self.step(batch, batch_idx)
        self.log_dict({f"train_{k}": v for k, v in logs.items()}, on_step=True, on_epoch=False)
        return loss

    def validation_step(self, batch, batch_idx):
        loss, logs = self.step(batch, batch_idx)
        self.log_dict({f"val_{k}": v for k, v in logs.items()}, sync_dist=True)
        return loss

    def on_before_optimizer_step(self, optimizer):
        self.log_dict(grad_norm(self.decoder, norm_type=2))

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 2, "name": "rate"},
        }


if __name__ == "__main__":
    pl.seed_everything(17)
    model = VAE()
    monitor = LearningRateMonitor(logging_interval="step")
    trainer = pl.Trainer(**settings(max_epochs=2, callbacks=[monitor]))
    trainer.fit(model, loader(0, 256), loader(512, 128))
    record(trainer, model)
