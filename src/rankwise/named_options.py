"""`NameTable`, the base of the registries; names with options, as in `"name:option=value"`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from rankwise.checks import check_is_a
from rankwise.errors import DuplicateNameError, InvalidTypeError

__all__ = ["NameTable", "split_options"]

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
        check_is_a(self.argument, name, str, "a name")
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


_WORDS = {"true": True, "false": False, "none": None}


def split_options(argument: str, given: Any) -> tuple[str, dict[str, Any]]:
    """Return a name and its options; their values are numbers, True, False, None or strings."""
    check_is_a(argument, given, str, "a name")
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
