"""Random training loops without a Trainer, of one to three wrapped modules; and the same loops by hand."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.helpers.threaded import ThreadedStrategy

FEATURES = 3
Sizes = tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True)
class Loop:
    """A training loop.

    Attributes:
        sizes: batch sizes by step, microbatch and rank; with logged weights 0 is a batch that does not count.
        is_chain: whether the loss is that of all modules, one after another; otherwise each has its own.
        orders: for each step, the order in which modules of their own losses run.
    """

    world_size: int
    sizes: Sizes
    num_modules: int
    is_chain: bool
    orders: tuple[tuple[int, ...], ...]
    weighting: str | None
    sync_mode: str
    finds_unused: bool
    bucket_cap_mb: float
    optimizer: str


@st.composite
def loops(draw: st.DrawFn) -> Loop:
    """Draw a loop in which every step has a batch that counts."""
    world_size = draw(st.integers(2, 3))
    num_modules, num_steps, num_microbatches = (draw(st.integers(1, 3)) for _ in range(3))
    weighting: str | None = draw(st.sampled_from(["logged", None]))
    of_rank = st.integers(0 if weighting else 1, 4)
    of_microbatch = st.tuples(*[of_rank] * world_size)
    of_step = st.tuples(*[of_microbatch] * num_microbatches).filter(lambda step: any(map(any, step)))
    sync_mode = draw(st.sampled_from(["single_auto_sync", "multi_auto_sync", "forced_sync"]))
    return Loop(
        world_size,
        draw(st.tuples(*[of_step] * num_steps)),
        num_modules,
        draw(st.booleans()),
        draw(st.tuples(*[st.permutations(range(num_modules)).map(tuple)] * num_steps)),
        weighting,
        sync_mode,
        sync_mode != "forced_sync" and draw(st.booleans()),
        draw(st.sampled_from([25, 0.0001])),
        draw(st.sampled_from(["sgd", "adam"])),
    )


def make_modules(loop: Loop) -> list[nn.Module]:
    """Return the modules, each with an output of the size of its input."""
    torch.manual_seed(3)
    layers = [nn.Linear(FEATURES, FEATURES, dtype=torch.float64) for _ in range(2 * loop.num_modules)]
    return [
        nn.Sequential(one, nn.Tanh(), other) for one, other in zip(layers[::2], layers[1::2], strict=True)
    ]


def make_optimizers(loop: Loop, modules: list[nn.Module]) -> list[torch.optim.Optimizer]:
    """Return an optimizer for each module."""
    if loop.optimizer == "sgd":
        return [torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9) for module in modules]
    return [torch.optim.Adam(module.parameters(), lr=0.02, eps=1e-3) for module in modules]


def batch(step: int, microbatch: int, rank: int, size: int) -> Tensor:
    """Return random samples of shape (size, FEATURES); one where the batch does not count."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * microbatch + rank)
    return torch.randn(max(1, size), FEATURES, dtype=torch.float64, generator=generator)


def groups_of(loop: Loop, step: int) -> Iterator[list[int]]:
    """Yield the modules that have a loss together."""
    if loop.is_chain:
        yield list(range(loop.num_modules))
    else:
        yield from ([number] for number in loop.orders[step])


def loss_of(modules: list[nn.Module], samples: Tensor) -> Tensor:
    """Return the mean squared error of modules one after another."""
    predicted = samples
    for module in modules:
        predicted = module(predicted)
    mean: Tensor = (predicted - samples.sin()).square().sum(dim=1).mean()
    return mean


def state_of(modules: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    """Return what is compared."""
    states = [module.state_dict() for module in modules]
    return {"modules": states, "optimizers": [optimizer.state_dict() for optimizer in optimizers]}


def run_on_rank(rank: int, world_size: int, loop: Loop) -> dict[str, Any]:
    """Train on a rank."""
    of_ddp = {"find_unused_parameters": loop.finds_unused, "bucket_cap_mb": loop.bucket_cap_mb}
    syncing = {"gradient_weighting": loop.weighting, "sync_mode": loop.sync_mode}
    strategy = ThreadedStrategy(rank, world_size, **syncing, **of_ddp)
    result: dict[str, Any] = strategy.launch(_train, loop)
    return result


def _train(strategy: Any, loop: Loop) -> dict[str, Any]:
    modules = make_modules(loop)
    wrapped = [strategy.setup_module(module) for module in modules]
    optimizers = make_optimizers(loop, modules)
    for step, microbatches in enumerate(loop.sizes):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for number, sizes in enumerate(microbatches):
            size = sizes[strategy.global_rank]
            samples = batch(step, number, strategy.global_rank, size)
            for group in groups_of(loop, step):
                with ExitStack() as stack:
                    for place in group:
                        is_final = number == len(microbatches) - 1
                        enter = strategy.gradient_sync_context(wrapped[place], [optimizers[place]], is_final)
                        stack.enter_context(enter)
                    loss = loss_of([wrapped[place] for place in group], samples)
                    if loop.weighting == "logged":
                        loss = strategy.weighted_loss(loss, size)
                    else:
                        loss = loss / len(microbatches)
                    strategy.backward(loss)
        for optimizer in optimizers:
            strategy.optimizer_step(optimizer)
    return state_of(modules, optimizers)


def run_by_hand(loop: Loop) -> dict[str, Any]:
    """Train in one process, without rankwise."""
    modules = make_modules(loop)
    optimizers = make_optimizers(loop, modules)
    for step, microbatches in enumerate(loop.sizes):
        for optimizer in optimizers:
            optimizer.zero_grad()
        counts = [size if loop.weighting else 1 for sizes in microbatches for size in sizes]
        for group in groups_of(loop, step):
            for number, sizes in enumerate(microbatches):
                for rank, size in enumerate(sizes):
                    loss = loss_of([modules[place] for place in group], batch(step, number, rank, size))
                    (loss * ((size if loop.weighting else 1) / sum(counts))).backward()
        for optimizer in optimizers:
            optimizer.step()
    return state_of(modules, optimizers)
