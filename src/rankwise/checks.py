"""Check values of arguments and methods of users' classes; an error says what was expected."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rankwise.errors import (
    ConfigurationError,
    InvalidArgumentError,
    InvalidTypeError,
    MissingExtraError,
    UnknownArgumentError,
    UnknownNameError,
)

_NO_REMEDIES: Mapping[str, str] = MappingProxyType({})
USE_OWN_CLASS = "use rankwise's class of that name: import rankwise.lightning as pl."
"""The remedy for an object of a class that comes with Lightning."""
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def check_value(
    name: str,
    value: object,
    is_valid: object,
    expected: str,
    remedy: str = "",
    error: type[InvalidArgumentError | InvalidTypeError] = InvalidArgumentError,
) -> None:
    """Raise `error` unless `is_valid`; `expected` describes valid values of the argument `name`."""
    if not is_valid:
        raise error(argument=name, value=value, expected=expected, remedy=remedy)


def check_minimum(name: str, value: Any, minimum: Any, expected: str = "") -> None:
    """Raise `InvalidArgumentError` unless `value` is `minimum` or more."""
    check_value(name, value, value >= minimum, expected or f"{minimum} or more")


def check_choice(name: str, value: object, choices: Collection[object], expected: str = "") -> None:
    """Raise `InvalidArgumentError` unless `value` is one of `choices`."""
    if value not in choices:
        expected = expected or " or ".join(map(repr, choices))
        raise InvalidArgumentError(argument=name, value=value, expected=expected)


def check_name(name: str, value: object, names: Sequence[str], expected: str = "") -> str:
    """Return the user's value of an argument in lower case; raise if it is not a string among `names`."""
    if not isinstance(value, str):
        expected = expected or f"one of {', '.join(map(repr, names))}"
        raise InvalidTypeError(argument=name, value=value, expected=expected)
    if value.lower() not in names:
        raise UnknownNameError(kind=name, name=value, known=tuple(names))
    return value.lower()


def check_is_a(name: str, value: Any, kinds: Any, expected: str = "", remedy: str = "") -> None:
    """Raise `InvalidTypeError` unless `value` is an instance of `kinds`; a bool is not a number."""
    kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    if isinstance(value, kinds) and not (isinstance(value, bool) and bool not in kinds):
        return
    if isinstance(value, type) and issubclass(value, kinds):
        remedy = remedy or f"make an instance of it: {value.__name__}()"
    if is_lightnings_own(type(value)):
        remedy = remedy or USE_OWN_CLASS
    expected = expected or f"an instance of {kinds[0].__name__}"
    raise InvalidTypeError(argument=name, value=value, expected=expected, remedy=remedy)


def check_callable(name: str, value: object, expected: str = "a function", remedy: str = "") -> None:
    """Raise `InvalidTypeError` unless `value` can be called."""
    check_value(name, value, callable(value), expected, remedy, InvalidTypeError)


def check_keywords(
    target: str, given: Iterable[object], known: Iterable[str], remedies: Mapping[str, str] = _NO_REMEDIES
) -> None:
    """Raise `UnknownArgumentError` unless `target` takes the keywords; `remedies` are for some it lacks."""
    known = tuple(known)
    for name in map(str, given):
        if name not in known:
            remedy = remedies.get(name, "")
            raise UnknownArgumentError(target=target, name=name, known=known, remedy=remedy)


def keywords_of(function: Callable[..., Any], given: Iterable[str]) -> list[str]:
    """Return the keywords that a function takes; where it takes any, those that are `given` too."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in C
        return [*given]
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return [*parameters, *(given if takes_any else ())]


def check_installed(package: str, extra: str, purpose: str) -> None:
    """Raise `MissingExtraError` unless an optional package is installed; imports nothing."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:  # a folder of files looks like a package without a module
        raise MissingExtraError(package=package, extra=extra, purpose=purpose)


def checked_list(name: str, given: Any, kinds: Any, expected: str = "") -> list[Any]:
    """Return the items of an argument that is one object or a sequence of them; None for none of them."""
    is_several = isinstance(given, Sequence) and not isinstance(given, str)
    items = [] if given is None else list(given) if is_several else [given]
    for item in items:
        check_is_a(name, item, kinds, expected or f"an instance of {kinds.__name__}, or a list of them")
    return items


