"""Two training loaders of different lengths at once: labelled digits, and unlabelled ones for consistency."""

import lightning as L
import torch
from lightning.pytorch.utilities import CombinedLoader
from shared import loader, record, settings
from torch import nn


class SemiSupervised(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def training_step(self, batch, batch_idx):
        images, labels = batch["labelled"]
        unlabelled = batch["unlabelled"][0]
        supervised = nn.functional.cross_entropy(self.net(images), labels)
        flipped = self.net(unlabelled.flip(-1)).softmax(1)
        consistency = nn.functional.mse_loss(flipped, self.net(unlabelled).softmax(1).detach())
        self.log_dict({"supervised": supervised, "consistency": consistency}, batch_size=len(images))
        return supervised + 0.1 * consistency

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    L.seed_everything(22)
    model = SemiSupervised()
    loaders = CombinedLoader(
        {"labelled": loader(0, 128), "unlabelled": loader(512, 384)}, mode="max_size_cycle"
    )
    trainer = L.Trainer(**settings(max_epochs=2))
    trainer.fit(model, loaders)
    record(trainer, model, batches=trainer.num_training_batches)
