"""`MasterWeightsPrecision`: 16-bit weights for computing, and 32-bit master weights for the optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from rankwise.errors import ConfigurationError
from rankwise.precision.base import floats_to, gradient_values
from rankwise.precision.loss_scaling import ScaledPrecision
from rankwise.process_group.distributed_optimizers import is_sharded


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
            _check_not_sharded(optimizer, self.name)
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
        known = {id(master): half for pairs in self._pairs.values() for half, master in pairs}
        masters: dict[int, Tensor] = {}
        self._pairs = {}
        for optimizer in optimizers:
            pairs = self._pairs[id(optimizer)] = []
            for group in optimizer.param_groups:
                group["params"] = [
                    self._replaced(parameter, optimizer, known, masters, pairs)
                    for parameter in group["params"]
                ]
            self._sizes[id(optimizer)] = _size_of(optimizer)

    def _replaced(
        self,
        parameter: Tensor,
        optimizer: Optimizer,
        known: dict[int, Tensor],
        masters: dict[int, Tensor],
        pairs: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Return the parameter for the optimizer: a 32-bit copy, or the same one if it has 32 bits."""
        if id(parameter) in known:  # a copy from the previous fit, which may be on another device
            half = known[id(parameter)]
            parameter.data = parameter.data.to(half.device)
            masters.setdefault(id(half), parameter)
        elif parameter.dtype is self.dtype:
            half = parameter
            if id(half) not in masters:
                copy = half.detach().to(torch.float32)  # DDP has broadcast `half` from rank 0
                masters[id(half)] = nn.Parameter(copy, half.requires_grad)
            if half in optimizer.state:
                optimizer.state[masters[id(half)]] = floats_to(optimizer.state.pop(half), torch.float32)
        else:
            return parameter
        pairs.append((half, masters[id(half)]))
        return masters[id(half)]

    def backward(self, loss: Tensor, **options: Any) -> None:
        super().backward(loss.float() if self.scales_loss else loss, **options)

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Move the module's gradients to the 32-bit copies, and unscale them there.

        Parameters that were added to the optimizer since the last step get copies first.
        """
        if id(optimizer) in self._pairs and _size_of(optimizer) != self._sizes[id(optimizer)]:
            self._pair(self._optimizers)
        for half, master in self._pairs.get(id(optimizer), []):
            if half.grad is not None:
                gradient = half.grad.float()
                master.grad = gradient if master.grad is None else master.grad + gradient
                half.grad = None
        super().unscale_gradients(optimizer)

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **options: Any
    ) -> Any:
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

    def _waiting_gradients(self, optimizer: Optimizer) -> list[Tensor]:
        halves = [half for half, _ in self._pairs.get(id(optimizer), [])]
        return self._gradients(optimizer) + gradient_values(halves)

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


def _size_of(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def _check_not_sharded(optimizer: Optimizer, name: str) -> None:
    if is_sharded(optimizer):
        raise ConfigurationError(
            message=f"precision={name!r} does not work with ZeroRedundancyOptimizer: it splits the copies.",
            remedy='use precision="bf16-mixed" or "16-mixed" with it.',
        )