def is_lightnings_own(kind: type) -> bool:
    """Return whether a class is defined in the packages of Lightning, which need not be installed."""
    return kind.__module__.partition(".")[0] in ("lightning", "pytorch_lightning")


def lightning_base(kind: type, name: str) -> Any:
    """Return the class of that name among the bases of `kind` that Lightning defines; None without one."""
    return next((base for base in kind.__mro__ if base.__name__ == name and is_lightnings_own(base)), None)


# ------------------------------------------------------------------ methods of users' classes


def check_overrides(owner: object, refused: Mapping[str, str] = _NO_REMEDIES) -> None:
    """Raise for a user's method that rankwise never calls (`refused`, see `refuse_methods`), or cannot call.

    It cannot call one that takes other arguments than the method it overrides, or that replaces a property.
    """
    classes = type(owner).__mro__
    base = next((each for each in classes if is_of_this_package(each)), object)
    own = {name for each in classes[: classes.index(base)] for name in vars(each)}
    if not own:
        return
    refuse_methods(owner, refused)
    for name in sorted(name for name in own & {*dir(base)} if not name.startswith("__")):
        overridden = inspect.getattr_static(base, name)
        if isinstance(overridden, property):
            if inspect.isfunction(inspect.getattr_static(type(owner), name)):
                raise ConfigurationError(
                    message=f"{type(owner).__name__}.{name} is a method, and rankwise reads a property.",
                    facts=f"it takes {inspect.signature(getattr(owner, name))}.",
                    remedy=f"@property above def {name}(self).",
                )
        elif inspect.isfunction(overridden):
            if vars(overridden).get("may_be_bare") and accepts(getattr(owner, name), 0):
                continue
            _, *parameters = inspect.signature(overridden).parameters.values()
            by_position = [each for each in parameters if each.kind in _BY_POSITION]
            num_required = sum(each.default is each.empty for each in by_position)
            returns = overridden.__annotations__.get("return", "")
            check_arguments(owner, name, [each.name for each in by_position], num_required, str(returns))


def refuse_methods(owner: object, refused: Mapping[str, str]) -> None:
    """Raise for methods that rankwise never calls; `refused` has remedies by name. None is not a method."""
    for name in methods_among(refused, owner):
        raise ConfigurationError(
            message=f"{type(owner).__name__}.{name}() would never be called.",
            facts="rankwise calls no method of this name.",
            remedy=f"{refused[name]} A method that only your code calls needs another name.",
        )


def methods_among(names: Iterable[str], owner: object) -> list[str]:
    """Return those of some names that are methods, or properties, of an object."""
    kind, own = type(owner), vars(owner)
    found = [(name, getattr(kind, name, None)) for name in names]
    return [
        name
        for name, each in found
        if callable(each) or isinstance(each, property) or callable(own.get(name))
    ]


def check_arguments(
    owner: object, name: str, arguments: Sequence[str], num_required: int, returns: str = ""
) -> None:
    """Raise unless method `name` takes the first `num_required` of `arguments`, or these and further ones.

    `arguments` are names, of what it gets by position; `returns` is what it has to return, for the message.
    """
    method = getattr(owner, name)
    counts = range(num_required, len(arguments) + 1)
    if callable(method) and not any(accepts(method, count) for count in counts):
        called = f"{type(owner).__name__}.{name}"
        raise ConfigurationError(
            message=f"{called}() cannot be called with the arguments that rankwise passes.",
            facts=f"it takes {inspect.signature(method)}, and would get ({', '.join(arguments)}).",
            remedy=f"def {name}({', '.join(['self', *arguments])}){returns and f' -> {returns}'}.",
        )


def accepts(method: Callable[..., Any], count: int) -> bool:
    """Return whether a method can be called with `count` positional arguments."""
    try:
        inspect.signature(method).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:  # it has no signature
        return True
    return True


def is_of_this_package(value: object) -> bool:
    """Return whether rankwise defines a class or function."""
    return getattr(value, "__module__", "").partition(".")[0] == __name__.partition(".")[0]
