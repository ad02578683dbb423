"""Ranks with different numbers of batches: an error on all, the shortest, or what one process would do."""

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Subset

from rankwise import DDPForkStrategy
from rankwise.callbacks import Callback, ModelCheckpoint, WeightAveraging
from rankwise.errors import WorkerRaisedError
from rankwise.trainer import Trainer
from tests.helpers.parameters import first
from tests.process.training_tasks import Regression, dataset, quiet_trainer, step_by_hand, trainer_on

EPOCHS = 3
JOIN: dict[str, Any] = {"uneven_inputs": "join", "use_distributed_sampler": False}


class Watched(Regression):
    """Makes sure that all ranks end with the same optimizer state."""

    def __init__(self) -> None:
        super().__init__("adam")

    def on_train_end(self) -> None:
        optimizer = self.trainer.optimizers[0]
        mine = [tensor for state in optimizer.state.values() for tensor in state.values()]
        for other in self.trainer.strategy.all_gather_object(mine):
            torch.testing.assert_close(mine, other, rtol=0, atol=0)


class Lengths(IterableDataset[Any]):
    """Has, on each rank, as many samples as `counts` says: those which follow the other ranks' of a step."""

    def __init__(self, counts: tuple[int, ...]) -> None:
        self.counts = counts
        self.data = dataset(16)

    def steps(self) -> list[list[int]]:
        """Return the samples that the ranks have together, step by step."""
        numbers = itertools.count()
        return [[next(numbers) for count in self.counts if step < count] for step in range(max(self.counts))]

    def __iter__(self) -> Iterator[Any]:
        rank = torch.distributed.get_rank()
        for step, numbers in enumerate(self.steps()):
            if step < self.counts[rank]:
                before = sum(step < count for count in self.counts[:rank])
                yield self.data[numbers[before]]


def fitted(
    devices: int, loader: Any, ckpt_path: Path | None = None, strategy: Any = "ddp_fork", **options: Any
) -> tuple[dict[str, Tensor], Trainer]:
    """Return the weights after a fit."""
    trainer = quiet_trainer(strategy, devices, max_epochs=EPOCHS, **options)
    module = Watched()
    trainer.fit(module, loader, ckpt_path=ckpt_path)
    return dict(module.named_parameters()), trainer


def by_hand(steps: list[list[int]]) -> dict[str, Tensor]:
    """Return the weights of one process that takes these samples in each step."""
    module, data = Regression("adam"), dataset(16)
    [optimizer], [scheduler] = module.configure_optimizers()
    for _ in range(EPOCHS):
        for numbers in steps:
            x, y = (torch.stack(column) for column in zip(*[data[number] for number in numbers], strict=True))
            optimizer.zero_grad()
            nn.functional.mse_loss(module(x), y).backward()
            optimizer.step()
        scheduler.step()
    return dict(module.named_parameters())


def assert_equal(weights: dict[str, Tensor], steps: list[list[int]]) -> None:
    """The weights are those of one process that takes these samples in each step."""
    torch.testing.assert_close(weights, by_hand(steps), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("devices", "accumulate", "samples", "batch_size", "weighting"),
    [
        *((3, 1, 7, 1, None), (2, 2, 7, 1, None), (3, 1, 13, 2, "samples")),
        pytest.param(3, 2, 13, 2, "samples", marks=pytest.mark.quick),
    ],
)
def test_joining_ranks_train_as_one(
    devices: int, accumulate: int, samples: int, batch_size: int, weighting: Any
) -> None:
    """Every sample is seen once, and weights and optimizer state are one process's, on every rank.

    With samples weighted, last batches of any size and number add up to one process's global batch.
    """
    loader = DataLoader(Subset(dataset(16), range(samples)), batch_size)
    strategy = DDPForkStrategy(gradient_weighting=weighting)
    options: dict[str, Any] = {"uneven_inputs": "join", "accumulate_grad_batches": accumulate}
    weights, trainer = fitted(devices, loader, strategy=strategy, **options)
    together = devices * accumulate * batch_size
    steps = [list(range(samples))[first : first + together] for first in range(0, samples, together)]
    assert_equal(weights, steps)
    assert trainer.global_step == len(steps) * EPOCHS


