"""The state that a worker sends back to the process that called Lightning's `Trainer`."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, final

from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.progress import _BaseProgress
from lightning.pytorch.trainer.states import TrainerFn

from rankwise.nested import to_device
from rankwise.process_group.distributed_optimizers import is_sharded
from rankwise.processes.changed_attributes import AttributesBefore
from rankwise.processes.module_state import (
    ModuleBefore,
    ModuleState,
    NotReturned,
    ObjectState,
    named_parts,
    warn_of_lost_attributes,
)
from rankwise.processes.shared_memory import Isolated, Parts, modules_needed, send_by_name

_LOOPS = ("fit_loop", "validate_loop", "test_loop", "predict_loop")
_METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
_PLAIN = (bool, int, float, str, type(None), _BaseProgress)


@final
class KnownToCaller:
    """The objects of a stage that the calling process has, too.

    Attributes:
        data_module: the stage's, if there is one.
        others: the callbacks, loggers and data module.
        named: all objects that are sent by name.
    """

    def __init__(self, trainer: Any, data_module: Any) -> None:
        self.data_module = data_module
        data_modules = [] if data_module is None else [data_module]
        self.others = [*trainer.callbacks, *trainer.loggers, *data_modules]
        self.named = {
            **named_parts(trainer.lightning_module),
            "trainer": trainer,
            "strategy": trainer.strategy,
            **{f"other {number}": each for number, each in enumerate(self.others)},
        }


@final
class StateBefore:
    """These objects as they are when a stage starts in a worker process."""

    def __init__(self, trainer: Any, known: KnownToCaller) -> None:
        self.known = known
        self.module = ModuleBefore(trainer.lightning_module, known.named)
        self.others = [AttributesBefore(each, known.named) for each in known.others]


@final
class WorkerState:
    """The changes that a stage has made in a worker process, for the calling process; on the CPU.

    Making it sends by name, from then on, what the caller has.
    """

    def __init__(self, trainer: Any, before: StateBefore) -> None:
        known = before.known
        send_by_name(known.named)
        self._module = ModuleState(trainer.lightning_module, before.module)
        others = list(map(ObjectState, known.others, before.others))
        self._parts = Parts(
            {
                "loops": [_plain_attributes(loop) for loop in _loops(trainer)],
                "metrics": {name: to_device(dict(getattr(trainer, name)), "cpu") for name in _METRICS},
                "state": (trainer.state, trainer.should_stop),
                **{
                    _name_of(number, each): state
                    for number, (each, state) in enumerate(zip(known.others, others, strict=True))
                },
                "optimizers": _sendable_optimizers(trainer),
            }
        )
        names = (type(each).__name__ for each in known.others)
        warn_of_lost_attributes(self._module, zip(names, others, strict=True))

    def restore(self, trainer: Any, known: KnownToCaller) -> None:
        """Give it to the objects of the calling process; parameters stay the same objects.

        A part that cannot be returned stays as it is, with a warning that names it.
        """
        give: dict[str, Callable[[Any], object]] = {
            "loops": partial(_restore_loops, trainer),
            "metrics": partial(_restore_metrics, trainer),
            "state": partial(_set, trainer, ("state", "should_stop")),
            "optimizers": partial(_set, trainer.strategy, ("optimizers", "lr_scheduler_configs")),
        }
        for number, each in enumerate(known.others):
            give[_name_of(number, each)] = partial(ObjectState.give_to, owner=each)
        with NotReturned() as lost:
            self._module.restore(trainer.lightning_module, lost)
            for name, part in self._parts.items():
                if part is not None:
                    lost.unless(name, part, give[name])
        if known.data_module is not None:
            trainer.datamodule = known.data_module


def _name_of(number: int, each: object) -> str:
    """Return the name of one of the other objects, for a warning."""
    return f"attributes of {type(each).__name__} ({number})"


def _restore_loops(trainer: Any, loops: list[dict[str, Any]]) -> None:
    for loop, attributes in zip(_loops(trainer), loops, strict=True):
        vars(loop).update(attributes)


def _restore_metrics(trainer: Any, by_name: dict[str, dict[str, Any]]) -> None:
    for name, metrics in by_name.items():
        getattr(trainer, name).clear()
        getattr(trainer, name).update(metrics)


def _set(owner: object, names: tuple[str, ...], values: tuple[Any, ...]) -> None:
    for name, value in zip(names, values, strict=True):
        setattr(owner, name, value)


def _sendable_optimizers(trainer: Any) -> Any:
    """Return the optimizers and schedulers of a fit; None if there are none, or if they cannot be sent."""
    found = (trainer.strategy.optimizers, trainer.strategy.lr_scheduler_configs)
    if trainer.state.fn != TrainerFn.FITTING or any(map(is_sharded, trainer.strategy.optimizers)):
        return None
    if modules_needed(found) is None:
        warnings.warn(
            "The optimizers and schedulers of this fit stay in the worker process: they cannot be pickled. A "
            "checkpoint that the calling process saves has no state of them; ModelCheckpoint saves in the "
            "worker process.",
            stacklevel=2,
        )
        return None
    return Isolated(found)


@contextmanager
def optimizers_taken(trainer: Any) -> Iterator[None]:
    """Keep the optimizers of an earlier fit out of what is sent to worker processes, in the block."""
    strategy = trainer.strategy
    kept = strategy.optimizers, strategy.lr_scheduler_configs
    strategy.optimizers, strategy.lr_scheduler_configs = [], []
    try:
        yield
    finally:
        strategy.optimizers, strategy.lr_scheduler_configs = kept


@final
@dataclass
class StageResult:
    """The result of a stage in a worker process; on the first rank of a node with the state."""

    value: Any
    num_loaders: int  # over which it has predicted; 0 after another stage
    state: WorkerState | None

    @classmethod
    def of(cls, trainer: Any, value: Any, before: StateBefore) -> StageResult:
        """Return the result of a stage that has returned `value`."""
        is_prediction = trainer.state.fn == TrainerFn.PREDICTING
        num_loaders = trainer.predict_loop.num_dataloaders if is_prediction and value is not None else 0
        state = WorkerState(trainer, before) if trainer.local_rank == 0 else None
        return cls(to_device(value, "cpu"), num_loaders, state)


def value_of(results: list[StageResult]) -> Any:
    """Return what a stage returns to the caller: its first rank's value, but the predictions of all ranks.

    Predicted batches are in the order of the ranks; of several loaders, each loader's by itself.
    """
    first = results[0]
    if first.num_loaders == 0:
        return first.value
    by_rank = [result.value for result in results]
    if first.num_loaders > 1:
        return [list(itertools.chain(*of_loader)) for of_loader in zip(*by_rank, strict=True)]
    return list(itertools.chain(*by_rank))


def _loops(trainer: Any) -> Iterator[Any]:
    """Yield the loops of a trainer and the loops in them, in the same order in every process."""
    left = [getattr(trainer, name) for name in reversed(_LOOPS)]
    while left:
        loop = left.pop()
        yield loop
        left += [each for each in vars(loop).values() if isinstance(each, _Loop)]


def _plain_attributes(loop: Any) -> dict[str, Any]:
    """Return a loop's counters and settings; its data belong to one stage."""
    return {name: value for name, value in vars(loop).items() if isinstance(value, _PLAIN)}
