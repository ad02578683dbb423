"""`NameTable`, the base of the registries; names with options, as in `"name:option=value"`; checks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from rankwise.errors import DuplicateNameError, InvalidTypeError, UnknownNameError

__all__ = [
    "USE_OWN_CLASS",
    "NameTable",
    "check_is_a",
    "check_name",
    "is_lightnings_own",
    "lightning_base",
    "split_options",
]

USE_OWN_CLASS = "use rankwise's class of that name: import rankwise.lightning as pl."
"""The remedy for an object of a class that comes with Lightning."""

Entry = TypeVar("Entry", bound=Any)


class NameTable(ABC, Generic[Entry]):
    """Maps names, in any case, to entries."""

    kind: str
    title: str
    argument: str

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}

    def _check_name(self, name: Any, override: bool) -> str:
        """Return a name to register, in lower case; refuse one that is not a name or is taken."""
        if not isinstance(name, str) or not name or ":" in name:
            expected = 'a string that is not empty; options follow a ":"'
            raise InvalidTypeError(argument="name", value=name, expected=expected)
        if name.lower() in self._entries and not override:
            raise DuplicateNameError(name=name.lower(), kind=self.kind, registry=self.title)
        return name.lower()

    def entry(self, name: str) -> Entry:
        """Return the entry of a name.

        Raises:
            InvalidTypeError: when the name is not a string.
            UnknownNameError: when it is not registered.
        """
        if not isinstance(name, str):
            raise InvalidTypeError(argument=self.argument, value=name, expected="a name")
        return self._entries[name.lower()] if name in self else self._find_unregistered(name)

    __getitem__ = entry

    @abstractmethod
    def _find_unregistered(self, name: str) -> Entry:
        """Return the entry of a name that is not in the table; raise an `UnknownNameError` without one."""

    def remove(self, name: str) -> None:
        """Remove a name. Raises as `entry` does."""
        self.entry(name)
        self._entries.pop(name.lower(), None)

    def describe(self, name: str) -> str:
        """Return the description of a name. Raises as `entry` does."""
        description: str = self.entry(name).description
        return description

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.lower() in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))

    def __repr__(self) -> str:
        return f"{self.title}({', '.join(self)})"


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


def is_lightnings_own(kind: type) -> bool:
    """Return whether a class is defined in the packages of Lightning, which need not be installed."""
    return kind.__module__.partition(".")[0] in ("lightning", "pytorch_lightning")


def lightning_base(kind: type, name: str) -> Any:
    """Return the class of that name among the bases of `kind` that Lightning defines; None without one."""
    return next((base for base in kind.__mro__ if base.__name__ == name and is_lightnings_own(base)), None)


def check_name(argument: str, value: object, names: tuple[str, ...], expected: str = "") -> str:
    """Return the user's value of an argument in lower case; raise if it is not one of the names."""
    if not isinstance(value, str):
        expected = expected or f"one of {', '.join(map(repr, names))}"
        raise InvalidTypeError(argument=argument, value=value, expected=expected)
    if value.lower() not in names:
        raise UnknownNameError(kind=argument, name=value, known=names)
    return value.lower()


_WORDS = {"true": True, "false": False, "none": None}


def split_options(argument: str, given: object) -> tuple[str, dict[str, Any]]:
    """Return a name and its options; their values are numbers, True, False, None or strings."""
    if not isinstance(given, str):
        raise InvalidTypeError(argument=argument, value=given, expected="a name")
    name, _, rest = given.partition(":")
    options: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in rest.split(","))):
        option, _, value = (part.strip() for part in item.partition("="))
        if not option or not value:
            raise InvalidTypeError(
                argument=argument, value=given, expected='a name with options: "name:option=value"'
            )
        options[option] = _value(value)
    return name.strip(), options


def _value(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
