"""A GAN, which steps two optimizers itself."""

import lightning.pytorch as pl
import torch
from shared import loader, noise, processes, record, settings
from torch import nn


class GAN(pl.LightningModule):
    def __init__(self, latent_dim: int = 8, lr: float = 2e-3, b1: float = 0.5, b2: float = 0.999):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(
            nn.Linear(latent_dim, 32), nn.LeakyReLU(0.2), nn.Linear(32, 64), nn.Sigmoid()
        )
        self.discriminator = nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
        self.example_input_array = torch.zeros(2, latent_dim)

    def forward(self, z):
        return self.generator(z)

    def adversarial_loss(self, y_hat, is_real):
        return nn.functional.binary_cross_entropy_with_logits(y_hat, torch.full_like(y_hat, float(is_real)))

    def training_step(self, batch, batch_idx):
        images = batch[0].flatten(1)
        optimizer_g, optimizer_d = self.optimizers()
        z = noise(batch_idx, len(images), self.hparams.latent_dim).type_as(images)

        self.toggle_optimizer(optimizer_g)
        g_loss = self.adversarial_loss(self.discriminator(self(z)), True)
        self.log("g_loss", g_loss, prog_bar=True)
        self.manual_backward(g_loss)
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)

        self.toggle_optimizer(optimizer_d)
        real = self.adversarial_loss(self.discriminator(images), True)
        fake = self.adversarial_loss(self.discriminator(self(z).detach()), False)
        d_loss = (real + fake) / 2
        self.log("d_loss", d_loss, prog_bar=True)
        self.manual_backward(d_loss)
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)

    def on_train_epoch_end(self):
        self.sample = self(noise(99, 4, self.hparams.latent_dim)).mean().detach()

    def configure_optimizers(self):
        lr, betas = self.hparams.lr, (self.hparams.b1, self.hparams.b2)
        opt_g = torch.optim.Adam(self.generator.parameters(), lr=lr, betas=betas)
        opt_d = torch.optim.Adam(self.discriminator.parameters(), lr=lr, betas=betas)
        return [opt_g, opt_d], []


if __name__ == "__main__":
    pl.seed_everything(5)
    model = GAN()
    where = processes("_find_unused_parameters_true")
    trainer = pl.Trainer(**settings(max_epochs=2, log_every_n_steps=4, **where))
    trainer.fit(model, loader())
    record(trainer, model)
