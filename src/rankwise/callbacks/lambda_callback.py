"""`LambdaCallback`: a callback made of functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from rankwise.callbacks.base import Callback
from rankwise.errors import InvalidTypeError, UnknownArgumentError

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
        for name, function in hooks.items():
            if name not in known:
                raise UnknownArgumentError(target="LambdaCallback", name=name, known=known)
            if function is None:
                continue
            if not callable(function):
                raise InvalidTypeError(argument=name, value=function, expected="a function")
            setattr(self, name, function)
