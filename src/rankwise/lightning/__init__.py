"""Lightning's names for what rankwise has: `import rankwise.lightning as pl`, or `as L`.

A script written for Lightning changes its imports only: `lightning.pytorch`, `pytorch_lightning` and
`lightning` become `rankwise.lightning`, in the names of submodules too. A Lightning name that does not
exist here raises `MissingNameError`, which says what to write instead.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rankwise.compatibility.names import SUBMODULES as _MODULES
from rankwise.lightning._modules import add_missing_modules, add_submodules, missing_name

if TYPE_CHECKING:
    from rankwise.callbacks.base import Callback
    from rankwise.lightning.core import LightningDataModule, LightningModule
    from rankwise.lightning.trainer import Trainer
    from rankwise.lightning.utilities import seed_everything

_HOMES = {
    "Callback": "rankwise.lightning.callbacks",
    "Fabric": "rankwise.lightning.fabric",
    "LightningDataModule": "rankwise.lightning.core",
    "LightningModule": "rankwise.lightning.core",
    "Trainer": "rankwise.lightning.trainer",
    "seed_everything": "rankwise.lightning.utilities",
}

__all__ = ["Callback", "Fabric", "LightningDataModule", "LightningModule", "Trainer", "seed_everything"]

add_submodules(__name__, "pytorch")
add_missing_modules(__name__)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name == "__version__":
        return sys.modules["rankwise"].__version__
    if name not in _HOMES:
        raise missing_name(__name__, name)
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__, *_MODULES])
