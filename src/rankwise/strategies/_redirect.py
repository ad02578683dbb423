"""Run another method of a module through its wrapper's `forward`, so that DDP sees the step."""

from __future__ import annotations

from typing import Any

from torch import nn


def call_through(wrapper: nn.Module, module: nn.Module, method: str, *args: Any) -> Any:
    """Return `module.<method>(*args)`, called where `wrapper` calls the module's `forward`.

    Inside the method `self(...)` and `self.forward(...)` are the module's own again.
    """
    if wrapper is module:
        return getattr(module, method)(*args)

    def run(*inner: Any) -> Any:
        del module.__dict__["forward"]
        return getattr(module, method)(*inner)

    # An instance attribute hides the class's method; written past nn.Module's slow __setattr__.
    module.__dict__["forward"] = run
    try:
        return wrapper(*args)
    finally:
        module.__dict__.pop("forward", None)
