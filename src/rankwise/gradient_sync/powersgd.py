"""PowerSGD whose memory is kept by parameter name, so that it survives new buckets and restarts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

__all__ = ["PowerSGDMemory", "powersgd_hook"]

Layout = tuple[str, ...]


def powersgd_hook(memory: PowerSGDMemory, bucket: Any) -> Any:
    """Reduce a bucket with torch's `powerSGD_hook`."""
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

    memory.fit(bucket)
    return powerSGD_hook(memory.state, bucket)


@final
class PowerSGDMemory:
    """torch's `PowerSGDState`, and the parameter names of each of its buckets.

    torch stores the error feedback (what compression lost) and the last approximation by bucket index. DDP
    rebuilds its buckets after the first step, and so after each restart. This class stores both by parameter
    name and assigns them to the new buckets.
    """

    def __init__(self, state: PowerSGDState) -> None:
        self.state = state
        self._names: dict[int, str] = {}
        self._sizes: dict[str, int] = {}
        self._layouts: dict[int, Layout] = {}
        self._errors: dict[str, Tensor] = {}  # not yet assigned to a bucket
        self._bases: dict[Layout, Tensor] = {}

    def name_parameters(self, module: nn.Module) -> None:
        """Register the names of the parameters in the buckets."""
        for name, parameter in module.named_parameters():
            self._names[id(parameter)], self._sizes[name] = name, parameter.numel()

    def fit(self, bucket: Any) -> None:
        """Assign memory to this bucket, if its parameters have changed."""
        index = bucket.index()
        parameters = bucket.parameters()
        layout = tuple(self._names.get(id(parameter), "?") for parameter in parameters)
        if self._layouts.get(index) == layout:
            return
        if index in self._layouts:  # DDP has rebuilt its buckets
            self._collect(index)
        self._layouts[index] = layout
        buffer, state = bucket.buffer(), self.state
        if any(name in self._errors for name in layout):
            pieces = [
                self._errors.pop(name, parameter.new_zeros(parameter.numel())).to(buffer)
                for name, parameter in zip(layout, parameters, strict=True)
            ]
            state.error_dict[index] = torch.cat(pieces)
        if (basis := self._bases.pop(layout, None)) is not None:
            state.q_memory_dict[index] = basis.to(buffer)
            state.p_memory_dict[index] = buffer.new_empty(self._left_factor_size(parameters))

    def _left_factor_size(self, parameters: list[Tensor]) -> int:
        """Return the number of elements of a bucket's left factors (torch's P matrices)."""
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import _should_compress

        size = 0
        for parameter in parameters:
            rows = parameter.shape[0]
            columns = parameter.numel() // rows
            rank = min(rows, columns, self.state.matrix_approximation_rank)
            if _should_compress(rows, columns, rank, self.state.min_compression_rate)[0]:
                size += rows * rank
        return size

    def _collect(self, first: int) -> None:
        """Move the memory of the buckets from index `first` on back to the parameter names."""
        self._errors, self._bases = self._errors_by_name(first), self._bases_by_layout(first)
        for memory in (self.state.error_dict, self.state.p_memory_dict, self.state.q_memory_dict):
            for index in [index for index in memory if index >= first]:
                del memory[index]
        self._layouts = {index: layout for index, layout in self._layouts.items() if index < first}

    def _errors_by_name(self, first: int = 0) -> dict[str, Tensor]:
        errors = dict(self._errors)
        for index, flat in self.state.error_dict.items():
            if index >= first:
                layout = self._layouts[index]
                errors.update(zip(layout, flat.split([self._sizes[name] for name in layout]), strict=True))
        return errors

    def _bases_by_layout(self, first: int = 0) -> dict[Layout, Tensor]:
        kept = {
            self._layouts[index]: basis for index, basis in self.state.q_memory_dict.items() if index >= first
        }
        return {**self._bases, **kept}

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, in plain types and tensors."""
        random_state: Any = self.state.rng.get_state(legacy=True)
        kind, keys, position, has_gauss, gauss = random_state
        return {
            "iter": self.state.iter,
            "errors": {name: error.detach().clone() for name, error in self._errors_by_name().items()},
            "bases": [
                {"parameters": list(layout), "basis": basis.detach().clone()}
                for layout, basis in self._bases_by_layout().items()
            ],
            "random": [kind, keys.tolist(), position, has_gauss, gauss],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, without the errors of parameters that have changed."""
        self._collect(0)
        self.state.iter = state["iter"]
        self._errors = {
            name: error for name, error in state["errors"].items() if self._sizes.get(name) == error.numel()
        }
        self._bases = {tuple(entry["parameters"]): entry["basis"] for entry in state["bases"]}
        kind, keys, position, has_gauss, gauss = state["random"]
        self.state.rng.set_state((kind, keys, position, has_gauss, gauss))
