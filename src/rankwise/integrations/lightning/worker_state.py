"""What a worker process sends back to the process that called Lightning's `Trainer`."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.progress import _BaseProgress
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from rankwise.nested import to_device
from rankwise.processes.changed_attributes import AttributesBefore
from rankwise.processes.shared_memory import send_by_name
from rankwise.trainer.state_transfer import _Attributes, _Contents, _put, _value_of, named_parts

_LOOPS = ("fit_loop", "validate_loop", "test_loop", "predict_loop")
_METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
_PLAIN = (bool, int, float, str, type(None), _BaseProgress)


@final
class KnownToCaller:
    """What the calling process has, too, when a stage starts in a worker process.

    Attributes:
        parts: the `named_parts` of the module.
        attributes: the attributes of its submodules, by the submodule's id.
        others: the callbacks and loggers.
        attributes_of_others: their attributes.
        named: all objects that are sent by name.
    """

    def __init__(self, trainer: Any) -> None:
        self.parts = named_parts(trainer.lightning_module)
        self.others = _others(trainer)
        self.named = {
            **self.parts,
            "trainer": trainer,
            "strategy": trainer.strategy,
            **{f"other {number}": each for number, each in enumerate(self.others)},
        }
        parts = trainer.lightning_module.modules()
        self.attributes = {id(part): AttributesBefore(part, self.named) for part in parts}
        self.attributes_of_others = [AttributesBefore(each, self.named) for each in self.others]


@final
class WorkerState:
    """What a stage has changed in a worker process, for the calling process; on the CPU.

    Making it sends by name, from then on, what the caller has.
    """

    def __init__(self, trainer: Any, known: KnownToCaller) -> None:
        send_by_name(known.named)
        present = set(map(id, trainer.lightning_module.modules()))
        self._values = {
            name: _value_of(part) for name, part in known.parts.items() if isinstance(part, nn.Parameter)
        }
        self._contents = {
            name: _Contents(part, known.attributes[id(part)])
            for name, part in known.parts.items()
            if isinstance(part, nn.Module) and id(part) in present
        }
        self._others = list(map(_Attributes, known.others, known.attributes_of_others))
        self._loops = [_plain_attributes(loop) for loop in _loops(trainer)]
        self._metrics = {name: to_device(dict(getattr(trainer, name)), "cpu") for name in _METRICS}
        self._state, self._should_stop = trainer.state, trainer.should_stop
        self._warn_of_lost_attributes()

    def _warn_of_lost_attributes(self) -> None:
        lost = [name for each in self._contents.values() for name in each.attributes.lost]
        if lost:
            warnings.warn(
                f"These attributes of the module were set in a worker process, and cannot be pickled: "
                f"{', '.join(lost)}. They stay as they are in the calling process.",
                stacklevel=2,
            )

    def restore(self, trainer: Any) -> None:
        """Give it to the objects of the calling process; parameters stay the same objects."""
        parts: dict[str, Any] = named_parts(trainer.lightning_module)
        for name, value in self._values.items():
            if value is not None:
                _put(parts[name], *value)
        for name, contents in self._contents.items():
            contents.give_to(parts[name])
        for each, changed in zip(_others(trainer), self._others, strict=True):
            changed.give_to(each)
        for loop, attributes in zip(_loops(trainer), self._loops, strict=True):
            vars(loop).update(attributes)
        for name, metrics in self._metrics.items():
            getattr(trainer, name).clear()
            getattr(trainer, name).update(metrics)
        trainer.state, trainer.should_stop = self._state, self._should_stop


@final
@dataclass
class StageResult:
    """What a stage has returned in a worker process; on the first rank of a node with the state."""

    value: Any
    num_loaders: int  # over which it has predicted; 0 after another stage
    state: WorkerState | None

    @classmethod
    def of(cls, trainer: Any, value: Any, state: WorkerState | None) -> StageResult:
        """Return the result of a stage that has returned `value`."""
        is_prediction = trainer.state.fn == TrainerFn.PREDICTING
        num_loaders = trainer.predict_loop.num_dataloaders if is_prediction and value is not None else 0
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


def _others(trainer: Any) -> list[Any]:
    return [*trainer.callbacks, *trainer.loggers]


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
