"""Training with several loaders: batches, orders, weights, limits, and resuming at any batch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from rankwise import SingleDeviceStrategy, Trainer, TrainingModule
from rankwise.callbacks import LambdaCallback
from rankwise.data import CombinedLoader
from rankwise.errors import ConfigurationError, InvalidTypeError
from tests.helpers.raising import raises
from tests.unit.trainer.helpers import Stream, saving_each_step, trainer


def numbers(first: int, count: int, batch_size: int | None = 2, **options: Any) -> DataLoader[Any]:
    """Return a loader of the numbers from `first` on."""
    data = TensorDataset(torch.arange(first, first + count, dtype=torch.float32))
    return DataLoader(data, batch_size=batch_size, **options)


def listed(batch: Any) -> Any:
    """Return a batch with its tensors as tuples of numbers."""
    if isinstance(batch, dict):
        return {key: listed(part) for key, part in batch.items()}
    if isinstance(batch, Tensor):
        return tuple(batch.flatten().tolist())
    if isinstance(batch, (list, tuple)) and len(batch) == 1:
        return listed(batch[0])
    return [listed(part) for part in batch] if isinstance(batch, (list, tuple)) else batch


def tensors(batch: Any) -> list[Tensor]:
    """Return the tensors in a batch."""
    if isinstance(batch, Tensor):
        return [batch]
    parts = batch.values() if isinstance(batch, dict) else batch or ()
    return [tensor for part in parts for tensor in tensors(part)]


class Sum(TrainingModule):
    """Notes its batches; its loss depends on all parts and on the random state."""

    def __init__(self, batch_size: int | None = None) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.scale = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(listed(batch))
        parts = [part.double().mean() for part in tensors(batch)]
        loss: Tensor = ((self.scale - sum(parts) - torch.rand(()) / 10) ** 2) / 100
        self.log("loss", loss.detach(), on_epoch=True, batch_size=self.batch_size)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3)


def seen(folder: Path, loaders: Any, **options: Any) -> list[Any]:
    """Return the batches of a fit."""
    model = Sum()
    trainer(folder, **options).fit(model, loaders)
    return model.seen


def test_structure_and_default_mode(tmp_path: Path) -> None:
    """Dictionaries, lists and nested ones: the shorter loader begins again, as in Lightning."""
    a, b = numbers(0, 6), numbers(10, 4)
    assert seen(tmp_path, {"a": a, "b": b}) == [
        {"a": (0, 1), "b": (10, 11)},
        {"a": (2, 3), "b": (12, 13)},
        {"a": (4, 5), "b": (10, 11)},
    ]
    assert seen(tmp_path, [numbers(10, 2), a])[-1] == [(10, 11), (4, 5)]
    assert seen(tmp_path, {"x": [a, {"y": b}]})[0] == {"x": [(0, 1), {"y": (10, 11)}]}


@pytest.mark.parametrize(
    ("mode", "last", "count"),
    [
        ("min_size", [(2, 3), (12, 13)], 2),
        ("max_size", [(4, 5), None], 3),
        ("max_size_cycle", [(4, 5), (10, 11)], 3),
    ],
)
def test_modes(tmp_path: Path, mode: Any, last: Any, count: int) -> None:
    """Each mode ends where it says; `num_training_batches` is the number of batches."""
    runs, model = trainer(tmp_path), Sum()
    runs.fit(model, CombinedLoader([numbers(0, 6), numbers(10, 4)], mode))
    assert model.seen[-1] == last
    assert (len(model.seen), runs.num_training_batches) == (count, count)


@pytest.mark.parametrize(
    ("mode", "length", "count"), [("min_size", 4, 0), ("max_size", 4, 2), ("max_size_cycle", 0, 0)]
)
def test_a_loader_without_a_batch(tmp_path: Path, mode: Any, length: int, count: int) -> None:
    """A warning says that it trains nothing."""
    with pytest.warns(UserWarning, match="The training loader is empty"):
        assert len(seen(tmp_path, CombinedLoader([numbers(0, length), numbers(0, 0)], mode))) == count


def test_limits(tmp_path: Path) -> None:
    """A limit counts batches of the combination, and a fraction is one of their number.

    A loader without length ends the epoch when it ends, or begins again.
    """
    loaders = [numbers(0, 12), numbers(20, 4)]
    stream = DataLoader(Stream(numbers(0, 6).dataset), batch_size=2)
    assert len(seen(tmp_path, loaders, limit_train_batches=4)) == 4
    assert len(seen(tmp_path, loaders, limit_train_batches=0.5)) == 3
    assert len(seen(tmp_path, CombinedLoader([stream, numbers(0, 20)], "min_size"))) == 3
    assert [row[0] for row in seen(tmp_path, [stream, numbers(0, 8)])] == [(0, 1), (2, 3), (4, 5), (0, 1)]


def test_orders(tmp_path: Path) -> None:
    """Loaders over the same data, and passes over one, have orders of their own, and use each sample once.

    The orders depend on the generators of all loaders, and on nothing else.
    """
    batches = seen(tmp_path, [numbers(0, 16, shuffle=True), numbers(0, 16, shuffle=True)])
    first, second = ([x for row in batches for x in row[part]] for part in (0, 1))
    assert sorted(first) == sorted(second) == list(range(16))
    assert first != second
    batches = seen(tmp_path, [numbers(0, 8, shuffle=True), numbers(0, 16)])
    cycled = [x for row in batches for x in row[0]]
    assert sorted(cycled[:8]) == sorted(cycled[8:]) == list(range(8))
    assert cycled[:8] != cycled[8:]

    def seeded(*seeds: int) -> list[Any]:
        torch.manual_seed(int(torch.randint(1000, ())))
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        return seen(tmp_path, [numbers(0, 8, shuffle=True, generator=each) for each in generators])

    expected = seeded(1, 2)
    assert seeded(1, 2) == expected
    assert expected not in (seeded(1, 3), seeded(0, 2))


LOADERS: dict[str, Callable[[], Any]] = {
    "cycle": lambda: [numbers(0, 10, shuffle=True), numbers(20, 5, shuffle=True), numbers(30, 2)],
    "min": lambda: CombinedLoader({"a": numbers(0, 10, shuffle=True), "b": numbers(20, 14)}),
    "max": lambda: CombinedLoader([numbers(0, 10), numbers(20, 5, shuffle=True)], "max_size"),
    "stream": lambda: [numbers(0, 10, shuffle=True), DataLoader(Stream(numbers(0, 3).dataset), batch_size=2)],
    "unbatched": lambda: [numbers(0, 5, None, shuffle=True), numbers(20, 3, 1, shuffle=True)],
}


@pytest.mark.full
@pytest.mark.parametrize("kind", LOADERS)
def test_resuming_at_every_batch(tmp_path: Path, kind: str) -> None:
    """A run that is stopped after any step of two epochs continues with the same batches and weights."""
    size = 1 if kind == "unbatched" else None
    whole, runs = Sum(size), trainer(tmp_path, max_epochs=2, callbacks=saving_each_step(tmp_path))
    torch.manual_seed(1)
    runs.fit(whole, LOADERS[kind]())
    assert len(whole.seen) in (8, 10)
    for step in range(1, len(whole.seen)):
        torch.manual_seed(99)
        model, resumed = Sum(size), trainer(tmp_path, max_epochs=2)
        resumed.fit(model, LOADERS[kind](), ckpt_path=tmp_path / f"{step}.ckpt")
        assert model.seen == whole.seen[step:]
        assert torch.equal(model.scale, whole.scale)
        assert resumed.callback_metrics["loss_epoch"] == runs.callback_metrics["loss_epoch"]


def test_weights_by_samples(tmp_path: Path) -> None:
    """In a window batches count by the sizes of the first loader's parts, and so do logged means."""

    class Mean(Sum):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            mean = batch[0][0].double().mean()
            self.log("mean", mean, on_epoch=True, on_step=False)
            loss: Tensor = self.scale * mean
            return loss

    model, strategy = Mean(), SingleDeviceStrategy(gradient_weighting="samples")
    runs = trainer(tmp_path, strategy=strategy, accumulate_grad_batches=3)
    runs.fit(model, [numbers(0, 5), numbers(0, 9, 3)])
    assert runs.callback_metrics["mean"] == pytest.approx((0 + 1 + 2 + 3 + 4) / 5)
    assert model.scale.item() == pytest.approx(-0.3 * (0 + 1 + 2 + 3 + 4) / 5)


