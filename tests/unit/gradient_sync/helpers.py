"""Small models in float64, on ranks that are threads, and the results of one process on the same data."""

import copy
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rankwise import SingleDeviceStrategy, TrainingModule
from rankwise.gradient_sync import register_ddp_comm_hook
from tests.helpers.exactness import weights
from tests.helpers.threaded import ThreadedStrategy, run_ranks
from tests.process.training_tasks import quiet_trainer

FEATURES = 3
SIZES = ((4, 1), (3, 2), (0, 5))  # of the two microbatches of each of three ranks
_drawing = threading.Lock()


def net(seed: int = 0) -> nn.Module:
    """Return a model of four parameters."""
    with _drawing:  # ranks may be threads, which have one generator
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def batch(rank: int, number: int = 0, size: int = 2) -> Tensor:
    """Return the same random samples every time."""
    generator = torch.Generator().manual_seed(100 * rank + number)
    return torch.randn(size, FEATURES, dtype=torch.float64, generator=generator)


def batches_of(sizes: Iterable[Iterable[int]]) -> list[Tensor]:
    """Return the batches of all ranks, of each of which these are the sizes."""
    return [batch(rank, number, size) for rank, own in enumerate(sizes) for number, size in enumerate(own)]


def loss_of(model: nn.Module, samples: Tensor) -> Tensor:
    """Return a mean over samples."""
    loss: Tensor = (model(samples) - samples.sum(dim=1, keepdim=True)).square().mean()
    return loss


def gradients(model: nn.Module) -> list[Tensor | None]:
    """Return copies of a model's gradients."""
    return [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]


def on_ranks(
    world_size: int, work: Callable[[ThreadedStrategy, nn.Module], Any], model: nn.Module, **arguments: Any
) -> list[Any]:
    """Run `work(strategy, wrapped model)` on every rank, each with its own copy of the model."""
    copies = [copy.deepcopy(model) for _ in range(world_size)]

    def run(rank: int) -> Any:
        strategy = ThreadedStrategy(rank, world_size, **arguments)
        return strategy.launch(lambda s: work(s, s.setup_module(copies[rank])))

    return run_ranks(world_size, run)


def accumulate(
    strategy: ThreadedStrategy, wrapped: nn.Module, sizes: Sequence[int] = (2, 2), scale: float = 1.0
) -> list[Tensor | None]:
    """Accumulate the gradients of a window of microbatches of these sizes, which weigh them; return them."""
    is_weighted = strategy.gradient_weighting == "logged"
    for number, size in enumerate(sizes):
        samples = batch(strategy.global_rank, number, max(1, size))  # there is no mean of nothing
        with strategy.gradient_sync_context(wrapped, is_final_microbatch=number == len(sizes) - 1):
            loss = loss_of(wrapped, samples)
            loss = strategy.weighted_loss(loss, size) if is_weighted else loss / len(sizes)
            (loss * scale).backward()
    return gradients(strategy.unwrap_module(wrapped))


