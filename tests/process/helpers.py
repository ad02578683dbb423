"""What the process tests share: strategies on two CPU processes, and how scripts find the tests' modules."""

import itertools
import json
import os
import sys
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist

from rankwise.strategies import DDPStrategy
from tests.helpers.processes import MARKER
from tests.helpers.scripts import ScriptResult, ScriptRunner

REPOSITORY = Path(__file__).parents[2]
METHODS = ("spawn", "fork", "forkserver")
"""The start methods that start their processes from the calling one, whatever that is."""
RENDEZVOUS = ("private", "tcp")
WORLD = 2
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
PYTEST = """
    import sys
    import pytest

    if __name__ == "__main__":  # which ranks import that a command has started
        options = ["-p", "no:cacheprovider", "-p", "rankwise.testing.plugin", "-p", "no:xdist"]
        options += ["-c", "/dev/null", "--basetemp", "own"]
        sys.exit(pytest.main([*options, "--rootdir", ".", "-rA", *sys.argv[1:]]))
"""
"""A program that runs pytest, with rankwise's plug-in alone, on the files of its command line."""


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


def in_scripts() -> dict[str, str | None]:
    """Return the same for a script that imports pytest, and is not run by it."""
    return with_tests({"PYTEST_CURRENT_TEST": None})


def count_calls(patch: pytest.MonkeyPatch, calls: list[str], *names: str) -> None:
    """Add the name of each call of these functions of torch.distributed to a list, also in forked ranks."""

    def counting(name: str, plain: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return plain(*args, **kwargs)

        return call

    for name in names:
        patch.setattr(dist, name, counting(name, getattr(dist, name)))


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


def printed_by_ranks(folder: Path, source: str, launcher: Iterable[str] = ()) -> list[Any]:
    """Run a script as two ranks, by itself or with a launcher's arguments; read what each prints as JSON."""
    with module_runner(folder) as runner:
        command = [sys.executable, *launcher, str(runner.write(source))]
        result = runner.command(command, env=with_tests(), timeout=120, siblings=2)
    return list(map(json.loads, result.check_returncode().stdout.splitlines()))


class Calls:
    """Makes a call when it is unpickled."""

    def __init__(self, *call: object) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call


@dataclass(frozen=True)
class Cases:
    """Runs functions of a module, each as a program: `python MODULE NAME ARGUMENT...`."""

    module: ModuleType
    run_script: ScriptRunner

    def __call__(
        self, *command: str, env: Mapping[str, str] | None = None, siblings: int = 0
    ) -> ScriptResult:
        """Run a function, given by its name and arguments, with variables added."""
        return self.on_each(*command, variables=[env or {}], siblings=siblings)[0]

    def on_each(
        self, *command: str, variables: Sequence[Mapping[str, str]], siblings: int = 0
    ) -> list[ScriptResult]:
        """Run a function in several processes at once, each with variables of its own."""
        path = Path(str(self.module.__file__))
        start = partial(self.run_script.start, path, *command, siblings=siblings)
        running = [start(env=with_tests(each)) for each in variables]
        return [each.finish() for each in running]


def cases_of(module: ModuleType) -> Any:
    """Make the fixture `cases` of a module."""

    @pytest.fixture
    def cases(run_script: ScriptRunner) -> Cases:
        return Cases(module, run_script)

    return cases
