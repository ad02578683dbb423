"""Contenders: raw torch, rankwise and its peers, which all do the same job."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.job import Job
from benchmarks.results import is_installed

_SCRIPT, _FORK, _SPAWN, _HERE = "ddp", "ddp_fork", "ddp_spawn", "here"


@dataclass(frozen=True)
class Contender:
    """A library that trains.

    Attributes:
        module: the module here that has its `train(job)`.
        package: the package that it needs.
        starts: the values of `Job.start` that it can do.
        has_extras: whether it has a progress bar, a logger of CSV files and checkpoints of its own.
        returns_state: whether training in other processes leaves the caller's model trained.
    """

    module: str
    package: str
    starts: tuple[str, ...]
    has_extras: bool = False
    returns_state: bool = False

    @property
    def train(self) -> Callable[[Job], None]:
        """The function that does a job; its module is imported here."""
        function: Callable[[Job], None] = importlib.import_module(
            f"benchmarks.contenders.{self.module}"
        ).train
        return function


_ALL = (_HERE, _SCRIPT, _FORK, _SPAWN)
CONTENDERS = {
    "raw torch": Contender("raw", "torch", _ALL, has_extras=True, returns_state=True),
    "rankwise": Contender("ours", "rankwise", _ALL, has_extras=True, returns_state=True),
    "Lightning Trainer": Contender("trainer", "lightning", _ALL, has_extras=True, returns_state=True),
    "Lightning Fabric": Contender("fabric", "lightning", _ALL),
    "Accelerate": Contender("accelerator", "accelerate", (_HERE, _FORK)),
    "Ignite": Contender("engine", "ignite", (_HERE, _FORK, _SPAWN)),
    "torchrun": Contender("torchrun", "torch", (_SCRIPT,)),
    "torchrunx": Contender("torchrunx_", "torchrunx", (_SCRIPT,)),
}
"""By name, the one that others are compared with first."""


def taking_part(start: str, *, has_extras: bool = False, returns_state: bool = False) -> list[str]:
    """Return the contenders that are installed, and can do such a job."""
    return [
        name
        for name, each in CONTENDERS.items()
        if start in each.starts
        and each.has_extras >= has_extras
        and each.returns_state >= returns_state
        and is_installed(each.package)
    ]


def absent() -> list[str]:
    """Return the contenders that are not installed."""
    return [name for name, each in CONTENDERS.items() if not is_installed(each.package)]
