"""Average model parameters periodically, for post-local SGD."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from rankwise.errors import ConfigurationError
from rankwise.gradient_sync.parameters import parameters_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer

_DISTRIBUTED = ("ZeroRedundancyOptimizer", "DistributedOptimizer", "_NamedOptimizer", "PostLocalSGDOptimizer")


@final
@dataclass(eq=False)
class ModelAveraging:
    """Runs one `PeriodicModelAverager` of torch for each optimizer."""

    period: int  # number of optimizer steps between two averages
    warmup_steps: int  # before the first average
    group: ProcessGroup | None
    _averagers: list[tuple[Optimizer, Any]] = field(default_factory=list, init=False)
    _steps: list[int] = field(default_factory=list, init=False)  # restored, for optimizers yet to step

    def after_step(self, optimizer: Optimizer) -> None:
        """Average the optimizer's parameters if the period is over.

        Collective: every rank must call this, after each optimizer step.
        """
        self._averager(optimizer).average_parameters(parameters_of(optimizer))

    def finish(self) -> None:
        """Average the parameters now, unless they were averaged in this step.

        Collective: every rank must call this.
        """
        from torch.distributed.algorithms.model_averaging.utils import average_parameters

        for optimizer, averager in self._averagers:
            since = averager.step - 1 - self.warmup_steps  # torch averages, then counts
            if averager.step > self.warmup_steps and since % self.period:
                parameters: Any = iter(parameters_of(optimizer))
                average_parameters(parameters, averager.process_group)

    @property
    def steps(self) -> list[int]:
        """The number of steps of each optimizer."""
        return [averager.step for _, averager in self._averagers] or self._steps

    @steps.setter
    def steps(self, steps: list[int]) -> None:
        self._steps = list(steps)
        for (_, averager), step in zip(self._averagers, steps, strict=False):
            averager.step = step

    def _averager(self, optimizer: Optimizer) -> Any:
        for known, averager in self._averagers:
            if known is optimizer:
                return averager
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

        refuse_distributed_optimizer(optimizer)
        averager = PeriodicModelAverager(self.period, self.warmup_steps, self.group)
        number = len(self._averagers)
        averager.step = self._steps[number] if number < len(self._steps) else 0
        self._averagers.append((optimizer, averager))
        return averager


def refuse_distributed_optimizer(optimizer: Optimizer) -> None:
    """Raise for an optimizer that updates a part of the parameters, or averages models itself."""
    kind = type(optimizer)
    is_distributed = any(
        base.__name__ in _DISTRIBUTED and base.__module__.startswith("torch.distributed.")
        for base in kind.__mro__
    )
    if is_distributed:
        raise ConfigurationError(
            message=f"model_averaging_period cannot work with {kind.__name__}.",
            facts="a distributed optimizer updates other parameters on each rank, or averages models itself.",
            remedy="use a plain optimizer with it, such as torch.optim.SGD, or another comm_hook.",
        )
