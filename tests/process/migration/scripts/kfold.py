"""Cross-validation: a new trainer and a reset module for each fold, then the mean of the scores."""

import copy

import lightning as L
import torch
from shared import digits, options, processes, record
from torch import nn
from torch.utils.data import DataLoader, Subset

FOLDS = 3


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x):
        return self.layer(x.flatten(1))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.log("test_acc", (self(x).argmax(1) == y).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


class KFoldDataModule(L.LightningDataModule):
    def __init__(self, fold: int, batch_size: int):
        super().__init__()
        self.fold, self.batch_size = fold, batch_size

    def setup(self, stage=None):
        data = digits(0, 384)
        indices = range(len(data))
        self.train = Subset(data, [i for i in indices if i % FOLDS != self.fold])
        self.test = Subset(data, [i for i in indices if i % FOLDS == self.fold])

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size)

    def test_dataloader(self):
        return DataLoader(self.test, batch_size=self.batch_size)


if __name__ == "__main__":
    L.seed_everything(13)
    model = Net()
    first = copy.deepcopy(model.state_dict())
    scores = []
    for fold in range(FOLDS):
        model.load_state_dict(first)
        trainer = L.Trainer(
            max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False, **processes()
        )
        dm = KFoldDataModule(fold, 32 // options().devices)
        trainer.fit(model, dm)
        scores.append(trainer.test(model, dm)[0]["test_acc"])
    record(trainer, model, scores=scores, mean=sum(scores) / FOLDS)
