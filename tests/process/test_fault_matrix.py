"""Each cell of the table of failures: how long it takes, what the caller gets, what is left."""

import contextlib
import json
import os
import random
import signal
from collections.abc import Callable, Iterator

import pytest

from tests.process.fault_runner import FaultRunner, late, wrong
from tests.process.fault_table import ALL, CELLS, LEFT_OUT, STRATEGIES, UNDISTURBED, WHEN, Cell

QUICK = {
    Cell("rank 0", "raises", "while saving", "ddp_fork"),
    Cell("rank 1", "SIGKILL", "while saving", "ddp_fork"),
    Cell("rank 0", "SIGSTOP", "mid-step", "ddp_fork"),
    Cell("main", "raises", "mid-step", "ddp_fork"),
    Cell("main", "SIGSTOP", "mid-step", "ddp_fork"),
}
"""What is run by default; the others with `-m soak`."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultRunner]:
    with contextlib.closing(FaultRunner(tmp_path_factory.mktemp("faults"))) as runner:
        yield runner


@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, id=str(cell), marks=() if cell in QUICK else pytest.mark.soak) for cell in CELLS],
)
def test_fault(cell: Cell, run: FaultRunner, record_property: Callable[[str, object], None]) -> None:
    """In time every process has ended, the caller has the right exception, and nothing is left."""
    outcome = run(cell, cell.start_method)
    record_property("cell", json.dumps(vars(cell)))  # for fault_report.py
    record_property("gone_after_s", outcome.gone_after_s)
    assert wrong(cell, outcome) + late(cell, outcome) == [], outcome


def test_the_table_is_whole() -> None:
    """Each cell is run or has a reason why it is impossible."""
    assert set(ALL) == set(CELLS) | set(LEFT_OUT)
    assert len(ALL) == 3 * 7 * 4 * 4
    assert set(CELLS) >= QUICK
    assert all(LEFT_OUT.values())


def test_what_is_left_is_found(run: FaultRunner) -> None:
    """A job leaves one of each thing behind, and each is found."""
    outcome = run(None, "fork", leaves_things=True, outlives_s=0.3)
    assert (outcome.exit_code, outcome.exception) == (0, UNDISTURBED), outcome
    found = "\n".join(outcome.left)
    for thing in ("tmp/left", "here/left", "saved/left", "does not load"):
        assert thing in found, outcome
    assert found.count("in the caller: pid ") == 3, outcome  # two processes, one of which listens
    assert found.count("in the caller: this process still listens on 127.0.0.1 port ") == 1, outcome
    assert len([line for line in outcome.left if line.endswith("sleep 60") and "caller" not in line]) == 2


@pytest.mark.soak
def test_a_broken_interpreter_is_replaced(run: FaultRunner) -> None:
    """Where the process that starts the jobs has ended, one job fails, and the next has a new process."""
    run(None, "fork")
    assert run.interpreter is not None
    os.kill(run.interpreter.pid, signal.SIGKILL)
    with pytest.raises((AssertionError, BrokenPipeError)):
        run(None, "fork")
    assert run(None, "fork").exit_code == 0


SEED = 20
_MOST_DELAY_S = 0.2
_STEPS = 3
# A rank that starts from nothing imports torch first: in the short sample nobody does.
_QUICK = ("ddp_fork",)


# 200 runs, in parts that several workers can share.
_IN_PARTS = [
    pytest.param(25, STRATEGIES, part, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])
    for part in range(8)
]


@pytest.mark.parametrize(("runs", "strategies", "part"), [(1, _QUICK, 0), *_IN_PARTS])
def test_random_faults(runs: int, strategies: tuple[str, ...], part: int, run: FaultRunner) -> None:
    """A fault at a random moment has the result of the table; nothing is left, nor by a job without one."""
    seed = f"{os.environ.get('RANKWISE_SOAK_SEED', SEED)}, part {part}"
    print(f"seed {seed}")
    chance = random.Random(seed)
    cells = [cell for cell in CELLS if cell.strategy in strategies and (runs > 1 or not cell.hangs)]
    found: dict[str, list[str]] = {}
    for number in range(runs):
        cell, delay_s, step = chance.choice(cells), chance.uniform(0, _MOST_DELAY_S), chance.randrange(_STEPS)
        step = step if cell.when in WHEN[1:3] else 1
        outcome = run(cell, cell.start_method, delay_s=delay_s, step=step)
        print(f"{number}: {cell}, {delay_s:.2f} s later, step {step}: {outcome.gone_after_s:.2f} s")
        if problem := wrong(cell, outcome):
            found[f"{number}: {cell}"] = [*problem, outcome.output]
        outcome = run(None, cell.start_method)
        if (outcome.exit_code, outcome.exception, outcome.left) != (0, UNDISTURBED, ()):
            found[f"{number}: {cell.start_method} without a fault"] = [str(outcome)]
    assert found == {}
