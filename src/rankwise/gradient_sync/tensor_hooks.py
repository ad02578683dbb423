"""Tensor hooks of parameters: called with averaged gradients, as one process calls them with its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from rankwise.errors import ConfigurationError

_Hook = Callable[[Tensor], Any]
_REMEDY = "change averaged gradients, in on_before_optimizer_step."


@final
class TensorHooks:
    """Call tensor hooks after the average, where a backward pass computes gradients that are averaged next.

    Where the gradients of several batches are accumulated first, hooks are called in the backward pass. They
    get the gradient of this rank's own batch, which they may not change.

    Attributes:
        in_call: returns the block in which hooks are called after the average.
    """

    def __init__(self) -> None:
        self.in_call: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._kept: list[tuple[Tensor, _Hook]] = []  # in the order of the backward pass

    @contextmanager
    def kept(self, parameters: Sequence[Tensor], module: nn.Module, *, is_averaged: bool) -> Iterator[None]:
        """Keep the hooks of parameters in the backward pass of the block; `call` calls them.

        Args:
            parameters: those whose gradients are averaged over the ranks.
            module: contains them, for messages.
            is_averaged: whether gradients are averaged after the block.

        Raises:
            ConfigurationError: when a hook changes the gradient of this rank's own batch, or was registered
                in the block.
        """
        self._kept.clear()
        found = [(each, {**each._backward_hooks}) for each in parameters if each._backward_hooks]
        for parameter, hooks in found:
            registered: Any = parameter._backward_hooks
            for key, hook in hooks.items():
                registered[key] = partial(self._keep, hook, parameter, module, is_averaged)
        try:
            yield
        finally:
            for parameter, hooks in found:
                registered = parameter._backward_hooks
                registered.update({key: hook for key, hook in hooks.items() if key in registered})
        known = {id(parameter): hooks.keys() for parameter, hooks in found}
        for parameter in parameters:
            if parameter._backward_hooks and parameter._backward_hooks.keys() - known.get(id(parameter), ()):
                raise ConfigurationError(
                    message=f"A forward pass has registered a tensor hook of {_name_of(parameter, module)}.",
                    facts="on several ranks it gets the gradient of this rank's own batch.",
                    remedy=f"register it earlier, such as in on_train_start; or {_REMEDY}",
                )

    def _keep(
        self, hook: _Hook, parameter: Tensor, module: nn.Module, is_averaged: bool, gradient: Tensor
    ) -> None:
        """Stand in for a hook in the backward pass."""
        earlier = parameter.grad
        if is_averaged and (earlier is None or not (earlier.is_sparse or earlier.any())):
            self._kept.append((parameter, hook))
            return
        version = gradient._version
        result = hook(gradient)
        if gradient._version != version or (result is not None and result is not gradient):
            raise ConfigurationError(
                message=f"A tensor hook of {_name_of(parameter, module)} has changed a gradient of this "
                "rank's own batch, before the average.",
                facts="several ranks average gradients in the last backward pass before a step.",
                remedy=_REMEDY,
            )

    def call(self) -> None:
        """Call the hooks with averaged gradients, which they may change, or replace by what they return."""
        if self._kept:
            with torch.no_grad(), self.in_call():
                for parameter, hook in self._kept:
                    gradient = parameter.grad
                    result = None if gradient is None else hook(gradient)
                    if gradient is not None and result is not None and result is not gradient:
                        gradient.copy_(result)  # a view of DDP's buckets, perhaps
            self._kept.clear()


def _name_of(parameter: Tensor, module: nn.Module) -> str:
    names = [name for name, each in module.named_parameters() if each is parameter]
    return f"parameter {names[0].removeprefix('module.')!r}" if names else "a parameter"