def test_joining_counts_no_padding_in_metrics() -> None:
    """The epoch's metric is the mean over the samples that exist, at a learning rate of 0."""
    with torch.no_grad():
        module, (x, y) = Regression(), dataset(7).tensors
        expected = nn.functional.mse_loss(module(x), y)
    trainer = quiet_trainer("ddp_fork", 3, max_epochs=1, uneven_inputs="join", log_every_n_steps=1)
    trainer.fit(Still(), DataLoader(dataset(7), batch_size=1))
    torch.testing.assert_close(trainer.callback_metrics["train_loss_epoch"], expected, check_dtype=False)


class Still(Regression):
    """Does not learn."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        pytest.param(JOIN, 4, marks=pytest.mark.quick, id="join"),
        pytest.param(JOIN | {"uneven_inputs": "truncate", "limit_train_batches": 3}, 2, id="truncate"),
    ],
)
def test_data_without_lengths(options: dict[str, Any], steps: int) -> None:
    """The result is one process's; truncating stops all with the shortest, also below the longest's limit."""
    data = Lengths((2, 4, 3))
    weights, trainer = fitted(3, DataLoader(data, batch_size=1), **options)
    assert_equal(weights, data.steps()[:steps])
    assert trainer.global_step == steps * EPOCHS


class SizedOnRankZero:
    """A loader that has a length on rank zero only."""

    def __iter__(self) -> Iterator[Any]:
        return iter([dataset(2).tensors])

    def __len__(self) -> int:
        if torch.distributed.is_initialized() and torch.distributed.get_rank():
            raise TypeError
        return 1


@pytest.mark.soak
@pytest.mark.parametrize(
    ("accumulate", "num_workers", "steps"), [(1, 0, (3, 5)), pytest.param(2, 1, (2,), marks=pytest.mark.soak)]
)
def test_a_tail_without_lengths_is_resumed(
    accumulate: int, num_workers: int, steps: tuple[int, ...], tmp_path: Path
) -> None:
    """A run goes on from where a rank has run out of batches, as if it had not been interrupted."""
    loader = DataLoader(Lengths((6, 3)), batch_size=1, num_workers=num_workers)
    options = JOIN | {"accumulate_grad_batches": accumulate}
    saving = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=1)
    expected, _ = fitted(2, loader, enable_checkpointing=True, callbacks=saving, **options)
    for step in steps:
        weights, trainer = fitted(2, loader, ckpt_path=tmp_path / f"step={step}.ckpt", **options)
        assert trainer.global_step == len(range(0, 6, accumulate)) * EPOCHS
        torch.testing.assert_close(weights, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("mode", "loader", "text"),
    [
        ("error", DataLoader(Lengths((2, 4)), batch_size=1), "global_rank=0: 2, global_rank=1: more than 2"),
        ("error", SizedOnRankZero(), "global_rank=0: 1, global_rank=1: unknown"),
        ("join", DataLoader(Lengths((1, 0)), batch_size=1), "global_rank=0: more than 0, global_rank=1: 0"),
    ],
    ids=["no length", "a length on rank 0", "no batch"],
)
def test_error_without_lengths(mode: str, loader: Any, text: str) -> None:
    """The ranks raise together before the step for which one has no batch, with each rank's count.

    A loader that has a length on some ranks only is refused before the first step. A rank without any batch
    is an error even where ranks may join.
    """
    with pytest.raises(WorkerRaisedError, match=text) as caught:
        fitted(2, loader, **JOIN | {"uneven_inputs": mode})
    assert caught.value.exception_type == "UnevenInputsError"


class Seeing(Regression):
    """Keeps what its batch hooks and its step see: the sum of the first feature, and a metric of it."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torchmetrics.MeanMetric().set_dtype(torch.float64)
        self.seen = {"start": 0.0, "end": 0.0, "step": 0.0}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen["start"] += float(batch[0][:, 0].sum())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not self.trainer.is_padding_step:
            self.seen["step"] += float(batch[0][:, 0].sum())
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert not self.trainer.is_padding_step
        self.mean.update(batch[0][:, 0])
        self.seen["end"] += float(batch[0][:, 0].sum())

    def on_train_epoch_end(self) -> None:
        assert not self.trainer.is_padding_step
        self.log("mean", self.mean)
        for name, value in self.seen.items():
            self.log(name, value, sync_dist=True, reduce_fx="sum")


