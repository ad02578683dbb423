"""The built-in precisions (`create_precision`); dynamic loss scaling of float16; 32-bit master weights."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from rankwise.checks import check_keywords, check_value
from rankwise.compatibility.names import OTHER_PRECISIONS
from rankwise.errors import ConfigurationError, UnknownNameError
from rankwise.nested import map_tensors
from rankwise.precision.base import (
    Closure,
    DtypePrecision,
    Precision,
    are_finite,
    default_dtype,
    floats_to,
    gradient_values,
)
from rankwise.process_group.distributed_optimizers import is_sharded
from rankwise.torch_internals import LOSS_SCALING, check_torch

_BOUNDS = {
    "init_scale": (0.0, math.inf),
    "growth_factor": (1.0, math.inf),
    "backoff_factor": (0.0, 1.0),
    "growth_interval": (0.0, math.inf),
}


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
        # Torch's scaler of this rank; None before the first loss, and for bfloat16.
        self.scaler: torch.amp.GradScaler | None = None
        self._state: dict[str, Any] = {}
        self._optimizers: list[Optimizer] = []
        self._unscaled: dict[int, Optimizer] = {}  # by id; some of them have stepped
        self._stepped: set[int] = set()

    @property
    def scales_loss(self) -> bool:
        """Whether the dtype is float16."""
        return self.dtype is torch.float16

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

    def optimizer_step(self, optimizer: Optimizer, closure: Closure | None = None, **options: Any) -> Any:
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
        self.scaler = None
        self._unscaled, self._stepped = {}, set()

    def __repr__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self._options.items())
        return f"{type(self).__name__}({self.name!r}{options})"

    def _scaler_state(self) -> dict[str, Any]:
        """Return the state of torch's scaler; empty before the first loss."""
        if self._stepped:
            self.scale_gradients()
        return dict(self._state) if self.scaler is None else self.scaler.state_dict()

    def _scaler_on(self, device_type: str) -> torch.amp.GradScaler:
        """Return torch's scaler, created on the device of the first loss."""
        if self.scaler is None:
            self.scaler = torch.amp.GradScaler(device_type, **self._options)
            if self._state:
                self.scaler.load_state_dict(self._state)
        return self.scaler

    def scale_gradients(self) -> None:
        scaler = self.scaler
        if scaler is None or not self._unscaled:
            return
        known = {id(optimizer): optimizer for optimizer in self._optimizers} | self._unscaled
        waiting = {
            key: gradients
            for key, optimizer in known.items()
            if key not in self._stepped and (gradients := self._gradients(optimizer))
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
        """Return the gradients that a step of the optimizer would use."""
        return gradient_values(self.main_parameters(optimizer))

    def __getstate__(self) -> dict[str, Any]:
        """Keep the numbers only, without tensors and optimizers."""
        state = self._scaler_state()
        of_a_job: dict[str, Any] = {"scaler": None, "_optimizers": [], "_unscaled": {}, "_stepped": set()}
        return {**super().__getstate__(), **of_a_job, "_state": state}


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    check_keywords("a loss scale", options, _BOUNDS)
    for name, value in options.items():
        low, high = _BOUNDS[name]
        kinds, kind = (int, "whole number") if name == "growth_interval" else ((int, float), "number")
        is_valid = isinstance(value, kinds) and not isinstance(value, bool) and low < value < high
        check_value(name, value, is_valid, f"a {kind} between {low:g} and {high:g}")
    return options


@final
class MixedPrecision(ScaledPrecision):
    """Run forward passes under `torch.autocast`; with float16, scale the loss.

    Args:
        name: `"16-mixed"` or `"bf16-mixed"`.
        scaler: for `"16-mixed"`: `init_scale`, `growth_factor`, `backoff_factor`, `growth_interval`.

    Raises:
        UnknownNameError: for an unknown name.
        UnknownArgumentError, InvalidArgumentError: for invalid scaler options.
    """

    dtypes: ClassVar[Mapping[str, torch.dtype]] = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}

    def __init__(self, name: str = "bf16-mixed", **scaler: Any) -> None:
        super().__init__(name, **scaler)

    def forward_context(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device_type, dtype=self.dtype)

    def convert_input(self, batch: Any) -> Any:
        return batch

    def convert_output(self, output: Any) -> Any:
        default = torch.get_default_dtype()
        return map_tensors(
            output, lambda tensor: tensor.to(default) if tensor.dtype is self.dtype else tensor
        )

    def optimizer_step(self, optimizer: Optimizer, closure: Closure | None = None, **options: Any) -> Any:
        result = super().optimizer_step(optimizer, closure, **options)
        torch.clear_autocast_cache()  # a step under autocast (manual optimisation) leaves old weights in it
        return result


