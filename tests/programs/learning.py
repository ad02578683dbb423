"""What both sides of the comparison train with, in plain torch and float64: networks, samples, optimizers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from tests.programs.program import Change, Data, Learning

FEATURES = 3
WIDTH = 4
PARTS = ("body", "side", "head")


class Centering(nn.Module):
    """Subtract the mean of the batch in training, a running mean in evaluation; counts samples."""

    mean: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, hidden: Tensor) -> Tensor:
        if not self.training:
            return hidden - self.mean
        mean = hidden.mean(dim=0)
        self.mean.mul_(0.5).add_(mean.detach(), alpha=0.5)
        self.count.add_(len(hidden))
        return hidden - mean


class Net(nn.Module):
    """Predict one number for each sample.

    `kind`: `"mlp"`; `"running"` has buffers that every batch changes; `"branching"` uses its side for some
    samples only, and for some batches not at all.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.body = nn.Linear(FEATURES, WIDTH, dtype=torch.float64)
        self.side = nn.Linear(FEATURES, WIDTH, dtype=torch.float64)
        self.head = nn.Linear(WIDTH, 1, dtype=torch.float64)
        self.centering = Centering() if kind == "running" else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        uses_side = x[:, :1] > 0.5
        if self.kind != "branching":
            hidden = hidden + self.side(x)
        elif bool(uses_side.any()):
            hidden = hidden + self.side(x) * uses_side
        predicted: Tensor = self.head(torch.tanh(self.centering(hidden))).squeeze(1)
        return predicted + self.get_submodule("extra")(x).squeeze(1) if hasattr(self, "extra") else predicted


@dataclass
class Samples:
    """A batch: numbers in the data set, features and targets, and a weight of each sample."""

    numbers: Tensor  # (N,)
    x: Tensor  # (N, FEATURES)

    def __len__(self) -> int:
        return len(self.x)

    @property
    def y(self) -> Tensor:
        """The targets, of shape (N,)."""
        return torch.sin(self.x.sum(dim=1)) + self.x[:, 0]

    @property
    def tokens(self) -> Tensor:
        """How much each sample counts where weights are logged, of shape (N,)."""
        return self.numbers % 3 + 1.0

    def pick(self, positions: list[int]) -> Samples:
        """Return some of the samples."""
        return Samples(self.numbers[positions], self.x[positions])


def samples(data: Data) -> Samples:
    """Return all samples: the same every time."""
    generator = torch.Generator().manual_seed(data.seed)
    x = torch.randn(data.num_samples, FEATURES, dtype=torch.float64, generator=generator)
    return Samples(torch.arange(data.num_samples), x)


def predict(net: Net, batch: Samples, *, is_by_token: bool = False) -> tuple[Tensor, Tensor]:
    """Return the predictions, and their mean squared error over samples, or over tokens."""
    predicted: Tensor = net(batch.x)
    errors = (predicted - batch.y).square()
    mean: Tensor = (errors * batch.tokens).sum() / batch.tokens.sum() if is_by_token else errors.mean()
    return predicted.detach(), mean


def order_of(data: Data, count: int, epoch: int) -> list[int]:
    """Return the order of `count` samples in an epoch, unless torch shuffles."""
    if data.order != "sampler":
        return list(range(count))
    generator = torch.Generator().manual_seed(1000 * data.seed + epoch)
    order: list[int] = torch.randperm(count, generator=generator).tolist()
    return order


# ------------------------------------------------------------------------------------- batches


@dataclass
class Record:
    """A batch of an own class."""

    names: list[str]
    x: Tensor
    numbers: Tensor


def _collate(shape: str, items: list[tuple[int, Tensor]]) -> Any:
    """Make a batch of a shape."""
    numbers, x = torch.tensor([number for number, _ in items]), torch.stack([x for _, x in items])
    names = [f"sample {number}" for number in numbers.tolist()]
    shapes = {
        "tuple": (x, numbers),
        "dict": {"names": names, "x": x, "numbers": numbers},
        "nested": [{"a": {"names": names}}, (numbers, [x])],
        "record": Record(names, x, numbers),
        "images": {"x": list(x), "numbers": numbers.tolist()},
        "time first": (x.T.contiguous(), numbers),
        "scalar first": (torch.tensor(0.5), numbers, x),
    }
    return shapes[shape]


def read_batch(shape: str, batch: Any) -> Samples:
    """Return the samples of a batch of the given shape."""
    match shape, batch:
        case (
            ("tuple", (x, numbers))
            | ("dict", {"x": x, "numbers": numbers})
            | ("nested", [_, (numbers, [x])])
            | ("record", Record(_, x, numbers))
            | ("scalar first", (_, numbers, x))
        ):
            return Samples(numbers, x)
        case "images", {"x": images, "numbers": numbers}:
            return Samples(torch.tensor(numbers), torch.stack(images))
        case "time first", (x, numbers):
            return Samples(numbers, x.T)
    raise ValueError(shape)


class Rows(Dataset[Any]):
    """Samples by number; those of a fold are numbered from 0 again."""

    def __init__(self, data: Data, subset: list[int] | None) -> None:
        self.samples = samples(data) if subset is None else samples(data).pick(subset)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, position: int) -> tuple[int, Tensor]:
        return int(self.samples.numbers[position]), self.samples.x[position]


