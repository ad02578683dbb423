"""`FabricOptimizer`: the user's optimizer, stepped by the strategy in its precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer

from rankwise.fabric.callbacks import call_callbacks
from rankwise.strategies import Strategy
from rankwise.strategies.agreement import mean_loss

_OWN = (
    "_optimizer",
    "_strategy",
    "_callbacks",
    "step",
    "_opt_called",
)  # the last two: learning rate schedulers


class FabricOptimizer:
    """An optimizer that `Fabric.setup` has set up; it is an instance of the optimizer's class, too.

    `step` unscales gradients, skips the step on all ranks where they are not finite, and updates master
    weights, as the precision says. All other attributes are the optimizer's.
    """

    _optimizer: Optimizer
    _strategy: Strategy
    _callbacks: Sequence[Any]

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer itself."""
        return self._optimizer

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Step the optimizer once; return what its `step` returns.

        Args:
            closure: computes the loss, by `Fabric.backward` too, and returns it. All optimizers decide by
                the mean of the ranks' losses, so with a closure this is Collective.
            options: for the optimizer's own `step`.
        """
        strategy, optimizer = self._strategy, self._optimizer
        agreed = None if closure is None else lambda: mean_loss(strategy, closure(), 1.0)
        returned = strategy.optimizer_step(optimizer, agreed, **options)
        call_callbacks(self._callbacks, "on_after_optimizer_step", strategy=strategy, optimizer=optimizer)
        return returned

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Remove the gradients of the optimizer's parameters, or fill them with zeros."""
        self._strategy.precision.zero_grad(self._optimizer, set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state. Collective if the optimizer is sharded; ranks other than 0 get {} then."""
        return self._strategy.get_optimizer_state(self._optimizer)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self._optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters to the optimizer."""
        self._optimizer.add_param_group(param_group)

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._optimizer, name, value)

    def __reduce__(self) -> tuple[Callable[[Optimizer], Optimizer], tuple[Optimizer]]:
        return _same, (self._optimizer,)

    def __repr__(self) -> str:
        return repr(self._optimizer)


def fabric_optimizer(optimizer: Optimizer, strategy: Strategy, callbacks: Sequence[Any]) -> Any:
    """Return a `FabricOptimizer` that is an instance of the optimizer's class, as schedulers demand."""
    kind = type(f"Fabric{type(optimizer).__name__}", (FabricOptimizer, type(optimizer)), {})
    wrapped: Any = object.__new__(kind)
    wrapped._optimizer, wrapped._strategy, wrapped._callbacks = optimizer, strategy, callbacks
    return wrapped


def plain_optimizer(optimizer: Any) -> Any:
    """Return the optimizer that a `FabricOptimizer` steps; any other one as it is."""
    return optimizer.optimizer if isinstance(optimizer, FabricOptimizer) else optimizer


def _same(optimizer: Optimizer) -> Optimizer:
    return optimizer
