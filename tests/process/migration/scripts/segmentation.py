"""Semantic segmentation of synthetic images with a small U-Net."""

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from shared import noise, options, processes, record
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class UNet(nn.Module):
    def __init__(self, classes: int = 3):
        super().__init__()
        self.down1 = nn.Conv2d(1, 8, 3, padding=1)
        self.down2 = nn.Conv2d(8, 16, 3, padding=1)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.out = nn.Conv2d(16, classes, 3, padding=1)

    def forward(self, x):
        first = torch.relu(self.down1(x))
        second = torch.relu(self.down2(nn.functional.max_pool2d(first, 2)))
        return self.out(torch.cat([first, self.up(second)], dim=1))


class SegModel(L.LightningModule):
    def __init__(self, lr: float = 1e-2):
        super().__init__()
        self.lr = lr
        self.net = UNet()

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        images, masks = batch
        loss = nn.functional.cross_entropy(self(images), masks, ignore_index=250)
        return {"loss": loss, "log": {"train_loss": loss.detach()}}

    def validation_step(self, batch, batch_idx):
        images, masks = batch
        out = self(images)
        overlap = (out.argmax(1) == masks).float().mean()
        self.log_dict(
            {"val_loss": nn.functional.cross_entropy(out, masks), "val_iou": overlap}, sync_dist=True
        )

    def configure_optimizers(self):
        opt = torch.optim.Adam(self.net.parameters(), lr=self.lr)
        return [opt], [torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=10)]


def images(seed: int, count: int):
    x = noise(seed, count, 1, 12, 12)
    masks = (x[:, 0] > 0.5).long() + (x[:, 0] > -0.5).long()
    return DataLoader(TensorDataset(x, masks), batch_size=16 // options().devices)


def main():
    L.seed_everything(11)
    model = SegModel()
    trainer = L.Trainer(max_epochs=3, enable_progress_bar=False, logger=CSVLogger("."), **processes())
    trainer.fit(model, train_dataloaders=images(1, 96), val_dataloaders=images(2, 32))
    record(trainer, model)


if __name__ == "__main__":
    main()
