"""`NameTable`, the base of the registries; installed packages' entry points; parsing a name with options."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from rankwise.checks import check_is_a, check_value
from rankwise.errors import (
    ConfigurationError,
    DuplicateNameError,
    InvalidTypeError,
    RankwiseError,
    UnknownNameError,
    text_of,
)
from rankwise.ranks import warn

Entry = TypeVar("Entry", bound=Any)

_WORDS = {"true": True, "false": False, "none": None}
KINDS = ("strategies", "environments", "comm_hooks", "loggers")
"""The groups of entry points, without `rankwise.` before them."""


def installed(kind: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of the group `rankwise.<kind>`; they are read once for each `sys.path`."""
    return _read(tuple(sys.path))[kind]


@lru_cache(maxsize=8)
def _read(path: tuple[str, ...]) -> dict[str, tuple[EntryPoint, ...]]:
    points = entry_points()
    return {kind: tuple(points.select(group=f"rankwise.{kind}")) for kind in KINDS}


def package_of(point: EntryPoint) -> str:
    """Return the name and version of an entry point's package."""
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else "of an unknown name"


class NameTable(ABC, Generic[Entry]):
    """Maps names, in any case, to entries: registered ones, and those of installed packages.

    The entry points of installed packages are loaded when a name is not registered, or names are listed.
    """

    kind: str  # what a name stands for
    title: str  # the name of this table
    argument: str  # the argument that takes a name
    group: str  # of entry points, without `rankwise.` before it

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._tried: set[EntryPoint] = set()
        self._broken: dict[str, RankwiseError] = {}

    def _check_name(self, name: Any, override: bool) -> str:
        """Return a name to register, in lower case; refuse one that is not a name or is taken."""
        is_valid = isinstance(name, str) and name and ":" not in name
        expected = 'a string that is not empty; options follow a ":"'
        check_value("name", name, is_valid, expected, error=InvalidTypeError)
        key: str = name.lower()
        if key in self._entries and not override:
            raise DuplicateNameError(name=key, kind=self.kind, registry=self.title)
        return key

    def entry(self, name: str) -> Entry:
        """Return the entry of a name; raise if it is unknown, or of a package that cannot be loaded."""
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
        """Return whether there is an entry; entry points of that name are loaded first, if only to warn."""
        self._load_installed(key)
        return key in self._entries

    def _load_installed(self, wanted: str | None = None) -> None:
        """Add the entries of installed packages, those of this name first; others only if it is not there."""
        for point in sorted(installed(self.group), key=lambda point: point.name.lower() != wanted):
            is_known = wanted in {*self._entries, *self._broken}
            if point not in self._tried and (point.name.lower() == wanted or not is_known):
                self._load(point, None if is_known else wanted)

    def _load(self, point: EntryPoint, wanted: str | None) -> None:
        """Add the entries of one entry point; if that fails, warn unless the caller `wanted` it by name."""
        self._tried.add(point)
        before = set(self._entries)  # importing the package may register the same names
        try:
            entries = self._loaded(point)
        except ConfigurationError as error:
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

    def _loaded(self, point: EntryPoint) -> Mapping[str, Entry]:
        """Import the object of an entry point, and return its entries; an error names its package."""
        try:
            return self._entries_of(point, point.load())
        except (Exception, SystemExit) as error:  # other people's code, which may check a licence and exit
            reason = f"{type(error).__name__}: {text_of(error)}"
            package = package_of(point)
            raise ConfigurationError(
                message=f"The entry point {point.name!r} of package {package} cannot be used: "
                + (error.summary() if isinstance(error, RankwiseError) else f"{reason.rstrip('.')}."),
                facts=f"[{point.group}] {point.name} = {point.value}.",
                remedy=f"correct, update or uninstall the package: pip uninstall {package.partition(' ')[0]}",
            ) from error

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


def split_options(argument: str, given: Any) -> tuple[str, dict[str, Any]]:
    """Return a name and its options; their values are numbers, True, False, None or strings."""
    check_is_a(argument, given, str, "a name")
    name, _, rest = given.partition(":")
    options: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in rest.split(","))):
        option, _, value = (part.strip() for part in item.partition("="))
        expected = 'a name with options: "name:option=value"'
        check_value(argument, given, option and value, expected, error=InvalidTypeError)
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
