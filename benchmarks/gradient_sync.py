"""The cost of ways to average gradients, on 2 and on 4 ranks.

Compares forced sync with a loop that all-reduces each gradient separately, as Composer's does, on a model
with 200 small parameters. Compares logged weights (`gradient_weighting="logged"`) with plain DDP, with a
second all-reduce for the weight, and plain DDP with itself (the measurement error): on that model, on one
with 5 million parameters, and on one with six, whose step is mostly call overhead. `paired.py` compares
them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.paired import Arm, Figures, compared
from benchmarks.programs import run_ranks
from benchmarks.results import Result, Row, rows_of_figures
from benchmarks.sampling import Sampling
from rankwise import DDPStrategy
from rankwise.gradient_sync import GradientSync, gradient_sync_context


def measure(sampling: Sampling) -> Result:
    """Measure all cases, on each number of ranks in one job."""
    request = {"rounds": sampling.rounds, "ranks": [2] if sampling.is_quick else [2, 4]}
    rows = [Row.of_json(row) for row in run_ranks("benchmarks.gradient_sync", request)]
    return Result("gradient_sync", rows)


# ------------------------------------------------------------------------------------- forced sync


def reduce_each(model: nn.Module) -> None:
    """Average each gradient separately."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def forced_sync(strategy: DDPStrategy, rounds: int) -> Figures:
    """Time the averaging of existing gradients."""
    models = [small(), small()]
    for model in models:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)

    def ours() -> None:
        with gradient_sync_context(models[0], mode="forced_sync"):
            pass

    arms: dict[str, Arm] = {"a loop over parameters": lambda: reduce_each(models[1]), "forced_sync": ours}
    return compared(arms, rounds=rounds, calls=3)


# ------------------------------------------------------------------------------------- weights


def large() -> nn.Module:
    """Return a model of 5 million parameters."""
    return nn.Sequential(
        nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 1900), nn.ReLU(), nn.Linear(1900, 16)
    )


def small() -> nn.Module:
    """Return a model of 200 small parameters."""
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(100)))


def tiny() -> nn.Module:
    """Return a model of six parameters with 6,337 elements."""
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))


def stepper(strategy: DDPStrategy, model: nn.Module, weighting: str | None, extra: bool = False) -> Arm:
    """Return a whole training step: forward, backward, optimizer."""
    strategy.gradients = sync = GradientSync(gradient_weighting=weighting)
    strategy.ddp_kwargs = sync.ddp_defaults
    wrapped = strategy.setup_module(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-6)
    samples = torch.randn(32, model[0].in_features)  # type: ignore[index]  # a Sequential

    def step() -> None:
        optimizer.zero_grad()
        with sync.context(wrapped, [optimizer], True, strategy.no_backward_sync):
            loss: Tensor = wrapped(samples).square().mean()
            if extra:
                total = torch.tensor([32.0])
                dist.all_reduce(total)
                loss = loss * (32 * dist.get_world_size() / total[0])
            (sync.weight_loss(loss, 32) if weighting else loss).backward()
        optimizer.step()

    return step


def weights(strategy: DDPStrategy, rounds: int, kind: Callable[[], nn.Module], steps: int) -> Figures:
    """Time whole steps."""
    arms = {
        "plain DDP": stepper(strategy, kind(), None),
        'gradient_weighting="logged"': stepper(strategy, kind(), "logged"),
        "a second all-reduce": stepper(strategy, kind(), None, extra=True),
        "plain DDP again": stepper(strategy, kind(), None),
    }
    return compared(arms, rounds=rounds, calls=steps)


# ------------------------------------------------------------------------------------- the table


def run(strategy: DDPStrategy, rounds: int) -> dict[str, Figures]:
    """Measure everything on this rank."""
    return {
        "averaging 200 small gradients": forced_sync(strategy, rounds),
        "a step of a tiny model": weights(strategy, rounds, tiny, steps=20),
        "a step of a model with 200 small parameters": weights(strategy, rounds, small, steps=5),
        "a step of a model with 5 M parameters": weights(strategy, rounds, large, steps=2),
    }


def main() -> None:
    """Run as a program: measure on each number of ranks of a request."""
    request = json.loads(sys.argv[1])
    rows: list[Row] = []
    for ranks in request["ranks"]:
        strategy: Any = DDPStrategy(start_method="fork", accelerator="cpu", devices=ranks)
        for title, figures in strategy.launch(run, request["rounds"]).items():
            rows += rows_of_figures(f"{title}, {ranks} ranks", figures)
    Path(request["folder"], "result").write_text(json.dumps([row.to_json() for row in rows]))


if __name__ == "__main__":
    main()
