"""`LossScaler`: dynamic loss scaling for float16, with the same decision to skip a step on all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from rankwise.errors import ConfigurationError, InvalidArgumentError, UnknownArgumentError, UnknownNameError
from rankwise.precision.base import Precision

if TYPE_CHECKING:
    from torch.optim import Optimizer

_BOUNDS = {
    "init_scale": (0.0, math.inf),
    "growth_factor": (1.0, math.inf),
    "backoff_factor": (0.0, 1.0),
    "growth_interval": (0.0, math.inf),
}


def are_finite(gradients: Sequence[Tensor]) -> bool:
    """Return whether no element is infinite or NaN; synchronises with the device once."""
    # The largest magnitude: unlike a sum of squares it cannot overflow.
    return bool(get_total_norm(gradients, float("inf")).isfinite()) if gradients else True


@final
class LossScaler:
    """torch's `GradScaler` for any number of optimizers, with the same skipped steps on all ranks.

    The scale is updated when the next loss is scaled. So all optimizers of a training step use one scale;
    gradients whose optimizer has not stepped by then are converted to the new scale. The options are torch's.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = _checked(options)
        self._scaler: torch.amp.GradScaler | None = None
        self._state: dict[str, Any] = {}
        self._optimizers: list[Optimizer] = []
        self._unscaled: set[int] = set()
        self._stepped: set[int] = set()

    def configure(self, optimizers: list[Optimizer]) -> None:
        """Set the optimizers that share the scale."""
        self._optimizers = list(optimizers)

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss times the current scale."""
        self._update()
        return self._on(loss.device.type).scale(loss)

    def unscale(self, optimizer: Optimizer, precision: Precision) -> None:
        """Divide the optimizer's gradients by the scale, once per step."""
        if id(optimizer) in self._stepped:
            self._update()
        gradients = _gradients(optimizer)
        if id(optimizer) in self._unscaled or not gradients:
            return
        if precision.agree is not None:  # all ranks skip the step if the gradients of one are not finite
            is_finite = are_finite(gradients)
            if precision.agree(not is_finite) and is_finite:
                gradients[0].fill_(float("nan"))
        self._on(gradients[0].device.type).unscale_(optimizer)
        self._unscaled.add(id(optimizer))

    def step(self, optimizer: Optimizer, precision: Precision, closure: object) -> Any:
        """Step the optimizer, unless a gradient is not finite; raise for a closure."""
        if closure is not None:
            raise ConfigurationError(
                message=f"precision={precision.name!r} cannot step with a closure, whose loss is not scaled.",
                facts=f"the optimizer is {type(optimizer).__name__}.",
                remedy='use precision="bf16-mixed" or "32-true", which scale nothing.',
            )
        self.unscale(optimizer, precision)
        if id(optimizer) not in self._unscaled:  # it has no gradients
            return optimizer.step()
        done: list[bool] = []
        handle = optimizer.register_step_post_hook(lambda *_: done.append(True))
        try:
            result = self._on("cpu").step(optimizer)
        finally:
            handle.remove()
        precision.has_skipped_step = not done
        self._stepped.add(id(optimizer))
        return result

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and the number of steps since it changed; empty before the first loss."""
        self._update()
        return dict(self._state) if self._scaler is None else self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._state = dict(state)
        self._scaler = None
        self._unscaled, self._stepped = set(), set()

    def _on(self, device_type: str) -> torch.amp.GradScaler:
        """Return torch's scaler, created on the device of the first loss."""
        if self._scaler is None:
            self._scaler = torch.amp.GradScaler(device_type, **self._options)
            if self._state:
                self._scaler.load_state_dict(self._state)
        return self._scaler

    def _update(self) -> None:
        """Update the scale, if an optimizer has stepped since the last update."""
        if self._scaler is None or not self._stepped:
            return
        waiting = [
            optimizer
            for optimizer in self._optimizers
            if id(optimizer) not in self._stepped and _gradients(optimizer)
        ]
        before = self._scaler.get_scale() if waiting else 1.0
        self._scaler.update()
        for optimizer in waiting:
            factor = self._scaler.get_scale() / (1.0 if id(optimizer) in self._unscaled else before)
            for gradient in _gradients(optimizer) if factor != 1.0 else []:
                gradient.mul_(factor)
        self._unscaled.clear()
        self._stepped.clear()

    def __getstate__(self) -> dict[str, Any]:
        """Keep the numbers only, without tensors and optimizers."""
        return {
            **self.__dict__,
            "_state": self.state_dict(),
            "_scaler": None,
            "_optimizers": [],
            "_unscaled": set(),
            "_stepped": set(),
        }


class ScaledPrecision(Precision):
    """A 16-bit precision that scales the loss if its dtype is float16."""

    dtypes: ClassVar[Mapping[str, torch.dtype]] = {}  # by name
    scaler_defaults: ClassVar[Mapping[str, float]] = {}

    def __init__(self, name: str, **scaler: Any) -> None:
        if name not in self.dtypes:
            raise UnknownNameError(kind="precision", name=name, known=tuple(self.dtypes))
        self.name = name
        self.dtype = self.dtypes[name]
        self._scaler: LossScaler | None = None
        if self.dtype is torch.float16:
            self._scaler = LossScaler({**self.scaler_defaults, **scaler})
        elif scaler:
            target = f"precision {name!r}, which scales nothing,"
            raise UnknownArgumentError(target=target, name=next(iter(scaler)), known=())

    @property
    def scales_loss(self) -> bool:
        """Whether the dtype is float16."""
        return self._scaler is not None

    def configure(self, module: nn.Module, optimizers: list[Optimizer]) -> None:
        if self._scaler is not None:
            self._scaler.configure(optimizers)

    def backward(self, loss: Tensor, **options: Any) -> None:
        (loss if self._scaler is None else self._scaler.scale(loss)).backward(**options)

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        if self._scaler is not None:
            self._scaler.unscale(optimizer, self)

    def state_dict(self) -> dict[str, Any]:
        return {} if self._scaler is None else {"scaler": self._scaler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._scaler is not None:
            self._scaler.load_state_dict(state_dict.get("scaler", {}))


def _gradients(optimizer: Optimizer) -> list[Tensor]:
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    for name, value in options.items():
        if name not in _BOUNDS:
            raise UnknownArgumentError(target="a loss scale", name=name, known=tuple(_BOUNDS))
        low, high = _BOUNDS[name]
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        is_kind = is_number and (name != "growth_interval" or isinstance(value, int))
        if not is_kind or not low < value < high:
            expected = f"a {'whole ' if name == 'growth_interval' else ''}number between {low:g} and {high:g}"
            raise InvalidArgumentError(argument=name, value=value, expected=expected)
    return options
