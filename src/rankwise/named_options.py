"""`NameTable`, the base of the registries; names with options, as in `"name:option=value"`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint
from typing import Any, Generic, TypeVar

from rankwise.checks import check_is_a
from rankwise.entry_points import installed, load, package_of
from rankwise.errors import DuplicateNameError, InvalidTypeError, RankwiseError, UnknownNameError
from rankwise.ranks import warn

__all__ = ["NameTable", "split_options"]

Entry = TypeVar("Entry", bound=Any)


class NameTable(ABC, Generic[Entry]):
    """Maps names, in any case, to entries: registered ones, and those of installed packages.

    The entry points of installed packages are loaded when a name is not registered, or names are listed.

    Attributes:
        kind: what a name stands for.
        title: the name of this table.
        argument: the argument that takes a name.
        group: the group of entry points, without `rankwise.` before it.
    """

    kind: str
    title: str
    argument: str
    group: str

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._tried: set[EntryPoint] = set()
        self._broken: dict[str, RankwiseError] = {}

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
            UnknownNameError: when it is neither registered nor of an installed package.
            ConfigurationError: when it is of an installed package, and cannot be loaded.
        """
        check_is_a(self.argument, name, str, "a name")
        key = name.lower()
        if not self._has(key):
            raise self._broken.get(key) or self._unknown(name)
        return self._entries[key]

    __getitem__ = entry

    @abstractmethod
    def _entries_of(self, point: EntryPoint, loaded: Any) -> Mapping[str, Entry]:
        """Return the entries, by name, of an object that an installed package has an entry point for."""

    @abstractmethod
    def _unknown(self, name: str) -> UnknownNameError:
        """Return the error about a name without an entry."""

    def _has(self, key: str) -> bool:
        """Return whether there is an entry, after loading the entry points that may have it.

        An entry point with the name of an entry that exists is loaded too, for the warning.
        """
        if key not in self._entries:
            self._load_installed(key)
        for point in self._untried():
            if point.name.lower() == key:
                self._load(point, None)
        return key in self._entries

    def _load_installed(self, wanted: str | None = None) -> None:
        """Add the entries of installed packages, those of this name first and, if it exists, alone."""
        for point in sorted(self._untried(), key=lambda point: point.name.lower() != wanted):
            if wanted not in {*self._entries, *self._broken}:
                self._load(point, wanted)

    def _untried(self) -> list[EntryPoint]:
        return [point for point in installed(self.group) if point not in self._tried]

    def _load(self, point: EntryPoint, wanted: str | None) -> None:
        """Add the entries of one entry point; if that fails, warn unless the caller `wanted` it by name."""
        self._tried.add(point)
        before = set(self._entries)  # importing the package may register the same names
        try:
            entries = load(point, lambda loaded: self._entries_of(point, loaded))
        except RankwiseError as error:
            self._broken[point.name.lower()] = error
            if point.name.lower() != wanted:
                warn(error.summary())
            return
        for name, entry in entries.items():
            if self._entries.get(name.lower()) == entry:
                continue
            if name.lower() in before:
                warn(
                    f"The entry point {point.name!r} of package {package_of(point)} is not used for the name "
                    f"{name!r}, which is registered already.",
                )
            else:
                self._entries[name.lower()] = entry

    def remove(self, name: str) -> None:
        """Remove a name. Raises as `entry` does."""
        self.entry(name)
        self._entries.pop(name.lower(), None)

    def describe(self, name: str) -> str:
        """Return the description of a name. Raises as `entry` does."""
        description: str = self.entry(name).description
        return description

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._has(name.lower())

    def __len__(self) -> int:
        self._load_installed()
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        self._load_installed()
        return iter(sorted(self._entries))

    def __repr__(self) -> str:
        return f"{self.title}({', '.join(sorted(self._entries))})"


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
