"""Training state: sent back to the calling process, and each rank's part of a checkpoint."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from rankwise.errors import ConfigurationError
from rankwise.nested import map_tensors
from rankwise.seed import get_random_state, mixed_seed, seed_process, set_random_state
from rankwise.trainer.metrics import Results

if TYPE_CHECKING:
    from rankwise.callbacks import Callback
    from rankwise.loggers import Logger
    from rankwise.strategies import Strategy
    from rankwise.trainer.state import LoopContext, TrainerState

_METRICS = {  # keys in checkpoints, and attributes of `TrainerState`
    "callback_metrics": "callback_metrics",
    "logged_metrics": "logged_metrics",
    "_progress_bar_metrics": "progress_bar_metrics",
}


@final
@dataclass
class CallerState:
    """What the calling process gets after a stage that ran in other processes; picklable, on the CPU."""

    tensors: dict[str, Tensor]  # every parameter and buffer of the module, by dotted name
    new_modules: dict[str, nn.Module]  # submodules that the stage has added, by dotted name
    optimizers: list[dict[str, Any]]
    schedulers: list[dict[str, Any]]
    callbacks: list[dict[str, Any]]
    loggers: list[dict[str, Any]]
    precision: dict[str, Any]
    trainer: TrainerState
    hparams: dict[str, Any]
    comm_hooks: list[list[dict[str, Any]]]  # of each rank
    has_optimizers: bool  # whether they can exist without a process group; sharded ones cannot


def capture(
    context: LoopContext, known_modules: set[str], callbacks: list[Callback], loggers: list[Logger]
) -> CallerState | None:
    """Return the state on each node's first rank, for the calling process there; None on the others.

    Moves the module to the CPU. The other arguments are what the calling process has: the dotted names of
    submodules, callbacks and loggers. Collective: every rank must call this, as sharded optimizers gather
    their state.
    """
    strategy, module = context.strategy, context.module
    module.cpu()
    states = context.optimizer_set.states(strategy) if context.stage.name == "fit" else None
    optimizers, schedulers = states or ([], [])
    comm_hooks = strategy.comm_hook_states()
    if strategy.num_nodes > 1:  # only global rank 0 has the whole state of a sharded optimizer
        optimizers = strategy.broadcast(optimizers)
    if strategy.local_rank != 0:
        return None
    return CallerState(
        tensors={
            **dict(module.named_parameters(remove_duplicate=False)),
            **dict(module.named_buffers(remove_duplicate=False)),
        },
        new_modules={
            name: submodule  # with its own submodules
            for name, submodule in module.named_modules(remove_duplicate=False)
            if name not in known_modules and name.rpartition(".")[0] in known_modules
        },
        optimizers=_on_cpu(optimizers),
        schedulers=_on_cpu(schedulers),
        callbacks=_on_cpu([callback.state_dict() for callback in callbacks]),
        loggers=[logger.state_dict() for logger in loggers],
        precision=_on_cpu(strategy.precision.state_dict()),
        trainer=_on_cpu(context.state),
        hparams=module.hparams,
        comm_hooks=_on_cpu(comm_hooks),
        has_optimizers=bool(optimizers and context.optimizers),  # an evaluation brings no states back
    )


def _on_cpu(state: Any) -> Any:
    return map_tensors(state, lambda tensor: tensor.detach().cpu())


def restore(context: LoopContext, state: CallerState) -> None:
    """Give the calling process's objects the worker's state; parameters keep their identity."""
    module = context.module
    for name, submodule in state.new_modules.items():
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, submodule)
    for name, tensor in state.tensors.items():
        owner, _, leaf = name.rpartition(".")
        _put(module.get_submodule(owner), leaf, tensor)
    module.hparams = state.hparams
    for field in dataclasses.fields(state.trainer):
        setattr(context.state, field.name, getattr(state.trainer, field.name))
    for callback, saved in zip(context.callbacks, state.callbacks, strict=True):
        callback.load_state_dict(saved)
    for logger, saved in zip(context.loggers, state.loggers, strict=True):
        logger.load_state_dict(saved)
    context.strategy.load_comm_hook_states(state.comm_hooks)
    if state.has_optimizers:
        context.optimizer_set.create(module, context.strategy)
        try:
            context.optimizer_set.load(state.optimizers, state.schedulers)
        except ConfigurationError:  # a parameter exists in the other process only, as the next fit will say
            context.optimizer_set.keep_states(state.optimizers, state.schedulers)
    elif state.optimizers:
        context.optimizer_set.keep_states(state.optimizers, state.schedulers)
    context.strategy.precision.load_state_dict(state.precision)


def _put(owner: nn.Module, name: str, value: Tensor) -> None:
    """Set a parameter or buffer, in place if its shape and dtype allow it."""
    is_parameter = isinstance(value, nn.Parameter)
    current = (owner._parameters if is_parameter else owner._buffers).get(name)
    if isinstance(current, (UninitializedParameter, UninitializedBuffer)):
        current.materialize(value.shape, dtype=value.dtype)
    if is_parameter and current is not None and current.dtype != value.dtype:
        current.data = value.data  # the stage converted it
        current.requires_grad_(value.requires_grad)
    elif current is None or current.shape != value.shape or current.dtype != value.dtype:
        if is_parameter or name in owner._buffers:
            setattr(owner, name, value)
        else:
            owner.register_buffer(name, value)
    else:
        with torch.no_grad():
            current.copy_(value)
        current.requires_grad_(value.requires_grad)


def gather_rank_states(context: LoopContext) -> list[dict[str, Any]]:
    """Return what each rank needs to continue from here; outside of a fit, from the end of the last one.

    Collective: within a fit, every rank must call this.
    """
    if context.stage.name != "fit" and context.state.rank_states:
        return context.state.rank_states
    results = context.stage.epoch_results
    own = {
        "random": get_random_state(context.strategy.root_device),
        "results": None if results is None else results.state_dict(),
        "metrics": {key: dict(getattr(context.state, name)) for key, name in _METRICS.items()},
    }
    return context.strategy.all_gather_object(own, context.strategy.job_group)


def seed_rank(seed: int, global_step: int, global_rank: int) -> None:
    """Seed this process's random generators with a number that depends on the run, the step and the rank."""
    seed_process(mixed_seed(seed, global_step, global_rank))


@final
class RankState:
    """This rank's part of a checkpoint; `states` is what `gather_rank_states` returned for it.

    Another number of ranks shares the parts: metrics are merged, and each rank gets a new random stream.
    """

    def __init__(self, strategy: Strategy, state: TrainerState, states: list[dict[str, Any]]) -> None:
        self._strategy = strategy
        self._state = state
        self._is_same_world = len(states) == strategy.world_size
        self._states = states[strategy.global_rank :: strategy.world_size]
        self._any_state = states[0]

    def restore_metrics(self) -> None:
        """Restore the last values of everything logged."""
        own = self._states[0] if self._states else self._any_state
        for key, name in _METRICS.items():
            setattr(self._state, name, dict(own["metrics"][key]))

    def results(self) -> Results:
        """Return what was logged in the epoch so far."""
        results = Results(is_evaluation=False)
        for state in self._states:
            if state["results"] is not None:
                results.add_state_dict(state["results"])
        return results

    def restore_random(self) -> None:
        """Restore the random state; if the number of ranks has changed, seed it."""
        if self._is_same_world:
            set_random_state(self._states[0]["random"], self._strategy.root_device)
        else:
            seed_rank(self._state.seed, self._state.progress.global_step, self._strategy.global_rank)
