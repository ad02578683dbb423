"""What the training tests train: importable, so that spawned workers find it."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from rankwise import DDPStrategy, Trainer, TrainingModule
from rankwise.callbacks import Callback, ModelCheckpoint

FEATURES = 5


class Regression(TrainingModule):
    """A small regression in float64, so that the order of additions does not show; counts its reductions."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, 1)).double()
        self.register_buffer("reductions", torch.zeros((), dtype=torch.long))
        self.optimizer_name = optimizer

    def forward(self, x: Tensor) -> Tensor:
        prediction: Tensor = self.net(x)
        return prediction

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("train_loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("test_loss", nn.functional.mse_loss(self(batch[0]), batch[1]), sync_dist=True)
        self.log("samples", float(len(batch[0])), reduce_fx="sum", sync_dist=True)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.forward(batch[0])

    def configure_optimizers(self) -> Any:
        if self.optimizer_name == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.05)
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]


class Drift(Callback):
    """Changes a value of rank 1 when it has trained."""

    def __init__(self, what: str = "parameter") -> None:
        self.what = what

    @torch.no_grad()
    def on_train_end(self, trainer: Any, module: Any) -> None:
        values = {"parameter": module.net[2].bias, "buffer": module.reductions}
        values["state"] = trainer.optimizers[0].state[module.net[0].weight].get("exp_avg")
        if trainer.global_rank == 1:
            values[self.what] += 1


class CountingStrategy(DDPStrategy):
    """Counts, in a buffer of the module, how often gradients are reduced."""

    def configure_ddp(self, module: nn.Module, device_ids: list[int] | None) -> DistributedDataParallel:
        wrapper = super().configure_ddp(module, device_ids)
        wrapper.register_comm_hook(module, count_and_reduce)
        return wrapper


def count_and_reduce(state: nn.Module, bucket: torch.distributed.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket, and count it."""
    state.get_buffer("reductions").add_(1)
    everybody: Any = torch.distributed.group.WORLD
    return allreduce_hook(everybody, bucket)


count_and_reduce.__annotations__.clear()  # torch compares them with types, and these are strings


def step_by_hand(module: TrainingModule, loss: Tensor) -> None:
    """Take an optimizer step, as a module without automatic optimisation does."""
    optimizer = module.optimizers()
    optimizer.zero_grad()
    module.manual_backward(loss)
    optimizer.step()


def dataset(samples: int) -> TensorDataset:
    """Return the same random samples every time."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, FEATURES, dtype=torch.float64, generator=generator)
    y = torch.randn(samples, 1, dtype=torch.float64, generator=generator)
    return TensorDataset(x, y)


def loader(samples: int, batch_size: int, *, shuffle: bool = False) -> DataLoader[Any]:
    """Return a loader over the same random samples every time."""
    return DataLoader(dataset(samples), batch_size=batch_size, shuffle=shuffle)


def quiet_trainer(strategy: Any, devices: int | str, **arguments: Any) -> Trainer:
    """Return a Trainer that writes nothing."""
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    return Trainer(strategy=strategy, devices=devices, **{"accelerator": "cpu", **quiet, **arguments})


def trainer_on(world_size: int, **arguments: Any) -> Trainer:
    """Return such a Trainer on that many forked ranks, or in this process."""
    strategy = "ddp_fork" if world_size > 1 else "single_device"
    return quiet_trainer(strategy, world_size, **arguments)


def saving_each_step(folder: Path) -> dict[str, Any]:
    """Return the options of a Trainer that saves `step=N.ckpt` after each step."""
    saving = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=1)
    return {"callbacks": saving, "enable_checkpointing": True}


def fit_one_step(strategy: Any, module: Regression | None = None, **arguments: Any) -> Trainer:
    """Take one optimizer step on two ranks; return the Trainer."""
    trainer = quiet_trainer(strategy, 2, max_steps=1, **arguments)
    trainer.fit(module or Regression("adam"), loader(8, 4))
    return trainer


def train_twenty_steps(strategy: Any, devices: int, accumulate: int) -> dict[str, Tensor]:
    """Take 20 optimizer steps on global batches of 8 samples; return the weights and the count."""
    batch_size = 8 // devices
    trainer = quiet_trainer(strategy, devices, max_steps=20, accumulate_grad_batches=accumulate)
    module = Regression()
    trainer.fit(module, loader(20 * 8 * accumulate, batch_size))
    return module.state_dict()
