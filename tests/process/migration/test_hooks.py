"""The Trainer calls the hooks that Lightning's calls, in its order, with its arguments, or refuses them.

What Lightning calls is recorded; see `record.py`.
"""

import re
import sys
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rankwise import DataModule
from rankwise.callbacks import Callback
from rankwise.errors import ConfigurationError
from tests.helpers.needs import need_installed
from tests.helpers.scripts import ScriptRunner
from tests.process.migration import record, recording, records
from tests.process.migration.recording import OURS, OWNERS
from tests.unit.trainer.helpers import Line, loader, trainer

pytestmark = pytest.mark.filterwarnings("ignore")  # what both libraries warn of

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "migrating" / "differences_trainer.md"
LIBRARIES = ("rankwise", "lightning")
RECORD = records.read("hooks")
LIGHTNINGS = {owner: set(RECORD["hooks"][owner]) for owner in OWNERS}
SHARED = recording.shared_with(LIGHTNINGS)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
REFUSED = [(owner, name) for owner in OWNERS for name in sorted(LIGHTNINGS[owner] - OURS[owner])]


class Difference(NamedTuple):
    """A difference from Lightning, which docs/migrating/differences_trainer.md explains.

    Attributes:
        row: how the line in the page begins.
        program: in which it is.
        adapt: makes Lightning's calls those that are expected here; it takes and returns lines.
    """

    row: str
    program: str
    adapt: Callable[[str], str]


def _replaced(pattern: str, by: str | Callable[[re.Match[str]], str]) -> Callable[[str], str]:
    return lambda lines: re.sub(pattern, by, lines)


def _doubled(found: re.Match[str]) -> str:
    return found[1] + re.sub(r"(?<=tensor\()[\d.]+", lambda number: f"{2 * float(number[0]):.4g}", found[2])


_restored = _replaced(r"0/0 (.*on_fit_start)", r"2/4 \1")
DIFFERENCES = [
    Difference(
        "`on_fit_start` in a run that continues from a checkpoint",
        "that_continues",
        lambda lines: "--- continue".join(
            [(parts := lines.split("--- continue"))[0], *(_restored(part) for part in parts[1:])]
        ),
    ),
    Difference(
        "`accumulate_grad_batches`: the last window of an epoch",
        "with_a_shorter_window",
        _replaced(r"(optimizer_zero_grad\(\d, 2, SGD\)\n)((?:.*backward\(.*\n){3})", _doubled),
    ),
    Difference(
        "`on_exception` is the last hook after an exception",
        "with_an_exception",
        _replaced(
            r"(.* )(datamodule)\.on_exception.*\n",
            lambda found: (
                f"{found[0]}"
                f"{found[1]}datamodule.teardown('fit')\n"
                f"{found[1]}callback.teardown(trainer, module, 'fit')\n"
                f"{found[1]}module.teardown('fit')\n"
            ),
        ),
    ),
]


def _expected(program: str, lightnings: list[str]) -> list[str]:
    """Return Lightning's lines, adapted to the differences of a program."""
    expected = "\n".join([*lightnings, ""])
    for difference in DIFFERENCES:
        if difference.program == program:
            before, expected = expected, difference.adapt(expected)
            assert before != expected, f"no longer a difference: {difference.row}"
    return expected.splitlines()


def _split(lines: list[str]) -> tuple[list[str], list[list[float]]]:
    """Return lines without their numbers, and the numbers, which other CPUs may round differently."""
    number = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]\d+)?")
    return [number.sub("#", line) for line in lines], [[*map(float, number.findall(line))] for line in lines]


def _assert_as_recorded(recorded: list[str], found: list[str]) -> None:
    (texts, numbers), (found_texts, found_numbers) = _split(recorded), _split(found)
    assert found_texts == texts
    assert records.differences(numbers, found_numbers, tolerance=1e-3) == []  # of four digits


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, list[str]]:
    """Run all programs here; return what each has called."""
    folder = tmp_path_factory.mktemp("programs")
    return {name: recording.record(name, "rankwise", folder / name, SHARED) for name in recording.PROGRAMS}


