"""Small modules and data to train in this process, and a strategy with a second rank made up by the test."""

import contextvars
import copy
import importlib.util
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from typing_extensions import override

from rankwise.callbacks import Callback, LambdaCallback, ModelCheckpoint
from rankwise.checkpoint import TorchCheckpointIO
from rankwise.environments import ClusterEnvironment
from rankwise.launchers import Launcher
from rankwise.launchers.context import WorkerContext
from rankwise.launchers.inline import InlineLauncher
from rankwise.loggers import Logger
from rankwise.processes.memory_file import owned_descriptor, pack, read_by_name, unpack
from rankwise.processes.returned_state import named_parts
from rankwise.ranks import RankInfo
from rankwise.strategies import Strategy
from rankwise.strategies.placement import Placement
from rankwise.trainer import Trainer, TrainingModule
from rankwise.trainer.data.stage_loaders import StageLoaders
from rankwise.trainer.stages import Stage
from rankwise.trainer.state import LoopContext
from rankwise.trainer.state_transfer import known_to_caller, restore
from rankwise.trainer.trainer import _run_on_rank

T = TypeVar("T")


class Line(TrainingModule):
    """Fits y = sum(x) and notes, in `seen`, which hooks and steps ran."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(2, 1)
        self.lr = lr
        self.seen: list[str] = []

    def loss(self, batch: list[Tensor]) -> Tensor:
        return nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(f"train {batch_idx}")
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(f"validate {batch_idx}")
        self.log("val_loss", self.loss(batch))

    @override
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    @override
    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        first: Tensor = batch[0][:, 0]
        return first

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class WithTwoOptimizers(Line):
    """Two layers, an optimizer for each, and a step that a test may replace."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        for optimizer, layer in ((first, self.layer), (second, self.other)):
            optimizer.zero_grad()
            self.manual_backward(nn.functional.mse_loss(layer(batch[0]), batch[1]))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (self.layer, self.other)]


class Failing(Line):
    """Raises in the training step of a batch, of which a fit has had so many."""

    def __init__(self, at: int = 0) -> None:
        super().__init__()
        self.at = at

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == self.at:
            raise ValueError("broken")
        return super().training_step(batch, batch_idx)


def samples(count: int = 8) -> TensorDataset:
    """Return `count` samples; the first feature is the sample's number."""
    x = torch.stack([torch.arange(count, dtype=torch.float32), torch.ones(count)], dim=1) / count
    return TensorDataset(x, x.sum(dim=1, keepdim=True))


def loader(count: int = 8, batch_size: int = 2, **options: Any) -> DataLoader[tuple[Tensor, ...]]:
    """Return a loader of `samples(count)`."""
    return DataLoader(samples(count), batch_size=batch_size, **options)


def trainer(folder: Path, **options: Any) -> Trainer:
    """Return a trainer for this process alone; it saves if a `ModelCheckpoint` is among the callbacks."""
    callbacks = options.get("callbacks")
    given = callbacks if isinstance(callbacks, Sequence) else [callbacks]
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "strategy": "single_device",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": any(isinstance(each, ModelCheckpoint) for each in given),
        "enable_progress_bar": False,
        "default_root_dir": folder,
    }
    return Trainer(**{**defaults, **options})


def fitted(
    folder: Path, model: TrainingModule | None = None, *data: Any, ckpt_path: Any = None, **options: Any
) -> Trainer:
    """Return a trainer that has fitted a module or a `Line`, to `loader()` if nothing else is given."""
    train, start = trainer(folder, **options), {"ckpt_path": ckpt_path}
    train.fit(model or Line(), *(data or [loader()]), **start)
    return train


def saved(folder: Path, model: TrainingModule | None = None, *data: Any, **options: Any) -> Path:
    """Return the path of a checkpoint that such a trainer has saved."""
    path = folder / "saved.ckpt"
    fitted(folder, model, *data, **options).save_checkpoint(path)
    return path


class Stream(IterableDataset[Any]):
    """Has these items, but neither their number nor indices."""

    def __init__(self, items: Any) -> None:
        self.items = list(items)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


def whole_and_continued(
    folder: Path, make: Callable[[], Line], make_callback: Callable[[], Callback], epoch: int, **options: Any
) -> tuple[Any, Any]:
    """Return a module that was fitted at once, and one that continued after an epoch of the first."""
    whole, continued, saving = make(), make(), ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    fitted(folder, whole, callbacks=[make_callback(), saving], **options)
    path = folder / f"epoch={epoch}.ckpt"
    fitted(folder, continued, callbacks=make_callback(), ckpt_path=path, **options)
    return whole, continued


