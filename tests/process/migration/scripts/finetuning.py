"""Transfer learning: a frozen backbone is unfrozen step by step by a callback."""

import lightning as L
import torch
from lightning.pytorch.callbacks.finetuning import BaseFinetuning
from shared import loader, record, settings
from torch import nn


class UnfreezeAt(BaseFinetuning):
    def __init__(self, milestones=(1, 2)):
        super().__init__()
        self.milestones = milestones

    def freeze_before_training(self, pl_module):
        self.freeze(modules=pl_module.backbone, train_bn=True)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == self.milestones[0]:
            self.unfreeze_and_add_param_group(pl_module.backbone[-2:], optimizer, train_bn=True)
        elif epoch == self.milestones[1]:
            self.unfreeze_and_add_param_group(pl_module.backbone[:-2], optimizer, lr=1e-3, train_bn=True)


class TransferLearning(L.LightningModule):
    def __init__(self, lr: float = 1e-2):
        super().__init__()
        self.save_hyperparameters()
        convolution = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        self.backbone = nn.Sequential(convolution, nn.Flatten(), nn.Linear(256, 32), nn.ReLU())
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.backbone(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_acc", (self(x).argmax(1) == y).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        trainable = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.Adam(trainable, lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2], gamma=0.1)
        return [optimizer], [scheduler]


if __name__ == "__main__":
    L.seed_everything(9)
    model = TransferLearning()
    trainer = L.Trainer(**settings(max_epochs=4, callbacks=[UnfreezeAt()]))
    trainer.fit(model, loader(0, 256), loader(512, 128))
    record(trainer, model, groups=len(trainer.optimizers[0].param_groups))
