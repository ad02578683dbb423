"""Call what a user gives a Fabric: the launched function, the method `run` of subclasses, callbacks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from rankwise.checks import check_callable, check_value, keywords_of
from rankwise.errors import InvalidTypeError
from rankwise.strategies import Strategy
from rankwise.strategies.agreement import share_states

T = TypeVar("T")


def run_function(
    strategy: Strategy, fabric: Any, function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> T:
    """Run what a Fabric has launched, on each rank."""
    status = "failed"
    try:
        share_states(strategy, fabric.loggers)
        value = function(fabric, *args, **kwargs)
        strategy.sync_models()
        status = "success"
        return value
    except BaseException as error:
        strategy.job.report_failure(error)  # before the loggers end, which may take long
        raise
    finally:
        fabric.end(status)


def launching_itself(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method `run` that launches itself, or within a launch runs."""

    @functools.wraps(run)
    def launching(fabric: Any, *args: Any, **kwargs: Any) -> Any:
        if fabric.strategy.is_in_job:
            return run(fabric, *args, **kwargs)
        return fabric.launch(_call_run, *args, **kwargs)

    return launching


def _call_run(fabric: Any, *args: Any, **kwargs: Any) -> Any:
    return fabric.run(*args, **kwargs)


def check_function(function: Any) -> None:
    """Raise InvalidTypeError unless `function` can be called with a Fabric."""
    remedy = "launch(main), not launch(main())"
    check_callable("function", function, "a function that takes the Fabric", remedy)
    parameters = inspect.signature(function).parameters
    expected = "a function that takes the Fabric as its first argument"
    check_value("function", function, parameters, expected, error=InvalidTypeError)


def call_callbacks(callbacks: Iterable[object], hook_name: str, *args: Any, **kwargs: Any) -> None:
    """Call a method of each callback that has it, with those of the keyword arguments that it takes."""
    for callback in callbacks:
        hook = getattr(callback, hook_name, None)
        if hook is None:
            continue
        check_callable(f"{type(callback).__name__}.{hook_name}", hook, "a method")
        taken = keywords_of(hook, kwargs)
        hook(*args, **{name: value for name, value in kwargs.items() if name in taken})
