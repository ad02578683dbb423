"""`configure_ddp(self)`, as Lightning 2 has it: it replaces the module in `self.model` by the wrapper."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn


def wrapped_in_place(
    strategy: Any, module: nn.Module, wrap: Callable[[nn.Module], nn.Module], ddp_kwargs: Mapping[str, Any]
) -> object:
    """Call `strategy.configure_ddp()`, and return what it has set as `strategy.model`.

    Args:
        strategy: its `configure_ddp` takes no arguments.
        module: what it finds as `model`.
        wrap: wraps a module as the strategy does by itself.
        ddp_kwargs: the keywords for `DistributedDataParallel`.
    """
    names = {
        "model": module,
        "_ddp_kwargs": dict(ddp_kwargs),
        "_setup_model": wrap,
        "pre_configure_ddp": _done_elsewhere,
        "_register_ddp_hooks": _done_elsewhere,
    }
    with _attributes(strategy, names):
        strategy.configure_ddp()
        return strategy.model


@contextmanager
def _attributes(owner: object, values: Mapping[str, Any]) -> Iterator[None]:
    """Set attributes, and restore what was there."""
    own = vars(owner)
    before = {name: own[name] for name in values if name in own}
    own.update(values)
    try:
        yield
    finally:
        for name in values:
            own.pop(name, None)
        own.update(before)


def _done_elsewhere() -> None:
    """Do nothing: the strategy sets DDP's options, and registers the communication hook, by itself."""
