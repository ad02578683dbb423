"""Scripts for Lightning run here with their imports changed only, and give Lightning's weights and values.

What Lightning gives is recorded; see `record.py`.
"""

import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.needs import need_installed
from tests.helpers.scripts import RunningScript, ScriptRunner
from tests.process.helpers import module_runner
from tests.process.migration import record, records
from tests.process.migration.record import (
    NAMES,
    ON_TWO,
    OWN_STEPS,
    RECORDED_ON_TWO,
    SCRIPTS,
    WRONG_IN_LIGHTNING,
    Result,
    result,
)
from tests.process.migration.records import differences

pytestmark = pytest.mark.timeout(900)  # a program with all scripts, in the fixture of the first test

PAGE = Path(__file__).parents[3] / "docs" / "from_lightning.md"
SAME_MACHINE = 1e-6
"""Tolerance where Lightning has run on the same machine."""
SAME_MACHINE_ON_TWO = 1e-5  # sums are added in another order, which some optimizers enlarge

WITHOUT_LOGGER = {"distillation", "fabric_classifier", "fabric_dcgan", "fabric_language_model", "kfold"}
OF_RANK_ZERO = {"loss", "train_loss", "train/loss", "supervised", "consistency"}
"""What scripts log in training without `sync_dist`: on two processes, of one's half of each batch."""
NOT_SPAWNED = {"metric_objects": "a lambda in a callback, which cannot be pickled"}
"""Scripts that cannot be started by spawn, in Lightning either, and why."""


# ----------------------------------------------------------------------------------------- running scripts


def change_imports(source: Path, target: Path) -> None:
    """Copy the scripts, and change their imports with the command of docs/from_lightning.md."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    found = re.search(r"```bash\n(grep .*?)\n```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    subprocess.run(["bash", "-c", found[1]], cwd=target, check=True, timeout=60)


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return each library's folder of scripts."""
    changed = tmp_path_factory.mktemp("scripts") / "changed"
    change_imports(SCRIPTS, changed)
    return {"lightning": SCRIPTS, "rankwise": changed}


def names_of(request: pytest.FixtureRequest, *, but: str) -> list[str]:
    """Return the names of the scripts whose results tests use that were chosen, without those of one test."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    using = [item for item in items if "results" in item.fixturenames and item.path == request.path]
    return sorted({str(item.callspec.params["name"]) for item in using if item.originalname != but})


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, scripts: dict[str, Path]
) -> Path:
    """Run the scripts of the chosen tests on one process and two; return where `1/NAME.pt` and so on are."""
    need_installed("wandb")
    with module_runner(tmp_path_factory.mktemp("results")) as run:
        on_one = names_of(request, but="test_on_two_processes")
        on_two = names_of(request, but="test_on_one_process")
        started = record.start_all(run, scripts["rankwise"], "rankwise", on_one, on_two)
        ended = started.finish(timeout=600)
        assert ended.returncode == 0, ended
        return run.folder / "rankwise"


@pytest.fixture(scope="module")
def lightnings_results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run scripts in Lightning; return where `1/NAME.pt` and `2/NAME.pt` are."""
    need_installed("lightning", "wandb")
    with module_runner(tmp_path_factory.mktemp("results")) as run:
        record.run_in_lightning(run, NAMES)
        return run.folder / "lightning"


def start_alone(
    run: ScriptRunner, scripts: dict[str, Path], library: str, name: str, *arguments: str
) -> RunningScript:
    """Start a script as a program, in the runner's folder."""
    return run.start(scripts[library] / f"{name}.py", *arguments, env=record.environment(run.folder, library))


def result_of(run: ScriptRunner, program: RunningScript, *, grace_s: float = 4) -> Result:
    """Wait for the end of a script that was started as a program; return what it has written."""
    ended = program.finish(timeout=300, leftover_grace_s=grace_s)
    assert ended.returncode == 0, ended
    return record.load(run.folder / "result.pt")


@pytest.fixture(scope="module")
def lightning(tmp_path_factory: pytest.TempPathFactory, scripts: dict[str, Path]) -> Callable[..., Result]:
    """Return a function that runs a script in Lightning, once with the same arguments."""

    @cache
    def run_in_lightning(name: str, *arguments: str) -> Result:
        with module_runner(tmp_path_factory.mktemp("lightning")) as run:
            started = start_alone(run, scripts, "lightning", name, *arguments)
            return result_of(run, started, grace_s=60)

    return run_in_lightning


