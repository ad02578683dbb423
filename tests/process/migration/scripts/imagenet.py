"""Image classification as on ImageNet: SGD, a schedule, top-5 accuracy; limits of batches and a profiler."""

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.profilers import SimpleProfiler
from shared import loader, processes, record
from torch import nn


class Block(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        return torch.relu(x + self.second(torch.relu(self.first(x))))


class ImageNetLightningModel(pl.LightningModule):
    def __init__(
        self, lr: float = 0.05, momentum: float = 0.9, weight_decay: float = 1e-4, batch_size: int = 64
    ):
        super().__init__()
        self.lr, self.momentum, self.weight_decay, self.batch_size = lr, momentum, weight_decay, batch_size
        self.example_input_array = torch.zeros(1, 1, 8, 8)
        self.model = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), Block(8), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(128, 10)
        )

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, batch_idx):
        images, target = batch
        output = self(images)
        loss = nn.functional.cross_entropy(output, target)
        acc1, acc5 = self.accuracy(output, target, topk=(1, 5))
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("train_acc1", acc1, on_step=False, on_epoch=True, prog_bar=True, sync_dist=True)
        self.log("train_acc5", acc5, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def eval_step(self, batch, batch_idx, prefix: str):
        images, target = batch
        output = self(images)
        acc1, acc5 = self.accuracy(output, target, topk=(1, 5))
        self.log(f"{prefix}_loss", nn.functional.cross_entropy(output, target), sync_dist=True)
        self.log(f"{prefix}_acc1", acc1, prog_bar=True, sync_dist=True)
        self.log(f"{prefix}_acc5", acc5, sync_dist=True)

    def validation_step(self, batch, batch_idx):
        return self.eval_step(batch, batch_idx, "val")

    @staticmethod
    def accuracy(output, target, topk=(1,)):
        with torch.no_grad():
            _, best = output.topk(max(topk), 1)
            correct = best.t() == target[None]
            return [correct[:k].sum() * 100.0 / len(target) for k in topk]

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(
            self.parameters(), lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.1 ** (epoch // 2))
        return [optimizer], [scheduler]

    def train_dataloader(self):
        return loader(0, 512, self.batch_size)

    def val_dataloader(self):
        return loader(512, 256, self.batch_size)


if __name__ == "__main__":
    pl.seed_everything(10)
    model = ImageNetLightningModel()
    saving = ModelCheckpoint(monitor="val_acc1", mode="max", save_top_k=2, save_last=True)
    trainer = pl.Trainer(
        max_epochs=3,
        limit_train_batches=6,
        limit_val_batches=2,
        accumulate_grad_batches=2,
        log_every_n_steps=2,
        callbacks=[TQDMProgressBar(refresh_rate=10), saving],
        benchmark=False,
        profiler=SimpleProfiler(dirpath=".", filename="profile"),
        **processes(),
    )
    trainer.fit(model)
    record(trainer, model, best=float(saving.best_model_score), kept=len(saving.best_k_models))
