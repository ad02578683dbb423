"""Training state: back to the caller, and each rank's own in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from rankwise.data.random_state import get_random_state, mixed_seed, seed_process, set_random_state
from rankwise.trainer.metrics import Results

if TYPE_CHECKING:
    from rankwise.trainer.module import TrainingModule
    from rankwise.trainer.trainer import Trainer

__all__ = ["CallerState", "RankState", "capture", "gather_rank_states", "restore", "seed_rank"]


@final
@dataclass
class CallerState:
    """What the calling process must know after a stage that ran elsewhere; picklable, on the CPU.

    Attributes:
        tensors: every parameter and buffer of the module, by dotted name.
        new_modules: submodules that the stage has added, by dotted name.
        optimizers: the optimizers' states.
        schedulers: the learning rate schedulers' states.
        callbacks: the callbacks' states, in their order.
        loggers: the loggers' states, in their order.
        precision: the precision's state.
        trainer: the trainer's own facts, by attribute.
        hparams: the module's hyper parameters.
        comm_hooks: what the ranks' communication hooks remember.
        is_sharded: whether the optimizers exist only where a process group does.
    """

    tensors: dict[str, Tensor]
    new_modules: dict[str, nn.Module]
    optimizers: list[dict[str, Any]]
    schedulers: list[dict[str, Any]]
    callbacks: list[dict[str, Any]]
    loggers: list[dict[str, Any]]
    precision: dict[str, Any]
    trainer: dict[str, Any]
    hparams: dict[str, Any]
    comm_hooks: list[list[dict[str, Any]]]
    is_sharded: bool


def capture(trainer: Trainer, module: TrainingModule, known_modules: set[str]) -> CallerState | None:
    """Return the state on each node's first rank, whose calling process it is for; None on the others.

    Collective: every rank must call this, as sharded optimizers gather their state.

    Args:
        trainer: the worker's.
        module: the worker's; it is moved to the CPU.
        known_modules: the dotted names of the submodules that the calling process has.
    """
    module.cpu()
    optimizers = [trainer.strategy.get_optimizer_state(optimizer) for optimizer in trainer.optimizers]
    comm_hooks = trainer.strategy.comm_hook_states()
    if trainer.strategy.num_nodes > 1:  # a sharded optimizer's state is whole on global rank 0 alone
        optimizers = trainer.strategy.broadcast(optimizers)
    if trainer.strategy.local_rank != 0:
        return None
    state = CallerState(
        tensors=dict(_tensors(module)),
        new_modules=_new_modules(module, known_modules),
        optimizers=optimizers,
        schedulers=[config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        callbacks=[callback.state_dict() for callback in trainer.callbacks],
        loggers=[logger.state_dict() for logger in trainer.loggers],
        precision=trainer.strategy.precision.state_dict(),
        trainer={name: getattr(trainer, name) for name in trainer.FACTS},
        hparams=module.hparams,
        comm_hooks=comm_hooks,
        is_sharded=any(trainer.strategy.is_sharded(optimizer) for optimizer in trainer.optimizers),
    )
    for name in ("optimizers", "schedulers", "callbacks", "precision", "trainer", "comm_hooks"):
        on_cpu = apply_to_collection(getattr(state, name), Tensor, lambda tensor: tensor.detach().cpu())
        setattr(state, name, on_cpu)
    return state


def restore(trainer: Trainer, module: TrainingModule, state: CallerState) -> None:
    """Make the calling process's objects what the worker's were; parameters keep their identity."""
    for name, submodule in state.new_modules.items():
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, submodule)
    for name, tensor in state.tensors.items():
        owner, _, leaf = name.rpartition(".")
        _put(module.get_submodule(owner), leaf, tensor)
    module.hparams = state.hparams
    for name, value in state.trainer.items():
        setattr(trainer, name, value)
    for callback, own in zip(trainer.callbacks, state.callbacks, strict=True):
        callback.load_state_dict(own)
    for logger, own in zip(trainer.loggers, state.loggers, strict=True):
        logger.load_state_dict(own)
    trainer.strategy.load_comm_hook_states(state.comm_hooks)
    if state.is_sharded:
        trainer.keep_optimizer_states(state.optimizers, state.schedulers)
    elif state.optimizers:
        trainer.create_optimizers()
        trainer.load_optimizer_states(state.optimizers, state.schedulers)
    trainer.strategy.precision.load_state_dict(state.precision)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(
        module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    )


def _new_modules(module: nn.Module, known: set[str]) -> dict[str, nn.Module]:
    """Return the topmost submodules that are not `known`; they bring what is below them."""
    named = dict(module.named_modules(remove_duplicate=False))
    return {
        name: submodule
        for name, submodule in named.items()
        if name not in known and name.rpartition(".")[0] in known
    }


def _put(owner: nn.Module, name: str, value: Tensor) -> None:
    """Give a parameter or buffer its value, in place where it has room for it."""
    is_parameter = isinstance(value, nn.Parameter)
    current = (owner._parameters if is_parameter else owner._buffers).get(name)
    if isinstance(current, (UninitializedParameter, UninitializedBuffer)):
        current.materialize(value.shape, dtype=value.dtype)
    if is_parameter and current is not None and current.dtype != value.dtype:
        current.data = value.data  # converted there, as it would have been here
    elif current is None or current.shape != value.shape or current.dtype != value.dtype:
        if is_parameter or name in owner._buffers:
            setattr(owner, name, value)
        else:
            owner.register_buffer(name, value)
    else:
        with torch.no_grad():
            current.copy_(value)
        current.requires_grad_(value.requires_grad)


_METRICS = ("callback_metrics", "logged_metrics", "_progress_bar_metrics")


def gather_rank_states(trainer: Trainer) -> list[dict[str, Any]]:
    """Return what every rank needs to go on from here, in the order of the ranks.

    Collective: every rank must call this.
    """
    results = trainer.epoch_results
    own = {
        "random": get_random_state(trainer.strategy.root_device),
        "results": None if results is None else results.state_dict(),
        "metrics": {name: dict(getattr(trainer, name)) for name in _METRICS},
    }
    return trainer.strategy.all_gather_object(own, dist.group.WORLD)


def seed_rank(seed: int, global_step: int, global_rank: int) -> None:
    """Give this rank a stream of random numbers of its own, which the run's seed decides."""
    seed_process(mixed_seed(seed, global_step, global_rank))