class CountingCallback(Callback):
    """Counts batches, of all ranks."""

    def __init__(self) -> None:
        self.counts = [0, 0]

    def on_train_batch_start(self, *arguments: Any) -> None:
        self.counts[0] += 1

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.counts[1] += 1

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.counts = trainer.strategy.all_reduce(torch.tensor(self.counts), reduce_op="sum").tolist()


class Averaging(WeightAveraging):
    """Extends a callback of rankwise, which counts steps."""

    def on_train_batch_end(self, *arguments: Any) -> None:
        super().on_train_batch_end(*arguments)
        self.calls = getattr(self, "calls", 0) + 1

    def on_train_end(self, trainer: Any, module: Any) -> None:
        super().on_train_end(trainer, module)
        assert trainer.strategy.all_gather_object(self.calls) == [3] * trainer.world_size


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.quick), 3])
def test_hooks_of_batches_see_each_sample_once(world_size: int, tmp_path: Path) -> None:
    """They are not called for padding steps, which `is_padding_step` tells the step."""
    counting = CountingCallback()
    saving = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=1)
    callbacks = {"callbacks": [counting, Averaging(), saving], "enable_checkpointing": True}
    trainer = trainer_on(world_size, max_epochs=1, uneven_inputs="join", **callbacks)
    data = dataset(13)
    trainer.fit(Seeing(), DataLoader(data, 6 // world_size))
    first = data.tensors[0][:, 0]
    metrics = {name: float(trainer.callback_metrics[name]) for name in ("mean", "start", "step", "end")}
    total = first.sum().item()
    expected = {"mean": first.mean().item(), "start": total, "step": total, "end": total}
    assert metrics == pytest.approx(expected, abs=1e-6)
    batches = sum(-(-len(range(rank, 13, world_size)) // (6 // world_size)) for rank in range(world_size))
    assert counting.counts == [batches] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step={step}.ckpt" for step in (1, 2, 3)]


class Exchanging(Regression):
    """Calls a collective in a place."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        self.automatic_optimization = place != "manual"

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.place in ("step", "manual"):
            self.all_gather(batch[0].sum())
        loss = super().training_step(batch, batch_idx)
        if not self.automatic_optimization:
            step_by_hand(self, loss)
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.place == "start":
            dist.all_reduce(torch.ones(()))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.place == "optimizer":
            self.all_gather(torch.ones(()))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.place == "saving":
            self.trainer.save_checkpoint(f"{self.trainer.default_root_dir}/saved.ckpt")


def exchange(place: str, world_size: int, samples: int, folder: Path) -> None:
    """Fit a module that calls a collective in a place."""
    options: dict[str, Any] = {"max_epochs": 1, "uneven_inputs": "join", "default_root_dir": folder}
    quiet_trainer("ddp_fork", world_size, **options).fit(Exchanging(place), DataLoader(dataset(samples), 2))


@pytest.mark.parametrize(
    ("place", "world_size"),
    [
        pytest.param("step", 2, marks=pytest.mark.quick),
        *first(2, [("manual", 2), ("start", 3), ("saving", 2), ("optimizer", 2)]),
    ],
)
def test_collectives_where_ranks_repeat_a_batch(place: str, world_size: int, tmp_path: Path) -> None:
    """They are refused in steps and hooks of batches, not before an optimizer step, which all ranks take."""
    refused = pytest.raises(WorkerRaisedError, match=r"in a step in which some ranks have no batch left")
    with nullcontext() if place == "optimizer" else refused:
        exchange(place, world_size, 4 * world_size + 1, tmp_path)
    exchange(place, world_size, 4 * world_size, tmp_path)
