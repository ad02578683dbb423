"""A template in which a configuration names the classes of everything, as with Hydra."""

import importlib
from functools import partial
from pathlib import Path

import lightning as L
import yaml
from shared import loader, processes, record
from torch import nn

CONFIG = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


def instantiate(node, **more):
    """Make the object that a node of a configuration describes."""
    arguments = {key: instantiate(value) if isinstance(value, dict) else value for key, value in node.items()}
    is_partial = arguments.pop("_partial_", False)
    module, _, name = arguments.pop("_target_").rpartition(".")
    target = getattr(importlib.import_module(module), name)
    return partial(target, **arguments, **more) if is_partial else target(**arguments, **more)


class DenseNet(nn.Sequential):
    def __init__(self, hidden: int):
        # A bias before the normalisation has rounding errors for gradients, which depend on the machine.
        first = nn.Linear(64, hidden, bias=False)
        super().__init__(nn.Flatten(), first, nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, 10))


class DigitsDataModule(L.LightningDataModule):
    def __init__(self, batch_size: int = 64):
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.data_train = None

    def setup(self, stage=None):
        assert self.trainer is None or self.hparams.batch_size % self.trainer.world_size == 0
        self.data_train = 256

    def train_dataloader(self):
        return loader(0, self.data_train, self.hparams.batch_size)

    def val_dataloader(self):
        return loader(512, 128, self.hparams.batch_size)

    def test_dataloader(self):
        return loader(768, 128, self.hparams.batch_size)


class LitModule(L.LightningModule):
    def __init__(self, net, optimizer, scheduler):
        super().__init__()
        self.save_hyperparameters(logger=False, ignore=["net", "optimizer", "scheduler"])
        self.net, self.optimizer, self.scheduler = net, optimizer, scheduler
        self.best = 0.0

    def model_step(self, batch):
        x, y = batch
        logits = self.net(x)
        return nn.functional.cross_entropy(logits, y), (logits.argmax(1) == y).float().mean()

    def training_step(self, batch, batch_idx):
        loss, acc = self.model_step(batch)
        self.log("train/loss", loss, on_step=False, on_epoch=True, prog_bar=True, sync_dist=True)
        self.log("train/acc", acc, on_step=False, on_epoch=True, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        loss, acc = self.model_step(batch)
        self.log_dict({"val/loss": loss, "val/acc": acc}, on_step=False, on_epoch=True, sync_dist=True)

    def on_validation_epoch_end(self):
        self.best = max(self.best, float(self.trainer.callback_metrics["val/acc"]))
        self.log("val/acc_best", self.best, sync_dist=True, prog_bar=True)

    def test_step(self, batch, batch_idx):
        loss, acc = self.model_step(batch)
        self.log_dict({"test/loss": loss, "test/acc": acc}, sync_dist=True)

    def configure_optimizers(self):
        optimizer = self.optimizer(params=self.trainer.model.parameters())
        scheduler = self.scheduler(optimizer=optimizer)
        plan = {"scheduler": scheduler, "monitor": "val/loss", "interval": "epoch", "frequency": 1}
        return {"optimizer": optimizer, "lr_scheduler": plan}


if __name__ == "__main__":
    L.seed_everything(CONFIG["seed"], workers=True)
    datamodule = instantiate(CONFIG["data"])
    model = instantiate(CONFIG["model"])
    callbacks = [instantiate(each) for each in CONFIG["callbacks"].values()]
    loggers = [instantiate(each, save_dir="logs") for each in CONFIG["logger"].values()]
    trainer = instantiate(CONFIG["trainer"], callbacks=callbacks, logger=loggers, **processes())
    trainer.fit(model=model, datamodule=datamodule)
    fitted = {name: float(value) for name, value in trainer.callback_metrics.items()}
    trainer.test(model=model, datamodule=datamodule, ckpt_path=trainer.checkpoint_callback.best_model_path)
    record(trainer, model, fitted=fitted)
