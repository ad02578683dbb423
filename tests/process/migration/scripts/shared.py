"""What all scripts share: small data, the arguments of the command line, and a record of the results.

Loaders keep the order of the data, and random numbers come from generators with a seed, so that a run can be
compared with one of another library, number by number.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@cache
def options() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--out", default="result.pt")
    parser.add_argument(
        "--keep-order",
        action="store_true",
        help="keep the order of the data on several processes too, which Lightning shuffles in training",
    )
    return parser.parse_args()


if options().keep_order:
    in_order = property(lambda sampler: False, lambda sampler, is_shuffled: None)
    DistributedSampler.shuffle = in_order  # type: ignore[assignment]


def processes(suffix: str = "") -> dict[str, Any]:
    """Return where to train, for `Trainer` or `Fabric`; a suffix of the strategy, for several processes."""
    strategy = options().strategy + suffix * (options().devices > 1)
    return {"accelerator": "cpu", "strategy": strategy, "devices": options().devices}


def settings(**arguments: Any) -> dict[str, Any]:
    """Return arguments for a `Trainer`: where to train, and to write the values of every step as CSV."""
    logging = {"logger": CSVLogger("."), "log_every_n_steps": 1, "enable_progress_bar": False}
    return {**logging, **processes(), **arguments}


def launch(fabric: Any, train: Callable[[Any], None]) -> None:
    """Run a function on all processes of a `Fabric`, which starts them or this script for each."""
    if options().strategy in ("ddp_fork", "ddp_spawn"):
        fabric.launch(train)
    else:
        fabric.launch()
        train(fabric)


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
    """Return the characters of this file, after its imports, as numbers from 0 to 127."""
    source = Path(__file__).read_text().partition("@cache")[2][:length]
    return torch.tensor([min(ord(letter), 127) for letter in source])


def noise(seed: int, *shape: int) -> Tensor:
    """Return normally distributed numbers that depend on the seed alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def record(trainer: Any, module: Any, **values: Any) -> None:
    """Write the weights, the metrics at the end, and what the first logger got, on rank 0."""
    if not trainer.is_global_zero:
        return
    metrics = {name: float(value) for name, value in getattr(trainer, "callback_metrics", {}).items()}
    history = logged(Path(trainer.logger.log_dir or ".")) if getattr(trainer, "loggers", None) else {}
    weights = {name: value.detach().double().clone() for name, value in module.state_dict().items()}
    result = {"weights": weights, "metrics": metrics, "history": history, "values": values}
    torch.save(result, options().out)


def logged(folder: Path) -> dict[str, float]:
    """Return what a logger has written to files of CSV or TensorBoard: the last value by name and step."""
    if not folder.exists():  # that of processes that have ended is not known to Lightning
        return {}
    rows = in_csv(folder / "metrics.csv") if (folder / "metrics.csv").exists() else in_tensorboard(folder)
    return {f"{name}@{step}": value for name, step, value in rows if name not in ("epoch", "hp_metric")}


def in_csv(path: Path) -> Iterator[tuple[str, int, float]]:
    """Yield the names, steps and values in a file of a `CSVLogger`."""
    with path.open() as file:
        for row in csv.DictReader(file):
            step = int(row.pop("step"))
            yield from ((name, step, float(value)) for name, value in row.items() if value)


def in_tensorboard(folder: Path) -> Iterator[tuple[str, int, float]]:
    """Yield the names, steps and values in the event files of a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), {"scalars": 0}).Reload()
    for name in events.Tags()["scalars"]:
        yield from ((name, event.step, event.value) for event in events.Scalars(name))
