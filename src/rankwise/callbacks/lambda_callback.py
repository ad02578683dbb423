"""`LambdaCallback`: a callback made of functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from rankwise.callbacks.base import Callback
from rankwise.checks import check_callable, check_keywords

_NO_HOOKS = ("check_stage", "state_dict", "load_state_dict")


@final
class LambdaCallback(Callback):
    """Call functions as hooks: `LambdaCallback(on_train_start=lambda trainer, module: print("go"))`.

    Args:
        hooks: a function for each hook, by the hook's name, or None. It gets the hook's arguments
            without `self`.

    Raises:
        UnknownArgumentError: for a name that is not a hook of `Callback`.
        InvalidTypeError: for a value that cannot be called.
    """

    def __init__(self, **hooks: Callable[..., Any] | None) -> None:
        known = tuple(
            name
            for name, value in vars(Callback).items()
            if callable(value) and not name.startswith("_") and name not in _NO_HOOKS
        )
        check_keywords("LambdaCallback", hooks, known)
        for name, function in hooks.items():
            if function is not None:
                check_callable(name, function)
                setattr(self, name, function)