def test_batch_indices(tmp_path: Path) -> None:
    """`trainer.batch_indices` has those of each loader, also of one alone."""
    found: list[Any] = []

    def note(runs: Trainer, *_: Any) -> None:
        found.append((runs.batch_indices(0), runs.batch_indices(1)))

    combined = CombinedLoader([numbers(0, 4), numbers(20, 2)], "max_size")
    for loaders in (combined, numbers(0, 4)):
        seen(tmp_path, loaders, callbacks=LambdaCallback(on_train_batch_start=note))
    assert found == [([0, 1], [0, 1]), ([2, 3], None), ([0, 1], None), ([2, 3], None)]


def test_in_evaluation(tmp_path: Path) -> None:
    """There all containers, and the mode "sequential", mean one loader after another."""

    class Evaluated(Sum):
        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.seen.append((listed(batch), dataloader_idx))

        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return batch

    model = Evaluated()
    loaders = {"a": numbers(0, 2), "b": [numbers(10, 2)]}
    trainer(tmp_path).test(model, loaders)
    trainer(tmp_path).test(model, CombinedLoader(loaders, "sequential"))
    assert model.seen == [((0, 1), 0), ((10, 11), 1)] * 2
    assert len(trainer(tmp_path).predict(model, loaders)) == 2


@pytest.mark.parametrize(
    ("stage", "loaders", "options", "message"),
    [
        ("fit", CombinedLoader([numbers(0, 2)], "sequential"), {}, "is for evaluation, not for training"),
        ("test", CombinedLoader([numbers(0, 2)]), {}, "is for training, not for test"),
        ("fit", {"a": numbers(0, 2)}, {"uneven_inputs": "join"}, "uneven_inputs='join' needs one"),
        ("fit", {}, {}, r"fit\(\) has 0 training loaders"),
        ("fit", [numbers(0, 4), numbers(0, 0)], {}, "Loader 1 of several has no batch"),
    ],
)
def test_what_is_refused(tmp_path: Path, stage: str, loaders: Any, options: Any, message: str) -> None:
    """Combinations that a stage does not have are refused by name, and so is what cannot be iterated over."""
    raises(InvalidTypeError, "dataloaders=3", trainer(tmp_path).fit, Sum(), {"a": numbers(0, 2), "b": 3})
    model = Sum()
    model.test_step = lambda batch, batch_idx: None  # type: ignore[method-assign]  # as users do
    raises(ConfigurationError, message, getattr(trainer(tmp_path, **options), stage), model, loaders)
    model.train_dataloader = model.test_dataloader = lambda: loaders  # type: ignore[method-assign]  # as users do
    raises(ConfigurationError, message, getattr(trainer(tmp_path, **options), stage), model)