class _TrueFormat(DtypePrecision):
    """Parameters, data and computation in one dtype."""

    def module_init_context(self) -> AbstractContextManager[Any]:
        return default_dtype(self.dtype)

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert parameters and buffers, in place."""
        return module.to(self.dtype)

    def prepare_to_load(self, module: nn.Module) -> None:
        """Convert the module, which would otherwise round a checkpoint of 64-bit weights."""
        self.convert_module(module)


@final
class HalfPrecision(_TrueFormat):
    """Everything in 16 bits, which halves the memory; small updates are rounded away.

    `MasterWeightsPrecision` keeps small updates.

    Args:
        name: `"16-true"` or `"bf16-true"`.

    Raises:
        UnknownNameError: for an unknown name.
    """

    dtypes: ClassVar[Mapping[str, torch.dtype]] = {"16-true": torch.float16, "bf16-true": torch.bfloat16}

    def __init__(self, name: str = "16-true") -> None:
        super().__init__(name)

    def _total_norm(self, gradients: list[Tensor], norm_type: float) -> Tensor:
        """Return the norm, computed in 32 bits: in 16 it may be infinite, or rounded."""
        norms = [torch.linalg.vector_norm(each, norm_type, dtype=torch.float32) for each in gradients]
        return torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros(())


@final
class DoublePrecision(_TrueFormat):
    """Everything in 64 bits."""

    dtypes: ClassVar[Mapping[str, torch.dtype]] = {"64-true": torch.float64}

    def __init__(self) -> None:
        super().__init__("64-true")

    def convert_output(self, output: Any) -> Any:
        """Return predictions without rounding them."""
        return output


@final
class MasterWeightsPrecision(ScaledPrecision):
    """Keeps a 32-bit copy of every 16-bit weight in the optimizer, so that small updates are not lost.

    This is Apex's O2: the module's parameters and its input are 16-bit, batch normalisation stays 32-bit,
    and with float16 the loss is scaled dynamically. The optimizers' parameter groups contain the copies.
    Before a step the module's gradients are moved to the copies; after it the copies are rounded into the
    module's weights. Checkpoints contain the copies, under `"precision"`. See Micikevicius et al., "Mixed
    Precision Training".

    Args:
        name: `"16-master"` or `"bf16-master"`.
        scaler: for float16: `init_scale`, `growth_factor`, `backoff_factor`, `growth_interval`.

    Raises:
        UnknownNameError: for an unknown name.
        UnknownArgumentError, InvalidArgumentError: for invalid scaler options.
    """

    dtypes: ClassVar[Mapping[str, torch.dtype]] = {"16-master": torch.float16, "bf16-master": torch.bfloat16}
    scaler_defaults: ClassVar[Mapping[str, float]] = {"init_scale": 2.0**15}  # 2**16 overflows a loss of 1

    def __init__(self, name: str = "16-master", **scaler: Any) -> None:
        super().__init__(name, **scaler)
        self._pairs: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._pending: list[list[Tensor]] = []
        self._sizes: dict[int, int] = {}  # how many parameters an optimizer had when it was paired

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Convert 32-bit parameters and buffers in place, except those of batch normalisation."""
        for submodule in module.modules():
            if isinstance(submodule, _BatchNorm):
                continue
            for parameter in submodule.parameters(recurse=False):
                if parameter.dtype is torch.float32:
                    parameter.data = parameter.data.to(self.dtype)
            for name, buffer in submodule.named_buffers(recurse=False):
                if buffer.dtype is torch.float32:
                    submodule._buffers[name] = buffer.to(self.dtype)
        return module

    def configure(self, module: nn.Module, optimizers: list[Optimizer]) -> None:
        """Put 32-bit copies of the module's 16-bit parameters into the optimizers.

        Mutates: `optimizer.param_groups` and the keys of `optimizer.state`.

        Raises:
            ConfigurationError: for an optimizer that shards its parameters over the ranks.
        """
        for optimizer in optimizers:
            if is_sharded(optimizer):
                raise ConfigurationError(
                    message=f"precision={self.name!r} does not work with ZeroRedundancyOptimizer: "
                    "it splits the copies.",
                    remedy='use precision="bf16-mixed" or "16-mixed" with it.',
                )
        self._pair(optimizers)
        super().configure(module, optimizers)
        if self._pending:
            self._load_masters(self._pending)

    def reload_weights(self) -> None:
        """Copy the module's 16-bit weights."""
        with torch.no_grad():
            for half, master in chain.from_iterable(self._pairs.values()):
                master.copy_(half)

    def _pair(self, optimizers: list[Optimizer]) -> None:
        """Replace the 16-bit parameters in the optimizers by copies."""
        halves = {id(master): half for pairs in self._pairs.values() for half, master in pairs}
        masters: dict[int, Tensor] = {}
        self._pairs = {}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"] = [
                    self._replaced(parameter, optimizer, halves, masters) for parameter in group["params"]
                ]
            updated = self.main_parameters(optimizer)
            self._pairs[id(optimizer)] = [(halves[id(each)], each) for each in updated if id(each) in halves]
            self._sizes[id(optimizer)] = len(updated)

    def _replaced(
        self, parameter: Tensor, optimizer: Optimizer, halves: dict[int, Tensor], masters: dict[int, Tensor]
    ) -> Tensor:
        """Return the parameter for the optimizer: a 32-bit copy, or the same one if it has 32 bits."""
        if id(parameter) in halves:  # a copy from the previous fit, which may be on another device
            half = halves[id(parameter)]
            parameter.data = parameter.data.to(half.device)
            return masters.setdefault(id(half), parameter)
        if parameter.dtype is not self.dtype:
            return parameter
        if id(parameter) not in masters:
            copy = parameter.detach().to(torch.float32)  # DDP has broadcast `parameter` from rank 0
            masters[id(parameter)] = nn.Parameter(copy, parameter.requires_grad)
        master = masters[id(parameter)]
        halves[id(master)] = parameter
        if parameter in optimizer.state:
            optimizer.state[master] = floats_to(optimizer.state.pop(parameter), torch.float32)
        return master

    def backward(self, loss: Tensor, **options: Any) -> None:
        super().backward(loss.float() if self.scales_loss else loss, **options)

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Move the module's gradients to the 32-bit copies, and unscale them there.

        Parameters that were added to the optimizer since the last step get copies first.
        """
        size = len(self.main_parameters(optimizer))
        if self._sizes.get(id(optimizer), size) != size:
            self._pair(self._optimizers)
        for half, master in self._pairs.get(id(optimizer), []):
            if half.grad is not None:
                gradient = half.grad.float()
                master.grad = gradient if master.grad is None else master.grad + gradient
                half.grad = None
        super().unscale_gradients(optimizer)

    def optimizer_step(self, optimizer: Optimizer, closure: Closure | None = None, **options: Any) -> Any:
        """Update the 32-bit copies, and round them into the module's weights.

        Raises:
            ConfigurationError: with a closure, which would use weights that are not updated yet.
        """
        self._refuse_closure(optimizer, closure)
        if not self.scales_loss:
            self.unscale_gradients(optimizer)
        result = super().optimizer_step(optimizer, **options)
        if not self.has_skipped_step:
            with torch.no_grad():
                for half, master in self._pairs.get(id(optimizer), []):
                    half.copy_(master)
        return result

    def zero_grad(self, optimizer: Optimizer, set_to_none: bool = True) -> None:
        super().zero_grad(optimizer, set_to_none)
        for half, _ in self._pairs.get(id(optimizer), []):
            if set_to_none:
                half.grad = None
            elif half.grad is not None:
                half.grad.zero_()

    def _gradients(self, optimizer: Optimizer) -> list[Tensor]:
        halves = [half for half, _ in self._pairs.get(id(optimizer), [])]
        return super()._gradients(optimizer) + gradient_values(halves)

    def model_parameters(self, optimizer: Optimizer) -> list[Tensor]:
        halves = {id(master): half for half, master in self._pairs.get(id(optimizer), [])}
        return [halves.get(id(parameter), parameter) for parameter in self.main_parameters(optimizer)]

    def state_dict(self) -> dict[str, Any]:
        masters = [[master.detach() for _, master in pairs] for pairs in self._pairs.values()]
        return {"masters": masters or self._pending, **super().state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; before `configure`, which then loads the copies.

        Raises:
            ValueError: when the copies do not match the optimizers' parameters.
        """
        super().load_state_dict(state_dict)
        masters = state_dict.get("masters", [])
        if masters and self._pairs:
            self._load_masters(masters)
        else:
            self._pending = masters

    def _load_masters(self, masters: list[list[Tensor]]) -> None:
        self._pending = []
        own = [master for pairs in self._pairs.values() for _, master in pairs]
        saved = [master for group in masters for master in group]
        if [master.shape for master in own] != [master.shape for master in saved]:
            raise ValueError(f"{len(saved)} master weights do not fit {len(own)} parameters.")
        with torch.no_grad():
            for master, other in zip(own, saved, strict=True):
                master.copy_(other)

    def __getstate__(self) -> dict[str, Any]:
        """Keep the copies, without the parameters and optimizers they belong to."""
        masters = self.state_dict()["masters"]
        return {**super().__getstate__(), "_pairs": {}, "_sizes": {}, "_pending": masters}


_PRECISIONS: dict[str, Callable[[], Precision]] = {"32-true": Precision, "64-true": DoublePrecision}
for _kind in (HalfPrecision, MixedPrecision, MasterWeightsPrecision):
    _PRECISIONS |= {name: functools.partial(_kind, name) for name in _kind.dtypes}
# Spellings that Lightning accepts too; there 16 means autocast.
_SPELLINGS = {"64": "64-true", "32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed"}


def create_precision(name: str | int) -> Precision:
    """Return the precision called `name`, such as `"bf16-mixed"`; 64, 32, 16 and `"bf16"` are names too.

    Raises:
        UnknownNameError: for an unknown name.
    """
    spelling = str(name).lower()
    known = _SPELLINGS.get(spelling, spelling)
    if known not in _PRECISIONS:
        meant = OTHER_PRECISIONS.get(spelling)
        remedy = f'precision="{meant}".' if meant else ""
        known_names = (*_PRECISIONS, *_SPELLINGS)
        raise UnknownNameError(kind="precision", name=str(name), known=known_names, remedy=remedy)
    return _PRECISIONS[known]()
