"""What all scripts share: small data, the arguments of the command line, and a record of the results.

Loaders keep the order of the data, and random numbers come from generators with a seed, so that a run can be
compared with one of another library, number by number.
"""

from __future__ import annotations

import argparse
import csv
from functools import cache
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset


@cache
def options() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--out", default="result.pt")
    return parser.parse_args()


def processes() -> dict[str, Any]:
    """Return where to train, for `Trainer` or `Fabric`."""
    return {"accelerator": "cpu", "strategy": options().strategy, "devices": options().devices}


def digits(first: int = 0, count: int = 512) -> TensorDataset:
    """Return images of shape (1, 8, 8) from 0 to 1, and their classes."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(7))[first : first + count]
    pixels = torch.from_numpy(images).float().view(-1, 1, 8, 8) / 16
    return TensorDataset(pixels[order], torch.from_numpy(labels)[order])


def loader(first: int = 0, count: int = 512, batch_size: int = 64) -> DataLoader[tuple[Tensor, ...]]:
    """Return a loader of digits; each process of two gets half of a batch."""
    return DataLoader(digits(first, count), batch_size // options().devices)


def text(length: int = 4096) -> Tensor:
    """Return the characters of a module of Python's as numbers from 0 to 127."""
    source = Path(argparse.__file__).read_text()[:length]
    return torch.tensor([min(ord(letter), 127) for letter in source])


def noise(seed: int, *shape: int) -> Tensor:
    """Return normally distributed numbers that depend on the seed alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def record(trainer: Any, module: Any, *, has_csv: bool = True, **values: Any) -> None:
    """Write the weights, the metrics at the end, and what a `CSVLogger` got, on rank 0."""
    if not trainer.is_global_zero:
        return
    metrics = {name: float(value) for name, value in getattr(trainer, "callback_metrics", {}).items()}
    history = logged(trainer.logger) if has_csv and getattr(trainer, "loggers", None) else {}
    weights = {name: value.detach().double().clone() for name, value in module.state_dict().items()}
    result = {"weights": weights, "metrics": metrics, "history": history, "values": values}
    torch.save(result, options().out)


def logged(logger: Any) -> dict[str, float]:
    """Return what a logger of CSV files has written: the values by name and step."""
    path = Path(logger.log_dir or ".") / "metrics.csv"
    if not path.exists():
        return {}
    with path.open() as file:
        rows = list(csv.DictReader(file))
    return {
        f"{name}@{row['step']}": float(value)
        for row in rows
        for name, value in row.items()
        if value and name not in ("step", "epoch")
    }
