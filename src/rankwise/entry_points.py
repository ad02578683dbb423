"""Entry points: what installed packages add to rankwise's tables of names."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from rankwise.errors import ConfigurationError, RankwiseError, text_of

T = TypeVar("T")

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


def load(point: EntryPoint, convert: Callable[[Any], T]) -> T:
    """Import the object of an entry point, and return what `convert` makes of it.

    Raises:
        ConfigurationError: when either fails; it names the entry point and its package.
    """
    try:
        return convert(point.load())
    except (Exception, SystemExit) as error:  # other people's code, which may check a licence and exit
        reason = f"{type(error).__name__}: {text_of(error)}"
        package = package_of(point)
        raise ConfigurationError(
            message=f"The entry point {point.name!r} of package {package} cannot be used: "
            + (error.summary() if isinstance(error, RankwiseError) else f"{reason.rstrip('.')}."),
            facts=f"[{point.group}] {point.name} = {point.value}.",
            remedy=f"correct, update or uninstall the package: pip uninstall {package.partition(' ')[0]}",
        ) from error
