"""Call the hooks of a Fabric's callbacks, which are any objects."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from rankwise.checks import check_callable


def call_callbacks(callbacks: Iterable[object], hook_name: str, *args: Any, **kwargs: Any) -> None:
    """Call a method of each callback that has it, with those of the keyword arguments that it takes.

    Raises:
        InvalidTypeError: for an attribute of this name that cannot be called.
    """
    for callback in callbacks:
        hook = getattr(callback, hook_name, None)
        if hook is None:
            continue
        check_callable(f"{type(callback).__name__}.{hook_name}", hook, "a method")
        hook(*args, **_taken(hook, kwargs))


def _taken(hook: Callable[..., Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments that a method takes."""
    try:
        parameters = inspect.signature(hook).parameters
    except (TypeError, ValueError):  # written in C
        return kwargs
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return kwargs
    return {name: value for name, value in kwargs.items() if name in parameters}
