"""Imports rankwise once, for programs that find it when they import it: that takes a quarter of a second."""

from __future__ import annotations

import builtins
import importlib
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_KEPT = ("trainer.trainer", "fabric.fabric", *(f"launchers.{name}" for name in ("multiprocess", "script")))
"""These, and all that they import."""
_RUN_AGAIN = ("rankwise.start",)
"""It records the working directory; packages that import names on first use run again, too."""


class KeptModules:
    """Finds modules that were imported before, and puts each into `sys.modules` as an import does.

    With it come the modules that it imports itself, and what it records about the program is recorded anew.
    """

    def __init__(self) -> None:
        self._imports: dict[str, list[tuple[str, Sequence[str]]]] = defaultdict(list)
        from lightning_utilities.core.rank_zero import rank_zero_only

        had_rank, plain = hasattr(rank_zero_only, "rank"), builtins.__import__

        def recording(
            name: str, scope: Any = None, names: Any = None, fromlist: Any = (), level: int = 0
        ) -> ModuleType:
            if scope is not None and name.startswith("rankwise"):
                self._imports[scope["__name__"]].append((name, fromlist or ()))
            return plain(name, scope, names, fromlist, level)

        builtins.__import__ = recording  # type: ignore[assignment]  # with names of its own
        for name in _KEPT:
            importlib.import_module(f"rankwise.{name}")
        builtins.__import__ = plain
        if not had_rank:
            del rank_zero_only.rank  # type: ignore[attr-defined]  # rankwise.ranks has set it
        found = [name for name in sys.modules if name.partition(".")[0] == "rankwise"]
        self._modules = {name: sys.modules.pop(name) for name in found}
        for module in self._modules.values():
            for name, value in list(vars(module).items()):
                is_submodule = isinstance(value, ModuleType) and value.__name__ == f"{module.__name__}.{name}"
                if is_submodule or (_is_lazy(module) and not name.startswith("__")):
                    delattr(module, name)

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Find a module that has not been loaded from here yet."""
        module = self._modules.get(name)
        if module is None or module.__spec__ is None:
            return None
        module.__spec__.loader = self  # type: ignore[assignment]  # as one
        return module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Give the module."""
        return self._modules.pop(spec.name)

    def exec_module(self, module: Any) -> None:
        """Let the module import and record what it does when it is loaded."""
        name, module.__spec__.loader = module.__name__, module.__loader__
        if name in _RUN_AGAIN or _is_lazy(module):
            module.__loader__.exec_module(module)
        for imported, fromlist in self._imports[name]:
            importlib.__import__(imported, fromlist=fromlist)
        if name == "rankwise.seed":
            module.AT_IMPORT = module._begin()
        elif name == "rankwise.ranks" and getattr(module.rank_zero_only, "rank", None) is None:
            module.rank_zero_only.rank = module._rank_from(os.environ)


def _is_lazy(module: ModuleType) -> bool:
    return "__getattr__" in vars(module)
