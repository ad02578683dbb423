"""`ScaledPrecision`: dynamic loss scaling for float16, with the same decision to skip a step on all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from rankwise.checks import check_keywords, check_value
from rankwise.errors import ConfigurationError
from rankwise.precision.base import DtypePrecision, gradient_values
from rankwise.torch_internals import LOSS_SCALING, check_torch

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


class ScaledPrecision(DtypePrecision):
    """A 16-bit precision that scales the loss with torch's `GradScaler` if its dtype is float16.

    The scale is updated when the next loss is scaled. So all optimizers of a training step use one scale;
    gradients whose optimizer has not stepped by then are converted to the new scale.
    """

    scaler_defaults: ClassVar[Mapping[str, float]] = {}

    def __init__(self, name: str, **scaler: Any) -> None:
        super().__init__(name)
        if self.scales_loss:
            check_torch(LOSS_SCALING)
        else:
            check_keywords(f"precision {name!r}, which scales nothing,", scaler, ())
        self._options = _checked({**self.scaler_defaults, **scaler})
        self._scaler: torch.amp.GradScaler | None = None
        self._state: dict[str, Any] = {}
        self._optimizers: list[Optimizer] = []
        self._unscaled: dict[int, Optimizer] = {}  # by id; some of them have stepped
        self._stepped: set[int] = set()

    @property
    def scales_loss(self) -> bool:
        """Whether the dtype is float16."""
        return self.dtype is torch.float16

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """Torch's scaler of this rank; None before the first loss, and for bfloat16."""
        return self._scaler

    def configure(self, module: nn.Module, optimizers: list[Optimizer]) -> None:
        """Set the optimizers that share the scale."""
        self._optimizers = list(optimizers)

    def backward(self, loss: Tensor, *, run: Callable[..., None] = Tensor.backward, **options: Any) -> None:
        if self.scales_loss:
            self.scale_gradients()
            loss = self._scaler_on(loss.device.type).scale(loss)
        run(loss, **options)

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, once per step."""
        if not self.scales_loss:
            return
        if id(optimizer) in self._stepped:
            self.scale_gradients()
        if id(optimizer) in self._unscaled or not (gradients := self._gradients(optimizer)):
            return
        if self.agree is not None:  # all ranks skip the step if the gradients of one are not finite
            is_finite = are_finite(gradients)
            if self.agree(not is_finite) and is_finite:
                gradients[0].fill_(float("nan"))
        self._scaler_on(gradients[0].device.type).unscale_(optimizer)
        self._unscaled[id(optimizer)] = optimizer

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **options: Any
    ) -> Any:
        """Step the optimizer, unless a scaled gradient is not finite; refuse closures of scaled losses."""
        if not self.scales_loss:
            return super().optimizer_step(optimizer, closure, **options)
        self._refuse_closure(optimizer, closure)
        self.unscale_gradients(optimizer)
        if id(optimizer) not in self._unscaled:  # it has no gradients
            return optimizer.step(**options)
        scaler = self._scaler_on("cpu")
        # Not whether `step` was called: a fused optimizer always is, and skips by itself.
        self.has_skipped_step = any(map(bool, scaler._found_inf_per_device(optimizer).values()))
        result = scaler.step(optimizer, **options)
        self._stepped.add(id(optimizer))
        return result

    def _refuse_closure(self, optimizer: Optimizer, closure: object) -> None:
        if closure is not None:
            why = "whose loss is not scaled" if self.scales_loss else "which would use old weights"
            raise ConfigurationError(
                message=f"precision={self.name!r} cannot step with a closure, {why}.",
                facts=f"the optimizer is {type(optimizer).__name__}.",
                remedy='use precision="bf16-mixed" or "32-true".',
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and the number of steps since it changed; without scaling {}."""
        return {"scaler": self._scaler_state()} if self.scales_loss else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved = dict(state_dict.get("scaler", {}))
        known = torch.amp.GradScaler("cpu").state_dict() if saved else {}
        # The conversion raises if a value is not a number.
        self._state = {name: type(value)(saved[name]) for name, value in known.items()}
        self._scaler = None
        self._unscaled, self._stepped = {}, set()

    def __repr__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self._options.items())
        return f"{type(self).__name__}({self.name!r}{options})"

    def _scaler_state(self) -> dict[str, Any]:
        """Return the state of torch's scaler; empty before the first loss."""
        if self._stepped:
            self.scale_gradients()
        return dict(self._state) if self._scaler is None else self._scaler.state_dict()

    def _scaler_on(self, device_type: str) -> torch.amp.GradScaler:
        """Return torch's scaler, created on the device of the first loss."""
        if self._scaler is None:
            self._scaler = torch.amp.GradScaler(device_type, **self._options)
            if self._state:
                self._scaler.load_state_dict(self._state)
        return self._scaler

    def scale_gradients(self) -> None:
        scaler = self._scaler
        if scaler is None or not self._unscaled:
            return
        known = {id(optimizer): optimizer for optimizer in self._optimizers} | self._unscaled
        waiting = {
            key: gradients
            for key, optimizer in known.items()
            if key not in self._stepped and (gradients := self._waiting_gradients(optimizer))
        }
        before = scaler.get_scale() if waiting else 1.0
        for key, optimizer in self._unscaled.items():
            if key in waiting:  # clipping may have hidden that one was infinite
                for is_infinite in scaler._found_inf_per_device(optimizer).values():
                    waiting[key][0].add_(torch.where(is_infinite > 0, torch.nan, 0.0).to(waiting[key][0]))
        if self._stepped:
            scaler.update()
        scaler._per_optimizer_states.clear()  # as `update` does
        for key, gradients in waiting.items():
            factor = scaler.get_scale() / (1.0 if key in self._unscaled else before)
            for gradient in gradients if factor != 1.0 else []:
                gradient.mul_(factor)
        self._unscaled.clear()
        self._stepped.clear()

    def _gradients(self, optimizer: Optimizer) -> list[Tensor]:
        return gradient_values(self.main_parameters(optimizer))

    def _waiting_gradients(self, optimizer: Optimizer) -> list[Tensor]:
        return self._gradients(optimizer)

    def __getstate__(self) -> dict[str, Any]:
        """Keep the numbers only, without tensors and optimizers."""
        state = self._scaler_state()
        of_a_job: dict[str, Any] = {"_scaler": None, "_optimizers": [], "_unscaled": {}, "_stepped": set()}
        return {**super().__getstate__(), **of_a_job, "_state": state}


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    check_keywords("a loss scale", options, _BOUNDS)
    for name, value in options.items():
        low, high = _BOUNDS[name]
        kinds, kind = (int, "whole number") if name == "growth_interval" else ((int, float), "number")
        is_valid = isinstance(value, kinds) and not isinstance(value, bool) and low < value < high
        check_value(name, value, is_valid, f"a {kind} between {low:g} and {high:g}")
    return options
