"""What the process tests share: strategies on two CPU processes, and how scripts find the tests' modules."""

from __future__ import annotations

import itertools
import os
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rankwise.strategies import DDPStrategy
from tests.helpers.processes import MARKER
from tests.helpers.scripts import ScriptRunner

REPOSITORY = Path(__file__).parents[2]
METHODS = ("spawn", "fork", "forkserver")
"""The start methods that start their processes from the calling one, whatever that is."""
RENDEZVOUS = ("private", "tcp")
WORLD = 2


def ddp(start_method: str, rendezvous: str = "private", **arguments: Any) -> DDPStrategy:
    """Return a strategy on two CPU processes."""
    arguments = {"accelerator": "cpu", "devices": WORLD, **arguments}
    return DDPStrategy(start_method=start_method, rendezvous=rendezvous, **arguments)


def combinations(*parameters: Iterable[str], quick: Collection[tuple[str, ...]]) -> list[Any]:
    """Return every combination of values, for `parametrize`; those not in `quick` are marked `soak`."""
    return [
        pytest.param(*values, marks=() if values in quick else pytest.mark.soak, id="-".join(values))
        for values in itertools.product(*parameters)
    ]


def with_tests(more: Mapping[str, str | None] | None = None) -> dict[str, str | None]:
    """Return `env=` for a script that imports from `tests`."""
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path, **(more or {})}


@contextmanager
def module_runner(folder: Path) -> Iterator[ScriptRunner]:
    """Give a fixture that serves many tests a runner, whose processes nobody takes for another's."""
    runner = ScriptRunner(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARKER, f"{os.getpid()}-{uuid.uuid4().hex}")
        try:
            yield runner
        finally:
            runner.kill_all()
