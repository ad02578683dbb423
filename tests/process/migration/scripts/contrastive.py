"""Contrastive learning: two views of each image, and negatives from all processes."""

import lightning as L
import torch
from shared import loader, record, settings
from torch import nn


class SimCLR(L.LightningModule):
    def __init__(self, temperature: float = 0.5):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16))

    def views(self, x):
        return x + 0.1, x.roll(1, dims=-1)

    def gathered(self, features):
        return self.all_gather(features, sync_grads=True).reshape(-1, features.shape[-1])

    def training_step(self, batch, batch_idx):
        first, second = (nn.functional.normalize(self.encoder(view), dim=1) for view in self.views(batch[0]))
        keys, own = self.gathered(second), len(first)
        similarity = first @ keys.t() / self.hparams.temperature
        labels = torch.arange(own, device=self.device) + self.global_rank * own
        loss = nn.functional.cross_entropy(similarity, labels)
        self.log("nt_xent", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    L.seed_everything(26)
    model = SimCLR()
    trainer = L.Trainer(**settings(max_epochs=2, enable_checkpointing=False))
    trainer.fit(model, loader(0, 256))
    record(trainer, model)
