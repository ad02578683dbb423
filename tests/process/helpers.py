"""What the process tests share: strategies on two CPU processes, and how scripts find the tests' modules."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rankwise.strategies import DDPStrategy

REPOSITORY = Path(__file__).parents[2]
METHODS = ("spawn", "fork", "forkserver")
"""The start methods that start their processes from the calling one, whatever that is."""
RENDEZVOUS = ("private", "tcp")
WORLD = 2


def ddp(start_method: str, rendezvous: str = "private", **arguments: Any) -> DDPStrategy:
    """Return a strategy on two CPU processes."""
    arguments = {"accelerator": "cpu", "devices": WORLD, **arguments}
    return DDPStrategy(start_method=start_method, rendezvous=rendezvous, **arguments)


def with_tests(more: Mapping[str, str | None] | None = None) -> dict[str, str | None]:
    """Return `env=` for a script that imports from `tests`."""
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path, **(more or {})}
