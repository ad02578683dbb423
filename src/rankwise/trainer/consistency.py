"""Check that all ranks have the same values, by digests, and the same checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from rankwise.errors import OF_GROUP, UNOWNED, ConfigurationError
from rankwise.gradient_sync.parameters import parameters_of
from rankwise.strategies import Strategy
from rankwise.strategies.agreement import check_ranks_agree, values_of
from rankwise.trainer.state import LoopContext


def compare_ranks(
    context: LoopContext, when: str, *, are_models_averaged: bool = True, with_buffers: bool = False
) -> None:
    """Compare the ranks as `check_ranks_every_n_steps` says, at a point that `when` names. Collective.

    `are_models_averaged` is False where a strategy that averages models need not have done so.
    """
    interval, strategy = context.options.check_ranks_every_n_steps, context.strategy
    may_differ = not (strategy.has_equal_models or are_models_averaged)
    if interval == 0 or (interval is None and (may_differ or strategy.gradients.averages_nothing)):
        return
    check_values(context, when, with_buffers=with_buffers, with_states=interval is not None)
    context.stage.compared_at = context.state.progress.total_batches


def compare_before_epoch(context: LoopContext) -> None:
    """Compare the ranks, unless a checkpoint at the end of the last epoch has done so. Collective."""
    progress = context.state.progress
    if context.stage.compared_at != progress.total_batches:
        compare_ranks(context, f"before epoch {progress.current_epoch}", are_models_averaged=False)


def check_values(
    context: LoopContext, when: str = "", *, with_buffers: bool = False, with_states: bool = False
) -> None:
    """Make sure that all ranks have the same parameters and hyperparameters of optimizers. Collective.

    Buffers are the same only where they have just been shared. Left out are what DDP is configured to ignore,
    new parameters that the ranks have not shared yet, and the states of sharded optimizers.
    """
    strategy, module = context.strategy, context.module
    if strategy.world_size == 1:
        return
    values = values_of(module, with_buffers=with_buffers)
    inside = {id(parameter) for parameter in module.parameters()}
    known = strategy.gradients.known_parameters(context.wrapped)
    if known is None:
        known = inside.intersection(map(id, values.values()))
    values = {name: each for name, each in values.items() if id(each) in known or id(each) not in inside}
    for number, optimizer in enumerate(context.optimizers):
        originals = strategy.precision.model_parameters(optimizer)
        for place, (own, original) in enumerate(zip(parameters_of(optimizer), originals, strict=False)):
            label = f"parameter {place} of optimizer {number}"
            if id(original) in known - inside:
                values[f"the values of {label}"] = original
            if with_states and id(original) in known and not strategy.is_sharded(optimizer):
                state = optimizer.state.get(own, {}).items()
                values |= {f"{key} of {label}": value for key, value in state if isinstance(value, Tensor)}
    check_ranks_agree(strategy, _hyperparameters(context.optimizers), values, when, _averaging_of(context))


def _averaging_of(context: LoopContext) -> str:
    """Return how a strategy of the user's, without DDP, makes the parameters of the ranks equal."""
    strategy, name = context.strategy, type(context.strategy).__name__
    is_ours = type(strategy).__module__.startswith("rankwise.")
    if is_ours or isinstance(context.wrapped, DistributedDataParallel):
        return ""
    if not strategy.has_equal_models:
        return f"{name}.sync_models() must give all ranks the same parameters."
    return (
        f"{name}.sync_gradients() must leave the same gradients on all ranks; what follows it, such as "
        "clipping, must not change them by this rank's own batch, loss or random numbers. If ranks differ on "
        f"purpose between averages of the model: {name}.has_equal_models = False, and average in "
        "sync_models()."
    )


def _hyperparameters(optimizers: Iterable[Optimizer]) -> dict[str, str]:
    """Return the options of the optimizers' parameter groups, such as learning rates."""
    options = {
        f"{name}{OF_GROUP}{place} of optimizer {number}": _described(value)
        for number, optimizer in enumerate(optimizers)
        for place, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if name != "params"
    }
    return {name: text for name, text in options.items() if text is not None}


def _described(value: object) -> str | None:
    """Return an option as text; None for an object, whose text may differ between processes."""
    if isinstance(value, Tensor):
        return repr(value.item()) if value.numel() == 1 else None
    if isinstance(value, (tuple, list)):
        parts = list(map(_described, value))
        return None if None in parts else repr(parts)
    return repr(value) if value is None or isinstance(value, (bool, int, float, str)) else None


def check_unowned(context: LoopContext) -> None:
    """Check that ranks agree on parameters that no optimizer of the trainer updates. Collective.

    A callback may train them, on its own rank's batches.
    """
    strategy = context.strategy
    unowned = strategy.gradients.unowned(context.wrapped)
    if unowned and strategy.data_parallel_group is None:  # groups may have other values
        values = {f"the values of parameter {name!r}{UNOWNED}": each for name, each in unowned.items()}
        check_ranks_agree(strategy, {}, values)


def check_can_compare(strategy: Strategy, interval: int | None) -> None:
    """Refuse to compare models that differ between the ranks' averages on purpose."""
    if interval and not strategy.has_equal_models:
        raise ConfigurationError(
            message=f"check_ranks_every_n_steps={interval} cannot work with a strategy that averages models.",
            facts="between averages of the models, each rank has another one.",
            remedy="leave it out.",
        )


def fingerprint_of_checkpoint(checkpoint: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the facts of this rank's checkpoint that must be the same on all ranks."""
    names = ("global_step", "epoch", "seed", "run_id")
    found = "none" if checkpoint is None else ", ".join(f"{name} {checkpoint.get(name)}" for name in names)
    return {"the checkpoint": found}
