"""Run another method of a module through its wrapper's `forward`, so that DDP sees the step."""

from __future__ import annotations

from typing import Any

from torch import nn

_COMPILED = "_compiled_call_impl"  # where torch keeps what module.compile() made


def call_through(wrapper: nn.Module, module: nn.Module, method: str, *args: Any) -> Any:
    """Return `module.<method>(*args)`, called where `wrapper` calls the module's `forward`.

    Inside the method `self(...)` and `self.forward(...)` are the module's own again, compiled where
    `module.compile()` was called.
    """
    if wrapper is module:
        return getattr(module, method)(*args)
    own = module.__dict__
    hidden = [(each, each[_COMPILED]) for each in (own, wrapper.__dict__) if each.get(_COMPILED) is not None]

    def restore() -> None:
        own.pop("forward", None)
        for each, compiled in hidden:
            each[_COMPILED] = compiled

    def run(*inner: Any) -> Any:
        restore()
        return getattr(module, method)(*inner)

    # Instance attributes hide the class's; written past nn.Module's slow __setattr__.
    own["forward"] = run
    for each, _ in hidden:
        each[_COMPILED] = None
    try:
        return wrapper(*args)
    finally:
        restore()
