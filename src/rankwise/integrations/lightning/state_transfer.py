"""The state that a worker sends back to the process that called Lightning's `Trainer`."""

from __future__ import annotations

import itertools
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
from rankwise.processes.returned_state import KnownToCaller, ReturnedState, StateBefore

_LOOPS = ("fit_loop", "validate_loop", "test_loop", "predict_loop")
_METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
_PLAIN = (bool, int, float, str, type(None), _BaseProgress)


def known_to_lightning(trainer: Any, data_module: Any) -> KnownToCaller:
    """Return the objects of a stage that the calling process also has."""
    others = [*trainer.callbacks, *trainer.loggers, *([] if data_module is None else [data_module])]
    return KnownToCaller(
        trainer.lightning_module,
        {f"{type(each).__name__} ({number})": each for number, each in enumerate(others)},
        {"trainer": trainer, "strategy": trainer.strategy},
    )


def _capture(trainer: Any, before: StateBefore) -> ReturnedState:
    strategy = trainer.strategy
    is_fit = trainer.state.fn == TrainerFn.FITTING and not any(map(is_sharded, strategy.optimizers))
    parts: dict[str, Callable[[], Any]] = {
        "loops": lambda: [_plain_attributes(loop) for loop in _loops(trainer)],
        "metrics": lambda: {name: dict(getattr(trainer, name)) for name in _METRICS},
        "state": lambda: (trainer.state, trainer.should_stop),
    }
    if is_fit:
        parts["optimizers"] = lambda: (strategy.optimizers, strategy.lr_scheduler_configs)
    return ReturnedState(before, parts)


def restore_trainer(trainer: Any, data_module: Any, state: ReturnedState) -> None:
    """Give the objects of the calling process the worker's state; parameters stay the same objects.

    A part that cannot be returned stays as it is, with a warning that names it.
    """
    give: dict[str, Callable[[Any], object]] = {
        "loops": partial(_restore_loops, trainer),
        "metrics": partial(_restore_metrics, trainer),
        "state": partial(_set, trainer, ("state", "should_stop")),
        "optimizers": partial(_set, trainer.strategy, ("optimizers", "lr_scheduler_configs")),
    }
    state.restore(known_to_lightning(trainer, data_module), give)
    if data_module is not None:
        trainer.datamodule = data_module


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
    state: ReturnedState | None

    @classmethod
    def of(cls, trainer: Any, value: Any, before: StateBefore | None) -> StageResult:
        """Return the result of a stage that has returned `value`."""
        is_prediction = trainer.state.fn == TrainerFn.PREDICTING
        num_loaders = trainer.predict_loop.num_dataloaders if is_prediction and value is not None else 0
        state = None if before is None else _capture(trainer, before)
        return cls(to_device(value, "cpu"), num_loaders, state)


def stage_value(results: list[StageResult]) -> Any:
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
