"""Compares the ranks at the end of each fit, and imports some modules faster, in every process of the tests.

Python imports a module of this name at its start; tests/conftest.py puts this folder into PYTHONPATH.
"""

from __future__ import annotations

import gc
import os
import sys

TYPE_CHECKING = False  # the module typing takes longer to import than all of this
if TYPE_CHECKING:
    from typing import Any

VARIABLE = "RANKWISE_TEST_COMPARES_RANKS"
"""While it is set, each fit ends with a comparison."""
_LOOP = "rankwise.trainer.loops.fit"


class _Finder:
    """Finds torch, torchmetrics and the module of the training loop as other finders do."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in (*_FASTER, _LOOP):
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec: Any = next(filter(None, others))
        spec.loader = _Loader(spec.loader)
        return spec


class _Loader:
    """Loads one of these modules; the plain loader may be one for many modules, as pytest's is."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain

    def exec_module(self, module: Any) -> None:
        if load := _FASTER.get(module.__name__):
            module.__loader__ = module.__spec__.loader = self._plain
            load(self._plain, module)
        else:
            self._plain.exec_module(module)
            _compare_after_fits(module.FitLoop)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)


def _load_without_collections(loader: Any, module: Any) -> None:
    """Import without garbage collections, which take a quarter of the time, and exempt what it has made."""
    was_enabled = gc.isenabled()
    gc.disable()
    loader.exec_module(module)
    if was_enabled:
        gc.freeze()
        gc.enable()


def _load_without_scipy(loader: Any, module: Any) -> None:
    """Import it with an empty module in place of scipy.signal, to which it would only add a name."""
    empty = type(sys)("scipy.signal")
    vars(empty)["hamming"] = None
    is_ours = sys.modules.setdefault("scipy.signal", empty) is empty
    try:
        loader.exec_module(module)
    finally:
        if is_ours:
            del sys.modules["scipy.signal"]


_FASTER = {"torch": _load_without_collections, "torchmetrics": _load_without_scipy}


def _compare_after_fits(loop_class: Any) -> None:
    """Make every rank's loop end with a comparison of parameters, buffers and optimizer states."""
    plain = loop_class.run

    def run(loop: Any) -> None:
        plain(loop)
        if os.environ.get(VARIABLE):
            from rankwise.gradient_sync.parameters import shares_buffers
            from rankwise.trainer.consistency import check_values

            is_shared = shares_buffers(loop._context.wrapped)
            check_values(loop._context, with_buffers=is_shared, with_states=True)

    loop_class.run = run


if not any(type(finder).__name__ == _Finder.__name__ for finder in sys.meta_path):
    sys.meta_path.insert(0, _Finder())