def alone(model: nn.Module, samples: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the gradients of one process on all samples at once."""
    single = copy.deepcopy(model)
    loss_of(single, torch.cat(list(samples))).backward()
    return gradients(single)


def stepped_alone(module: "Sums", windows: Iterable[Tensor]) -> Tensor:
    """Train a module with a step of one process for each window of samples; return the weights."""
    optimizer = module.configure_optimizers()
    for window in windows:
        optimizer.zero_grad()
        loss_of(module.net, window).backward()
        optimizer.step()
    return weights(module)


def bare(model: nn.Module) -> DistributedDataParallel:
    """Wrap a model with torch alone."""
    return DistributedDataParallel(model)


def assert_close(left: Sequence[Tensor | None], right: Sequence[Tensor | None], atol: float = 1e-12) -> None:
    """Compare gradients, missing ones included."""
    assert [tensor is None for tensor in left] == [tensor is None for tensor in right]
    for mine, theirs in zip(left, right, strict=True):
        if mine is not None and theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=0, atol=atol)


def assert_each(found: Sequence[Any], expected: Any, atol: float = 1e-12) -> None:
    """Compare what each rank has with what one process has: a list of gradients, or weights."""
    for own in found:
        left, right = (own, expected) if isinstance(expected, list) else ([own], [expected])
        assert_close(left, right, atol)


class Layers(nn.Module):
    """Three layers, some of them frozen, a scale that is in no module, and what tests add."""

    def __init__(self, *frozen: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.first = nn.Linear(FEATURES, 4).double()
        self.second = nn.Linear(4, 4).double()
        self.last = nn.Linear(4, 1).double()
        self.scale = [nn.Parameter(torch.ones((), dtype=torch.float64))]
        self.extra: nn.Module | None = None
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.4, generator=generator)
        for name in frozen:
            self.get_submodule(name).requires_grad_(False)

    def forward(self, samples: Tensor) -> Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(samples))))
        extra = 0.0 if self.extra is None else self.extra(samples)
        result: Tensor = self.last(hidden) * self.scale[0] + extra
        return result

    def add_layer(self, offset: float = 0.0) -> nn.Module:
        """Add a layer with the same values every time, but for the offset."""
        self.extra = nn.Linear(FEATURES, 1).double()
        for parameter in self.extra.parameters():
            nn.init.constant_(parameter, 0.3 + offset)
        return self.extra

    def values(self) -> list[Tensor]:
        """Return copies of all parameters, also of the one outside."""
        return [parameter.detach().clone() for parameter in (*self.parameters(), *self.scale)]


def step_by_hand(module: TrainingModule, loss: Tensor, **options: Any) -> None:
    """Take a step of manual optimisation."""
    optimizer: Any = module.optimizers()
    optimizer.zero_grad()
    module.manual_backward(loss, **options)
    optimizer.step()


class Sums(TrainingModule):
    """Fits the sums of samples by SGD, in automatic or in manual optimisation."""

    def __init__(self, *, by_hand: bool = False) -> None:
        super().__init__()
        self.net = net()
        self.automatic_optimization = not by_hand

    def loss(self, batch: Any) -> Tensor:
        return loss_of(self.net, batch[0])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        return loss if self.automatic_optimization else step_by_hand(self, loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def registering(hook: str) -> type[ThreadedStrategy]:
    """Return a strategy that registers a communication hook with the module that it has wrapped."""

    class Registering(ThreadedStrategy):
        def setup_module(self, module: nn.Module) -> nn.Module:
            wrapped = super().setup_module(module)
            register_ddp_comm_hook(wrapped, hook=hook)
            return wrapped

    return Registering


def fit_alone(
    module: TrainingModule,
    data: Any,
    weighting: str | None = None,
    ckpt_path: Path | None = None,
    **arguments: Any,
) -> Tensor:
    """Fit in this process, one epoch if nothing else is said; return the weights."""
    strategy = SingleDeviceStrategy(gradient_weighting=weighting, accelerator="cpu")
    trainer = quiet_trainer(strategy, 1, **{"max_epochs": 1, **copy.deepcopy(arguments)})
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return weights(module)


def fit_rank(
    rank: int,
    modules: Sequence[TrainingModule],
    data: Any,
    options: dict[str, Any] | None = None,
    kind: type[ThreadedStrategy] = ThreadedStrategy,
    ckpt_path: Path | None = None,
    **arguments: Any,
) -> Tensor:
    """Fit a rank's module, one epoch if nothing else is said; return its weights.

    The data are a loader or a function that returns a rank's, and the options are the strategy's. The
    Trainer has copies of the arguments.
    """
    strategy = kind(rank, len(modules), **(options or {}))
    trainer = quiet_trainer(strategy, len(modules), **{"max_epochs": 1, **copy.deepcopy(arguments)})
    trainer.fit(modules[rank], data(rank) if callable(data) else data, ckpt_path=ckpt_path)
    return weights(modules[rank])


def fit_on_ranks(modules: Sequence[TrainingModule], *details: Any, **more: Any) -> list[Tensor]:
    """Fit each module on a rank as `fit_rank` does; return each rank's weights."""
    return run_ranks(len(modules), lambda rank: fit_rank(rank, modules, *details, **more))


def refused_on_ranks(
    error: type[Exception], words: str, modules: Sequence[TrainingModule], *details: Any, **more: Any
) -> str:
    """Fit so, which every rank refuses with this error; return its text."""

    def fit(rank: int) -> str:
        with pytest.raises(error, match=words) as caught:
            fit_rank(rank, modules, *details, **more)
        return str(caught.value)

    return run_ranks(len(modules), fit)[0]
