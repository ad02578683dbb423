"""Average model parameters periodically, for post-local SGD."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from rankwise.errors import ConfigurationError
from rankwise.gradient_sync.parameters import parameters_of
from rankwise.process_group.distributed_optimizers import is_distributed_optimizer

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer

_DISTRIBUTED = ("ZeroRedundancyOptimizer", "DistributedOptimizer", "_NamedOptimizer", "PostLocalSGDOptimizer")


@final
@dataclass(eq=False)
class ModelAveraging:
    """Averages the parameters of each optimizer after every `period`-th step, after `warmup_steps`."""

    period: int
    warmup_steps: int
    group: ProcessGroup | None
    _steps: dict[Optimizer, int] = field(default_factory=dict, init=False)
    _changed: dict[Optimizer, set[Tensor]] = field(default_factory=dict, init=False)  # since the last average
    _restored: list[int] = field(default_factory=list, init=False)  # for optimizers yet to step

    def after_step(self, optimizer: Optimizer) -> None:
        """Average the optimizer's parameters if the period is over; every rank calls it after each step."""
        number = len(self._steps)
        if optimizer not in self._steps:
            refuse_distributed_optimizer(optimizer)
            self._steps[optimizer] = self._restored[number] if number < len(self._restored) else 0
        since = self._steps[optimizer] - self.warmup_steps
        self._steps[optimizer] += 1
        if since >= 0:
            used = [parameter for parameter in parameters_of(optimizer) if parameter.grad is not None]
            self._changed.setdefault(optimizer, set()).update(used)
            if since % self.period == 0:
                self._average(optimizer)

    def average_now(self) -> None:
        """Average the parameters now, on every rank, unless they were averaged after the last step."""
        for optimizer in self._changed:
            self._average(optimizer)

    def _average(self, optimizer: Optimizer) -> None:
        """Average the changed parameters; averaging the others would change them by rounding."""
        from torch.distributed.algorithms.model_averaging.utils import average_parameters

        changed = self._changed[optimizer]
        if changed:
            parameters: Any = [parameter for parameter in parameters_of(optimizer) if parameter in changed]
            average_parameters(iter(parameters), self.group)  # type: ignore[arg-type]  # None is the default group
            changed.clear()

    @property
    def steps(self) -> list[int]:
        """The number of steps of each optimizer."""
        return list(self._steps.values()) or self._restored

    @steps.setter
    def steps(self, steps: list[int]) -> None:
        self._restored = list(steps)
        self._steps.update(zip(self._steps, steps, strict=False))


def refuse_distributed_optimizer(optimizer: Optimizer) -> None:
    """Raise for an optimizer that updates a part of the parameters, or averages models itself."""
    if is_distributed_optimizer(optimizer, *_DISTRIBUTED):
        raise ConfigurationError(
            message=f"model_averaging_period cannot work with {type(optimizer).__name__}.",
            facts="a distributed optimizer updates other parameters on each rank, or averages models itself.",
            remedy="use a plain optimizer with it, such as torch.optim.SGD, or another comm_hook.",
        )
