"""Import names of a package on first use, and modules without garbage collections."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any, final


def lazy_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package that imports a name from the module in `homes`, and keeps it.

    A name whose module is called like it stands for that module.
    """

    def import_name(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        is_new = homes[name] not in sys.modules
        with CollectionsPaused():
            module = import_module(homes[name])
            if is_new:
                move_to_oldest_generation()  # it stays: no collection need look at it afterwards
        value = module if homes[name] == f"{package}.{name}" else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return import_name


def import_without_collections(name: str) -> ModuleType:
    """Import a module; without garbage collections meanwhile, which walk all of torch's objects."""
    with CollectionsPaused():
        return import_module(name)


@final
class CollectionsPaused:
    """A block without garbage collections, in any thread. Not by contextlib, which would take time to import.

    Where blocks of two threads overlap, collections may begin again at the end of the first.
    """

    def __enter__(self) -> None:
        self._is_enabled = gc.isenabled()
        gc.disable()

    def __exit__(self, *details: object) -> None:
        if self._is_enabled:
            gc.enable()


def move_to_oldest_generation() -> None:
    """Move all objects to the oldest generation, as collections move what is in use, but without a search."""
    if gc.get_freeze_count() == 0:  # a program may have frozen its objects itself
        gc.freeze()
        gc.unfreeze()
