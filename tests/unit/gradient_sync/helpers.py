"""Small models in float64, on ranks that are threads, and the results of one process on the same data."""

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rankwise import SingleDeviceStrategy, TrainingModule
from tests.helpers.exactness import weights
from tests.helpers.threaded import ThreadedStrategy, run_ranks
from tests.process.training_tasks import quiet_trainer

FEATURES = 3
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
    strategy: ThreadedStrategy, wrapped: nn.Module, sizes: Sequence[int] = (2, 2), weighted: bool = False
) -> list[Tensor | None]:
    """Accumulate the gradients of a window of microbatches of these sizes; return them."""
    for number, size in enumerate(sizes):
        samples = batch(strategy.global_rank, number, size)
        with strategy.gradient_sync_context(wrapped, is_final_microbatch=number == len(sizes) - 1):
            loss = loss_of(wrapped, samples)
            loss = strategy.weighted_loss(loss, size) if weighted else loss / len(sizes)
            loss.backward()
    return gradients(strategy.unwrap_module(wrapped))


def alone(model: nn.Module, samples: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the gradients of one process on all samples at once."""
    single = copy.deepcopy(model)
    loss_of(single, torch.cat(list(samples))).backward()
    return gradients(single)


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
        return loss if self.automatic_optimization else self.step_by_hand(loss)

    def step_by_hand(self, loss: Tensor, **options: Any) -> None:
        """Take a step of manual optimisation."""
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss, **options)
        optimizer.step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_alone(module: TrainingModule, data: Any, weighting: str | None = None, **arguments: Any) -> Tensor:
    """Fit in this process, one epoch if nothing else is said; return the weights."""
    strategy = SingleDeviceStrategy(gradient_weighting=weighting, accelerator="cpu")
    quiet_trainer(strategy, 1, **{"max_epochs": 1, **arguments}).fit(module, data)
    return weights(module)


def fit_on_ranks(
    modules: Sequence[TrainingModule],
    data: Any,
    options: dict[str, Any] | None = None,
    kind: type[ThreadedStrategy] = ThreadedStrategy,
    **arguments: Any,
) -> list[Tensor]:
    """Fit each module on a rank, one epoch if nothing else is said; return each rank's weights.

    The data are a loader or a function that returns a rank's, and the options are the strategy's.
    """

    def fit(rank: int) -> Tensor:
        strategy = kind(rank, len(modules), **(options or {}))
        trainer = quiet_trainer(strategy, len(modules), **{"max_epochs": 1, **arguments})
        trainer.fit(modules[rank], data(rank) if callable(data) else data)
        return weights(modules[rank])

    return run_ranks(len(modules), fit)
