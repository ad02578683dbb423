"""Names of a package that are imported on first use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

from rankwise.garbage_collection import CollectionsPaused, move_to_oldest_generation


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
