"""Knowledge distillation: a frozen teacher inside the module, and a step of the optimizer that warms up."""

import lightning.pytorch as pl
import torch
from shared import loader, processes, record
from torch import nn


class Teacher(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Student(pl.LightningModule):
    def __init__(self, teacher, temperature: float = 2.0):
        super().__init__()
        self.save_hyperparameters(ignore="teacher")
        self.teacher = teacher
        self.teacher.freeze()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self.net(x)
        with torch.no_grad():
            target = (self.teacher(x) / self.hparams.temperature).softmax(1)
        soft = nn.functional.cross_entropy(logits / self.hparams.temperature, target)
        hard = nn.functional.cross_entropy(logits, y)
        self.log("soft", soft, on_step=False, on_epoch=True, sync_dist=True)
        self.log("hard", hard, on_step=False, on_epoch=True, sync_dist=True)
        return soft + hard

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        if self.trainer.global_step < 4:
            for group in optimizer.param_groups:
                group["lr"] = (self.trainer.global_step + 1) / 4 * 0.1
        optimizer.step(closure=optimizer_closure)

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


if __name__ == "__main__":
    pl.seed_everything(25)
    teacher = Teacher()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    pl.Trainer(max_epochs=2, **quiet, **processes()).fit(teacher, loader())
    pl.seed_everything(26)
    student = Student(teacher)
    trainer = pl.Trainer(max_epochs=2, **quiet, **processes())
    trainer.fit(student, loader())
    record(trainer, student)