# ---------------------------------------------------------------------------------------------------- tests


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
def test_on_one_process(results: Path, name: str) -> None:
    """A script ends with Lightning's weights, metrics and logged values."""
    expected, found = records.read(name)["1"], result(results / "1", name)
    assert bool(expected["history"]) == (name not in WITHOUT_LOGGER)
    assert differences(expected, records.summary(found)) == []


@pytest.mark.parametrize("name", NAMES)
def test_on_two_processes(results: Path, name: str) -> None:
    """With half of each batch on two processes, a script ends with the weights and values of one process.

    A script with other steps on two processes ends with the weights and metrics of Lightning's two.
    """
    found = result(results / "2", name)
    assert differences(*on_two(name, records.read(name), records.summary(found))) == []
    assert all(weight.isfinite().all() for weight in found["weights"].values())


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
def test_lightning_gives_what_is_recorded(results: Path, lightnings_results: Path, name: str) -> None:
    """Lightning gives that again, and what a script gives here is equal to it on one machine."""
    again = record.results_of_lightning(lightnings_results, name)
    recorded = records.read(name)
    assert differences({count: recorded[count] for count in again}, again) == []
    lightnings = {count: result(lightnings_results / count, name) for count in again}
    one, two = (result(results / count, name) for count in ("1", "2"))
    assert differences(lightnings["1"], one, tolerance=SAME_MACHINE) == []
    tolerance = SAME_MACHINE if name in OWN_STEPS else SAME_MACHINE_ON_TWO
    assert differences(*on_two(name, lightnings, two), tolerance=tolerance) == []


@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn"])
@pytest.mark.parametrize("name", NAMES)
def test_as_a_program(
    run_script: ScriptRunner,
    scripts: dict[str, Path],
    lightning: Callable[..., Result],
    name: str,
    strategy: str,
) -> None:
    """Started as a program with `ddp` or `ddp_spawn`, a script ends with the weights and values of Lightning.

    Those are of Lightning's `ddp` for both: with `ddp_spawn` it loses the state of callbacks and optimizers.
    """
    started = start_alone(run_script, scripts, "rankwise", name, *ON_TWO, strategy)
    if name in NOT_SPAWNED and strategy == "ddp_spawn":
        ended = started.finish(timeout=300)
        assert (ended.returncode, "NotPicklableError" in ended.stderr) == (1, True), ended
        return
    found = result_of(run_script, started)
    if name in WRONG_IN_LIGHTNING and name not in OWN_STEPS:
        expected = lightning(name)
        assert differences(of_all_ranks(expected), of_all_ranks(found), tolerance=SAME_MACHINE_ON_TWO) == []
        return
    expected = lightning(name, *ON_TWO, "ddp", "--keep-order")
    if name in WRONG_IN_LIGHTNING:
        logged = first_epoch(expected), first_epoch(found)
        assert differences(*logged, tolerance=SAME_MACHINE) == []
        assert found["values"] == expected["values"]
    else:
        assert differences(expected, found, tolerance=SAME_MACHINE) == []


def test_exceptions_are_scripts() -> None:
    """The tables of exceptions name scripts."""
    tables = (WITHOUT_LOGGER, OWN_STEPS, WRONG_IN_LIGHTNING, NOT_SPAWNED)
    assert {name for table in tables for name in table} <= {*NAMES}


# ------------------------------------------------------------------------------------------------ comparing


def on_two(name: str, lightnings: Mapping[str, Result], found: Result) -> tuple[Result, Result]:
    """Return what is compared of Lightning's results, by number of processes, and of one on two processes."""
    if name not in OWN_STEPS:
        return of_all_ranks(lightnings["1"]), of_all_ranks(found)
    if name not in RECORDED_ON_TWO:
        return {}, {}
    expected = lightnings["2"]
    metrics = {name: expected["metrics"][name] for name in found["metrics"]}  # it keeps those of `fit`
    kept = {"weights": found["weights"], "metrics": found["metrics"]}
    return {"weights": expected["weights"], "metrics": metrics}, kept


def of_all_ranks(found: Result) -> Result:
    """Leave out the values of one rank's batches."""

    def is_of_rank_zero(name: str) -> bool:
        return re.sub(r"(_step|_epoch)?(@\d+)?$", "", name) in OF_RANK_ZERO

    logged = {
        kind: {name: value for name, value in found[kind].items() if not is_of_rank_zero(name)}
        for kind in ("metrics", "history")
    }
    return {**found, **logged}


def first_epoch(found: Result) -> dict[str, float]:
    """Return what was logged in the first four steps, which are the first epoch of `finetuning`."""
    return {name: value for name, value in found["history"].items() if int(name.split("@")[1]) < 4}