class Stream(IterableDataset[Any]):
    """Samples one after another, which splits itself."""

    def __init__(self, data: Data, rows: Rows) -> None:
        self.data = data
        self.rows = rows
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def shard(self, num_shards: int, index: int) -> Iterator[tuple[int, Tensor]]:
        order = order_of(self.data, len(self.rows), self.epoch)
        return (self.rows[position] for position in order[index::num_shards])

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        return self.shard(1, 0)


class SizedStream(Stream):
    """The same with a length."""

    def __len__(self) -> int:
        return len(self.rows)


class Order(Sampler[Any]):
    """The program's own order of each epoch."""

    def __init__(self, data: Data, count: int) -> None:
        self.data = data
        self.count = count
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return iter(order_of(self.data, self.count, self.epoch))

    def __len__(self) -> int:
        return self.count


class Batches(Order):
    """Batches whose sizes repeat those of the program."""

    def __iter__(self) -> Iterator[Any]:
        return iter(cut(list(super().__iter__()), self.data.sizes))

    def __len__(self) -> int:
        return len(cut(list(range(self.count)), self.data.sizes))


def cut(items: list[int], sizes: tuple[int, ...]) -> list[list[int]]:
    """Return batches of `sizes`, from the first size again where they end."""
    batches: list[list[int]] = []
    while items:
        size = sizes[len(batches) % len(sizes)]
        batches.append(items[:size])
        items = items[size:]
    return batches


def make_loader(data: Data, subset: list[int] | None = None) -> DataLoader[Any]:
    """Return the loader that a script gives to the Trainer."""
    rows = Rows(data, subset)
    collate = partial(_collate, data.shape)
    if data.sizes:
        return DataLoader(rows, batch_sampler=Batches(data, len(rows)), collate_fn=collate)
    size, drop_last = data.batch_size, data.drop_last
    if data.kind != "map":
        stream = SizedStream(data, rows) if data.kind == "iterable" else Stream(data, rows)
        return DataLoader(stream, size, drop_last=drop_last, collate_fn=collate)
    sampler = Order(data, len(rows)) if data.order == "sampler" else None
    is_shuffled = data.order == "shuffle"
    return DataLoader(
        rows, size, shuffle=is_shuffled, sampler=sampler, drop_last=drop_last, collate_fn=collate
    )


# ------------------------------------------------------------------------------------- optimizers


def part_of(net: Net, part: str) -> list[nn.Parameter]:
    """Return the parameters of a part; none of one that does not exist yet."""
    return list(net.get_submodule(part).parameters()) if hasattr(net, part) else []


def apply_change(net: Net, optimizer: torch.optim.Optimizer, change: Change, rank: int = 0) -> None:
    """Do what a script does within a fit; a new part has other values on each rank."""
    if change.part == "extra":
        net.extra = nn.Linear(FEATURES, 1, dtype=torch.float64)
        for parameter in net.extra.parameters():
            nn.init.constant_(parameter, 0.3 + rank)
    for parameter in part_of(net, change.part):
        parameter.requires_grad_(change.action != "freeze")
    if change.action == "add":
        optimizer.add_param_group({"params": part_of(net, change.part), "name": change.part})


_OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9),
    "nesterov": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.5, nesterov=True),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.02, eps=1e-3),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.02, eps=1e-3, weight_decay=0.1),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.01, eps=1e-3),
}


def make_optimizers(net: Net, learning: Learning) -> list[torch.optim.Optimizer]:
    """Return an optimizer with a group for each part, but for late ones; in manual optimisation two."""
    groups = [{"params": part_of(net, part), "name": part} for part in PARTS if part not in learning.late]
    kind = _OPTIMIZERS[learning.optimizer]
    return [kind(groups[:-1]), kind(groups[-1:])] if learning.is_manual else [kind(groups)]


def make_scheduler(optimizer: torch.optim.Optimizer, learning: Learning) -> Any:
    """Return a learning rate scheduler; None for none."""
    match learning.schedule:
        case "epoch":
            return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
        case "step":
            return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=7)
        case "plateau":
            return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    return None


# ------------------------------------------------------------------------------------- metric objects


_WARNINGS = (
    "Metric `Spearman",  # needs memory
    "The variance of predictions",  # is small
    "find_unused_parameters",  # finds none
    "Validation never runs",  # in so few epochs
)


@contextmanager
def without_warnings() -> Iterator[None]:
    """Ignore warnings of torchmetrics and rankwise that random programs cause."""
    with warnings.catch_warnings():
        for message in _WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        yield


def make_metrics(names: tuple[str, ...]) -> dict[str, Any]:
    """Return metric objects of torchmetrics, with states in float64."""
    if not names:
        return {}
    import torchmetrics  # takes a second

    kinds: dict[str, Callable[[], Any]] = {
        "mse": torchmetrics.MeanSquaredError,
        "r2": torchmetrics.R2Score,
        "spearman": torchmetrics.SpearmanCorrCoef,
        "pearson": torchmetrics.PearsonCorrCoef,
        "root": lambda: torchmetrics.MeanSquaredError().set_dtype(torch.float64) ** 0.5,
        "sum": lambda: (
            torchmetrics.MeanSquaredError().set_dtype(torch.float64)
            + torchmetrics.MeanAbsoluteError().set_dtype(torch.float64)
        ),
    }
    return {name: kinds[name]().set_dtype(torch.float64) for name in names}


def update_metric(metric: Any, predicted: Tensor, batch: Samples) -> None:
    """Update a metric object with a batch."""
    metric.update(predicted, batch.y)
