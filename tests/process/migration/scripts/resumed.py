"""A run in two parts: the second continues from the checkpoint of the first, with the state of a callback."""

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from shared import loader, record, settings
from torch import nn


class Counter(Callback):
    def __init__(self):
        self.batches = 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.batches += 1

    def state_dict(self):
        return {"batches": self.batches}

    def load_state_dict(self, state_dict):
        self.batches = state_dict["batches"]


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        self.note = None

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def on_save_checkpoint(self, checkpoint):
        checkpoint["note"] = "first part"

    def on_load_checkpoint(self, checkpoint):
        self.note = checkpoint["note"]

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def fit(model, epochs, ckpt_path=None):
    counter = Counter()
    saving = ModelCheckpoint(dirpath="checkpoints", filename="{epoch}", save_last=True)
    trainer = L.Trainer(**settings(max_epochs=epochs, callbacks=[counter, saving], log_every_n_steps=2))
    trainer.fit(model, loader(0, 256), ckpt_path=ckpt_path)
    return trainer, counter


if __name__ == "__main__":
    L.seed_everything(24)
    fit(Net(), 2)
    model = Net()
    trainer, counter = fit(model, 4, ckpt_path="checkpoints/last.ckpt")
    record(trainer, model, batches=counter.batches, steps=trainer.global_step, epoch=trainer.current_epoch)
