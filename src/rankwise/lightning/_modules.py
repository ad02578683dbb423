"""Make modules importable under the names that Lightning has for them, and refuse missing names."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from rankwise.compatibility.names import MISSING_MODULES, MISSING_NAMES, SUBMODULES
from rankwise.errors import MissingNameError

_ELSE = "docs/from_lightning.md lists the names that exist."


def missing_name(module: str, name: str, remedy: str = _ELSE) -> Exception:
    """Return the error for a name that a module here lacks.

    Special names and private ones, and what pytest looks for, are an ordinary `AttributeError`, so that
    `hasattr` and the import system work. Other errors than that reach the user from `from module import name`
    with their text.
    """
    if name.startswith(("_", "pytest")):
        return AttributeError(f"module {module!r} has no attribute {name!r}")
    return MissingNameError(module=module, name=name, remedy=MISSING_NAMES.get(name, remedy))


def complete_module(module: str) -> Callable[[str], Any]:
    """Add the submodules that Lightning has; return a `__getattr__` that refuses missing names."""
    add_submodules(module, *SUBMODULES[module.rpartition(".")[2]].split())

    def refuse(name: str) -> Any:
        raise missing_name(module, name)

    return refuse


def add_submodules(module: str, *names: str) -> None:
    """Make a module importable under the names of the submodules that it has in Lightning."""
    this = sys.modules[module]
    for name in names:
        sys.modules[f"{module}.{name}"] = this
        setattr(this, name, this)


def copy_submodules(module: str, *parts: ModuleType) -> None:
    """Also register modules, with their submodules, as submodules of another module."""
    for part in parts:
        own = part.__name__
        here = f"{module}.{own.rpartition('.')[2]}"
        names = [name for name in sys.modules if name == own or name.startswith(f"{own}.")]
        for name in names:
            sys.modules[here + name.removeprefix(own)] = sys.modules[name]


def add_missing_modules(package: str) -> None:
    """Make Lightning's modules that do not exist here importable; all of their names are refused."""
    for prefix in (package, f"{package}.pytorch"):
        for name, remedy in MISSING_MODULES.items():
            sys.modules[f"{prefix}.{name}"] = _MissingModule(f"{prefix}.{name}", remedy)


class _MissingModule(ModuleType):
    """A module of Lightning that does not exist here; its docstring says what to do instead."""

    def __getattr__(self, name: str) -> Any:
        raise missing_name(self.__name__, name, self.__doc__ or "")