def saving_each_step(folder: Path) -> Callback:
    """Return a callback that saves a checkpoint with the name of the step."""

    def save(trainer: Trainer, *_: Any) -> None:
        trainer.save_checkpoint(folder / f"{trainer.global_step}.ckpt")

    return LambdaCallback(on_train_batch_end=save)


class Recording(Logger):
    """Keeps metrics with their steps, hyperparameters, and how it was finalized."""

    def __init__(self) -> None:
        self.metrics: list[tuple[int | None, dict[str, float]]] = []
        self.hyperparameters: list[Any] = []
        self.ends: list[str] = []

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.metrics.append((step, dict(metrics)))

    def log_hyperparams(self, params: Any) -> None:
        self.hyperparameters.append(params)

    def finalize(self, status: str) -> None:
        self.ends.append(status)


def without_package(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """Let a package not be found, for the rest of a test."""
    find = importlib.util.find_spec

    def find_others(name: str, *rest: Any) -> Any:
        return None if name == missing else find(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", find_others)


class SlowIO(TorchCheckpointIO):  # type: ignore[misc]  # one that differs from the real one in this alone
    """Takes its time."""

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any) -> None:
        time.sleep(0.2)
        super().save_checkpoint(checkpoint, path)


def noting(owner: Any, letter: str, calls: Iterable[str], seen: list[str]) -> Any:
    """Let methods note their calls: those of `calls` that begin with the owner's letter."""
    base = type(owner)

    def noted(name: str) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(f"{letter} {name}")
            return getattr(base, name)(self, *args, **kwargs)

        return method

    names = {each[2:] for each in calls if each[0] == letter}
    owner.__class__ = type(base.__name__, (base,), {name: noted(name) for name in names})
    return owner


def calls_in(text: str) -> list[str]:
    """Return the calls that a text lists."""
    return [each.strip() for each in text.replace("\n", " ").split(",")]


class WithSecondRank(Strategy):
    """Rank 0 of two, in this process; what the other contributes is `other(what rank 0 does)`."""

    def __init__(self, other: Callable[[Any], Any]) -> None:
        super().__init__(accelerator="cpu", devices=2)
        self.other = other

    @override
    def place_ranks(
        self, environment: ClusterEnvironment, local_world_size: int, num_nodes: int | None
    ) -> RankInfo:
        return RankInfo(0, 0, 0, 2, 2, 1)

    @override
    def attach(self, worker: WorkerContext, *, has_group: bool = True) -> None:
        super().attach(worker, has_group=False)  # the other rank does not exist

    @override
    def create_launcher(self, placement: Placement) -> Launcher:
        return InlineLauncher(placement.ranks)

    @override
    def all_gather_object(self, obj: Any, group: Any = None) -> list[Any]:
        return [obj, self.other(obj)]

    @override
    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if reduce_op == "max":  # of a digest, and its complement
            return torch.maximum(tensor, self.other(tensor))
        return super().all_reduce(tensor, group, reduce_op)


def with_second_rank(other: Callable[[Any], Any]) -> WithSecondRank:
    """Return such a strategy, bound."""
    strategy = WithSecondRank(other)
    strategy.bind()
    return strategy


def sent_back(work: Callable[[], T], mine: nn.Module, context: LoopContext | None = None) -> T:
    """Return what a worker's `work` returns, sent to the process that has the module `mine`."""
    with ExitStack() as cleanup:
        descriptor = owned_descriptor(cleanup).number
        contextvars.copy_context().run(lambda: pack(work(), descriptor))
        with read_by_name(named_parts(mine) if context is None else known_to_caller(context).named):
            value: T = unpack(descriptor, copy=True)
            return value


def fit_elsewhere(train: Trainer, model: TrainingModule, their_model: Any = None, data: Any = None) -> None:
    """Fit as spawn does: copies of trainer and module train, and their state is restored here."""
    their_train, their_copy = pickle.loads(pickle.dumps((train, None if their_model else model)))
    stage = Stage(StageLoaders("fit", {"train": data or loader(), "validate": None}), seed=0)
    train._set_module(model, "fit")
    strategy = copy.copy(train.strategy)
    strategy.precision = pickle.loads(pickle.dumps(strategy.precision))

    def work() -> Any:
        return strategy.launch(
            _run_on_rank,
            model=their_model or their_copy,
            trainer=their_train,
            stage=stage,
            brings_state_back=True,
        )

    _, state = sent_back(work, model, train.context(model))
    restore(train.context(model), state)