@pytest.mark.parametrize("program", recording.PROGRAMS)
def test_lightnings_calls(calls: Mapping[str, list[str]], program: str) -> None:
    """All hooks of all three classes are called as Lightning calls them, but for what the page explains."""
    _assert_as_recorded(_expected(program, RECORD["calls"][program]), calls[program])


@pytest.fixture(scope="module")
def lightnings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what a record holds; for a module, as importing Lightning sets a variable that then stays."""
    need_installed("lightning")
    folder = tmp_path_factory.mktemp("lightning")
    return {"hooks": record.hooks_of_lightning(), "calls": record.calls_of_lightning(folder, SHARED)}


@pytest.mark.soak
def test_lightning_calls_what_is_recorded(calls: Mapping[str, list[str]], lightnings: dict[str, Any]) -> None:
    """Lightning has these hooks and calls them again so, with the numbers that are passed here."""
    assert lightnings["hooks"] == RECORD["hooks"]
    for program, lines in lightnings["calls"].items():
        _assert_as_recorded(RECORD["calls"][program], lines)
        assert calls[program] == _expected(program, lines)


@pytest.mark.soak
def test_lightnings_calls_on_two_ranks(run_script: ScriptRunner, tmp_path: Path) -> None:
    """So they are on each of two ranks."""
    need_installed("lightning")
    for library in LIBRARIES:
        command = [*TORCHRUN, "-m", recording.__name__, library, str(tmp_path / library)]
        result = run_script.command(command, cwd=ROOT, timeout=240)
        assert result.returncode == 0, result
    for program, rank in product(recording.PROGRAMS, range(2)):
        ours, lightnings = ((tmp_path / each / f"{program}.{rank}").read_text() for each in LIBRARIES)
        assert ours.splitlines() == _expected(program, lightnings.splitlines()), (program, rank)


@pytest.mark.quick
def test_every_hook_is_called(calls: Mapping[str, list[str]]) -> None:
    """The programs call each hook that both libraries have."""
    lines = [line for found in calls.values() for line in found]
    called = {match[1] for line in lines if (match := re.match(r"\S+ (\w+\.\w+)\(", line))}
    assert called == {f"{owner}.{name}" for owner in OWNERS for name in SHARED[owner]}


@pytest.mark.quick
def test_every_difference_is_explained() -> None:
    """The page has a line for each; other programs, which have all stages, have none."""
    equal = {"with_a_data_module", "with_loaders_of_the_module", "with_an_epoch_that_ends"}
    assert equal.isdisjoint(each.program for each in DIFFERENCES)
    page = PAGE.read_text()
    assert [each.row for each in DIFFERENCES if f"\n| {each.row}" not in page] == []


def test_hooks_of_both() -> None:
    """Each hook here is one of Lightning's, which has others."""
    assert [OURS[owner] - LIGHTNINGS[owner] for owner in OWNERS] == [set()] * 3
    assert ("module", "configure_sharded_model") in REFUSED


@pytest.mark.parametrize(("owner", "name"), REFUSED)
def test_other_hooks_are_refused(tmp_path: Path, owner: str, name: str) -> None:
    """A hook of Lightning's that is not called here is an error before the start, by name."""
    bases: dict[str, type[Any]] = {"module": Line, "callback": Callback, "datamodule": DataModule}
    defining = type("Defining", (bases[owner],), {name: lambda self, *args: None})()
    runs = trainer(tmp_path, callbacks=[defining] if owner == "callback" else [])
    with pytest.raises(ConfigurationError, match=rf"Defining\.{name}\(\) would never be called"):
        if owner == "datamodule":
            runs.fit(Line(), datamodule=defining)
        else:
            runs.fit(defining if owner == "module" else Line(), loader())
