"""What the bodies of hooks do in random programs, on both sides of the comparison."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import torch

from tests.programs.learning import Net
from tests.programs.program import Deed

EPOCH_HOOKS = (
    *("on_train_epoch_start", "on_train_epoch_end"),
    *("on_validation_epoch_start", "on_validation_epoch_end"),
)
STEP_HOOKS = ("on_before_optimizer_step", "step")
BATCH_HOOKS = ("on_train_batch_start", "on_train_batch_end")
HOOKS = (*EPOCH_HOOKS, *STEP_HOOKS, *BATCH_HOOKS)
BODIES = ("read", "write", "draw", "noise", "collective", "rate")
STEP_BODIES = (*BODIES, "gradients")


def draw() -> float:
    """Draw a number from each of the global random states; return their sum."""
    return float(torch.rand(())) + random.random() + float(np.random.rand())


def perform(
    deed: Deed,
    net: Net,
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    add_up: Callable[[], float],
    draw: Callable[[], float],
) -> float:
    """Do what the body of a hook does; return a number that is the same on all ranks.

    `add_up` gives the sum of 1, 2, ... over the ranks, by a collective; `draw` a random number.
    """
    with torch.no_grad():
        match deed.body:
            case "write":
                net.head.weight.mul_(0.9)
            case "draw":
                return draw()
            case "noise":
                net.head.weight.add_(0.01 * draw())
            case "collective":
                return add_up()
            case "rate":
                for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                    group["lr"] *= 0.9
            case "gradients":
                for parameter in net.parameters():
                    if parameter.grad is not None:
                        parameter.grad.clamp_(-0.05, 0.05)
        return float(net.head.weight.sum())