@final
class RankState:
    """This rank's part of a checkpoint.

    With another number of ranks than the checkpoint's, the parts are dealt out: metrics are put together, and
    each rank draws from a new stream of random numbers.

    Args:
        trainer: this rank's.
        states: what `gather_rank_states` returned when the checkpoint was written.
    """

    def __init__(self, trainer: Trainer, states: list[dict[str, Any]]) -> None:
        self._trainer = trainer
        self._is_same_world = len(states) == trainer.world_size
        self._states = states[trainer.global_rank :: trainer.world_size]
        self._any_state = states[0]

    def restore_metrics(self) -> None:
        """Take over the last values of everything logged."""
        own = self._states[0] if self._states else self._any_state
        for name in _METRICS:
            setattr(self._trainer, name, dict(own["metrics"][name]))

    def results(self) -> Results:
        """Return what was logged in the epoch so far."""
        results = Results(is_evaluation=False)
        for state in self._states:
            if state["results"] is not None:
                results.add_state_dict(state["results"])
        return results

    def restore_random(self) -> None:
        """Draw the numbers that the run of the checkpoint would have drawn."""
        trainer = self._trainer
        if self._is_same_world:
            set_random_state(self._states[0]["random"], trainer.strategy.root_device)
        else:
            seed_rank(trainer.seed, trainer.global_step, trainer.global_rank)
