"""Check that all ranks have the same values, by digests, and the same checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from rankwise.errors import UNOWNED, ConfigurationError
from rankwise.gradient_sync.parameters import parameters_of
from rankwise.process_group.rank_facts import digests_of
from rankwise.strategies.agreement import check_ranks_agree, values_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.optim import Optimizer

    from rankwise.strategies import Strategy
    from rankwise.trainer.state import LoopContext


def check_values(context: LoopContext, *, with_buffers: bool = False) -> None:
    """Make sure that all ranks have the same parameters and optimizer states. Collective.

    Buffers are the same only where they have just been shared. Left out are what DDP is configured to ignore,
    and the states of sharded optimizers.

    Raises:
        RankMismatchError: names what differs, parameters first.
    """
    strategy, module = context.strategy, context.module
    if strategy.world_size == 1:
        return
    values = values_of(module, with_buffers=with_buffers)
    compared = {id(tensor) for tensor in values.values()}
    ignored = {id(parameter) for parameter in module.parameters()} - compared
    for number, optimizer in enumerate(context.optimizers):
        for place, parameter in enumerate(parameters_of(optimizer)):
            if id(parameter) not in ignored and not strategy.is_sharded(optimizer):
                label = f"parameter {place} of optimizer {number}"
                values |= _state_of(optimizer, parameter, label)
                if id(parameter) not in compared:
                    values[f"the values of {label}"] = parameter
    check_ranks_agree(strategy, digests_of(values))


def check_unowned(context: LoopContext) -> None:
    """Make sure that all ranks have the same values of what no optimizer of the trainer updates. Collective.

    A callback may train it on the batches of its own rank.

    Raises:
        RankMismatchError: names what differs.
    """
    strategy = context.strategy
    unowned = strategy.gradients.unowned(context.wrapped)
    if unowned and strategy.data_parallel_group is None:  # groups may have other values
        values = {f"the values of parameter {name!r}{UNOWNED}": each for name, each in unowned.items()}
        check_ranks_agree(strategy, digests_of(values))


def check_can_compare(strategy: Strategy, interval: int | None) -> None:
    """Refuse to compare models that differ between the ranks' averages on purpose."""
    if interval is not None and strategy.gradients.period is not None:
        raise ConfigurationError(
            message=f"check_ranks_every_n_steps={interval} cannot work with post-local SGD.",
            facts="between averages of the models, each rank has another one.",
            remedy="leave it out.",
        )


def _state_of(optimizer: Optimizer, parameter: Tensor, label: str) -> dict[str, Tensor]:
    state = optimizer.state.get(parameter, {})
    return {f"{key} of {label}": value for key, value in state.items() if isinstance(value, Tensor)}


def fingerprint_of_checkpoint(checkpoint: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the facts that must be the same of the checkpoint that each rank has found and loaded."""
    names = ("global_step", "epoch", "seed", "run_id")
    found = "none" if checkpoint is None else ", ".join(f"{name} {checkpoint.get(name)}" for name in names)
    return {"the checkpoint": found}
