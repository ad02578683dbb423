"""Tensor hooks of parameters: called with averaged gradients, as one process calls them with its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.errors import ConfigurationError

_Hook = Callable[[Tensor], Any]
KeptHooks = list[tuple[Tensor, _Hook]]
"""Parameters with a hook that is to be called, in the order of the backward pass."""

_REMEDY = "change averaged gradients, in on_before_optimizer_step."


@contextmanager
def hooks_kept(hooked: Sequence[Tensor], module: nn.Module, *, is_averaged: bool) -> Iterator[KeptHooks]:
    """Keep the tensor hooks of a backward pass in the block until its gradients are averaged.

    If gradients of several batches are accumulated first, hooks are called in the backward pass. They get the
    gradient of this rank's own batch, and a ConfigurationError is raised if they change it.

    Args:
        hooked: parameters that have hooks, and whose gradients are averaged over the ranks.
        module: contains them, for messages.
        is_averaged: whether gradients are averaged after the block.

    Yields:
        The hooks for `call_hooks`, once the block has ended.
    """
    later: KeptHooks = []
    found = [(each, {**(each._backward_hooks or {})}) for each in hooked]
    for parameter, hooks in found:
        registered: Any = parameter._backward_hooks
        for key, hook in hooks.items():
            registered[key] = partial(_keep, later if is_averaged else None, hook, parameter, module)
    try:
        yield later
    finally:
        for parameter, hooks in found:
            registered = parameter._backward_hooks
            registered.update({key: hook for key, hook in hooks.items() if key in registered})
    refuse_new_hooks([each for each, hooks in found if len(each._backward_hooks or ()) > len(hooks)], module)


def refuse_new_hooks(hooked: Iterable[Tensor], module: nn.Module) -> None:
    """Raise for parameters whose hooks a forward pass has registered."""
    for parameter in hooked:
        raise ConfigurationError(
            message=f"A forward pass has registered a tensor hook of {_name_of(parameter, module)}.",
            facts="on several ranks it gets the gradient of this rank's own batch.",
            remedy=f"register it earlier, such as in on_train_start; or {_REMEDY}",
        )


def call_hooks(kept: KeptHooks, block: Callable[[], AbstractContextManager[Any]]) -> None:
    """Call hooks in a block, with averaged gradients, which they may change, or replace by their result."""
    with torch.no_grad(), block():
        for parameter, hook in kept:
            gradient = parameter.grad
            result = None if gradient is None else hook(gradient)
            if gradient is None or result is None or result is gradient:
                continue
            if result.shape != gradient.shape:  # which copying would expand
                shapes = f"{tuple(result.shape)} for a gradient of {tuple(gradient.shape)}"
                raise RuntimeError(f"A tensor hook has returned {shapes}.")
            gradient.copy_(result)  # a view of DDP's buckets, perhaps


def _keep(
    later: KeptHooks | None, hook: _Hook, parameter: Tensor, module: nn.Module, gradient: Tensor
) -> None:
    """Stand in for a hook in the backward pass."""
    earlier = parameter.grad
    if later is not None and (earlier is None or not (earlier.is_sparse or earlier.any())):
        later.append((parameter, hook))
        return
    version = gradient._version
    result = hook(gradient)
    if gradient._version != version or (result is not None and result is not gradient):
        raise ConfigurationError(
            message=f"A tensor hook of {_name_of(parameter, module)} has changed a gradient of this rank's "
            "own batch, before the average.",
            facts="several ranks average gradients in the last backward pass before a step.",
            remedy=_REMEDY,
        )


def _name_of(parameter: Tensor, module: nn.Module) -> str:
    names = [name for name, each in module.named_parameters() if each is parameter]
    return f"parameter {names[0].removeprefix('module.')!r}" if names else "a parameter"
