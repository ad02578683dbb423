"""What the tests of resuming train: importable, with every kind of randomness, killed at chosen moments."""

import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from rankwise import Trainer, TrainingModule
from rankwise.callbacks import Callback, ModelCheckpoint
from rankwise.checkpoint import CheckpointIO, TorchCheckpointIO
from rankwise.seed import seed_everything

SAMPLES = 46
WIDTH = 16


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Samples with noise of all three kinds from the process that loads them."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.randn(WIDTH) + random.gauss(0, 1) + np.random.normal()
        return torch.full((WIDTH,), index / SAMPLES) + 0.1 * noise, torch.tensor([float(index)])


class Net(TrainingModule):
    """Dropout, batch norm, and parameters enough for several buckets of 1 kB."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        layers = [
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)) for _ in "abcd"
        ]
        self.net = nn.Sequential(*layers, nn.Linear(WIDTH, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1] / SAMPLES)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Weighing(Net):
    """Weighs each batch by something that only it knows."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log_weight(1 + float(batch[1].sum()))
        return super().training_step(batch, batch_idx)


class Descending(Net):
    """Does not enlarge gradients that are nothing but rounding, as Adam does."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Looking(Descending):
    """Has an embedding with sparse gradients in the middle, and a complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(SAMPLES, WIDTH, sparse=True)
        self.phases = nn.Parameter(torch.ones(WIDTH, dtype=torch.complex64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        phases = torch.view_as_real(self.phases).sum(dim=1)
        return super().training_step(
            (batch[0] * phases + self.rows(batch[1].long()[:, 0]), batch[1]), batch_idx
        )


class Noting(Net):
    """Writes down which samples each rank trains on, a file for each step."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        step = self.trainer.global_step + 1
        torch.save(batch[1], self.folder / f"{step}-{self.global_rank}.pt")
        return super().training_step((batch[0], torch.ones(len(batch[0]), 1)), batch_idx)


class KillAt(Callback):
    """SIGKILL for one rank after a step."""

    def __init__(self, rank: int, step: int) -> None:
        self.place = rank, step

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.global_rank, trainer.global_step) == self.place:
            os.kill(os.getpid(), signal.SIGKILL)


class ThroughTorch(CheckpointIO):
    """Leaves all to `TorchCheckpointIO`."""

    _inner = TorchCheckpointIO()
    save_checkpoint = _inner.save_checkpoint
    load_checkpoint = _inner.load_checkpoint
    remove_checkpoint = _inner.remove_checkpoint


class KillWhileSaving(ThroughTorch):
    """SIGKILL when the data of the n-th checkpoint is written, but its file is not in place yet."""

    def __init__(self, nth: int) -> None:
        self.left = nth

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> None:
        self.left -= 1
        if self.left == 0:
            os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)
        super().save_checkpoint(checkpoint, path)


def train(
    strategy: Any,
    folder: str | Path,
    *,
    seed: int,
    kill: Callback | CheckpointIO | None = None,
    workers: int = 0,
    batch_size: int = 4,
    max_epochs: int = 2,
    module: Net | None = None,
    samples: Noisy | None = None,
    ckpt_path: str | None = "last",
    accumulate: int = 1,
) -> Trainer:
    """Train from the last checkpoint on, if there is one; return the Trainer."""
    seed_everything(seed)
    saving = ModelCheckpoint(folder, save_last=True, save_top_k=0, every_n_train_steps=1)
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_epochs=max_epochs,
        callbacks=[*([kill] if isinstance(kill, Callback) else []), saving],
        plugins=kill if isinstance(kill, CheckpointIO) else None,
        accumulate_grad_batches=accumulate,
        logger=False,
        enable_progress_bar=False,
        default_root_dir=folder,
    )
    context = "fork" if workers else None
    loader = DataLoader(
        samples or Noisy(), batch_size, shuffle=True, num_workers=workers, multiprocessing_context=context
    )
    trainer.fit(module or Net(), loader, ckpt_path=ckpt_path)
    return trainer


def everything(trainer: Trainer) -> dict[str, Any]:
    """Return what must be the same, exactly."""
    return {
        "weights": {name: value.tolist() for name, value in trainer.module.state_dict().items()},
        "optimizer": repr(trainer.optimizers[0].state_dict()),
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "progress": trainer.progress,
    }
