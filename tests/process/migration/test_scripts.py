"""Scripts for Lightning run here with their imports changed only, and give Lightning's weights and values."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.logger_files import variables
from tests.helpers.needs import need_installed
from tests.helpers.scripts import WITHOUT_COVERAGE, RunningScript, ScriptRunner
from tests.process.helpers import module_runner

need_installed("lightning", "wandb")

pytestmark = pytest.mark.timeout(900)  # two programs with all scripts, in the fixture of the first test

HERE = Path(__file__).parent
SCRIPTS = HERE / "scripts"
PAGE = Path(__file__).parents[3] / "docs" / "from_lightning.md"
NAMES = sorted(path.stem for path in SCRIPTS.glob("*.py") if path.stem not in ("__init__", "shared"))
TOLERANCE = 1e-6
ON_TWO_TOLERANCE = 1e-5  # sums are added in another order, which some optimizers enlarge
RUNNER = HERE / "runner.py"
ON_TWO = ("--devices", "2", "--strategy")
FORKED = (*ON_TWO, "ddp_fork")
Recorded = dict[str, Any]  # "weights", "metrics" at the end, "history" of the logger, other "values"

WITHOUT_LOGGER = {"distillation", "fabric_classifier", "fabric_dcgan", "fabric_language_model", "kfold"}
OF_RANK_ZERO = {"loss", "train_loss", "train/loss", "supervised", "consistency"}
"""What scripts log in training without `sync_dist`: on two processes, of one's half of each batch."""
OWN_STEPS = {
    "fabric_dcgan": "the noise depends on the size of the batch",
    "finetuning": "batch normalisation sees half a batch",
    "gan": "the noise depends on the size of the batch",
    "hydra_template": "batch normalisation sees half a batch",
    "text_classifier": "words are padded to the longest in the batch",
    "vae": "the noise depends on the size of the batch",
}
"""Scripts whose steps on two processes are not those of one, and why: compared with Lightning on two."""
WRONG_IN_LIGHTNING = {
    "finetuning": "does not synchronise what is unfrozen in training: its processes end with other weights",
    "transformer_lm": "repeats a sample with drop_last=True, for a step more than one process has",
}
"""Scripts that Lightning trains wrongly on two processes, and how."""
NOT_SPAWNED = {"metric_objects": "a lambda in a callback, which cannot be pickled"}
"""Scripts that cannot be started by spawn, in Lightning either, and why."""


# ----------------------------------------------------------------------------------------- running scripts


def environment(folder: Path, library: str) -> dict[str, str | None]:
    """Return variables: one thread, for the same order of additions; and files of W&B in a folder."""
    without = WITHOUT_COVERAGE if library == "lightning" else {}
    return {"OMP_NUM_THREADS": "1", **variables(folder / "wandb"), **without}


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


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, scripts: dict[str, Path]) -> Path:
    """Run scripts in Lightning and here, on one process and two; return where `LIBRARY/1/NAME.pt` is."""
    folder = tmp_path_factory.mktemp("results")
    of_lightning = ",".join(OWN_STEPS.keys() - WRONG_IN_LIGHTNING.keys())
    on_two = {"lightning": (of_lightning, *FORKED, "--keep-order"), "rankwise": (",".join(NAMES), *FORKED)}
    with module_runner(folder) as run:
        programs = [start_all(run, scripts, library, given) for library, given in on_two.items()]
        for program in programs:
            ended = program.finish(timeout=600)
            assert ended.returncode == 0, ended
    return folder


def start_all(
    run: ScriptRunner, scripts: dict[str, Path], library: str, on_two: tuple[str, ...]
) -> RunningScript:
    """Start a program that runs scripts on two processes, and then all on one, where they start threads."""
    own = run.folder / library
    given = (str(own / "2"), *on_two, "--", str(own / "1"), ",".join(NAMES))
    return run.start(RUNNER, str(scripts[library]), *given, env=environment(own, library))


def result(folder: Path, name: str) -> Recorded:
    """Return what a script has recorded, unless it failed."""
    error = json.loads((folder / f"{name}.json").read_text())["error"]
    assert error is None, error
    return load(folder / f"{name}.pt")


def load(path: Path) -> Recorded:
    """Return what a script has recorded."""
    recorded: Recorded = torch.load(path)
    return recorded


def start_alone(
    run: ScriptRunner, scripts: dict[str, Path], library: str, name: str, *arguments: str
) -> RunningScript:
    """Start a script as a program, in the runner's folder."""
    return run.start(scripts[library] / f"{name}.py", *arguments, env=environment(run.folder, library))


def recorded_by(run: ScriptRunner, program: RunningScript, *, grace_s: float = 4) -> Recorded:
    """Wait for the end of a script that was started as a program; return what it has recorded."""
    ended = program.finish(timeout=300, leftover_grace_s=grace_s)
    assert ended.returncode == 0, ended
    return load(run.folder / "result.pt")


@pytest.fixture(scope="module")
def lightning(tmp_path_factory: pytest.TempPathFactory, scripts: dict[str, Path]) -> Callable[..., Recorded]:
    """Return a function that runs a script in Lightning, once with the same arguments."""

    @cache
    def run_in_lightning(name: str, *arguments: str) -> Recorded:
        with module_runner(tmp_path_factory.mktemp("lightning")) as run:
            started = start_alone(run, scripts, "lightning", name, *arguments)
            return recorded_by(run, started, grace_s=60)

    return run_in_lightning


# ---------------------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize("name", NAMES)
def test_on_one_process(results: Path, name: str) -> None:
    """A script ends with Lightning's weights, metrics and logged values."""
    expected, found = (result(results / library / "1", name) for library in ("lightning", "rankwise"))
    assert bool(expected["history"]) == (name not in WITHOUT_LOGGER)
    assert differences(expected, found) == []


@pytest.mark.parametrize("name", NAMES)
def test_on_two_processes(results: Path, name: str) -> None:
    """With half of each batch on two processes, a script ends with the weights and values of one process.

    A script with other steps on two processes ends with the weights and metrics of Lightning's two.
    """
    found = result(results / "rankwise/2", name)
    if name not in OWN_STEPS:
        expected = result(results / "lightning/1", name)
        assert differences(of_all_ranks(expected), of_all_ranks(found), tolerance=ON_TWO_TOLERANCE) == []
    elif name not in WRONG_IN_LIGHTNING:
        expected = result(results / "lightning/2", name)
        assert differences(expected["weights"], found["weights"]) == []
        metrics = {name: expected["metrics"][name] for name in found["metrics"]}  # it keeps those of `fit`
        assert differences(metrics, found["metrics"]) == []
    assert all(weight.isfinite().all() for weight in found["weights"].values())


@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn"])
@pytest.mark.parametrize("name", NAMES)
def test_as_a_program(
    run_script: ScriptRunner,
    scripts: dict[str, Path],
    lightning: Callable[..., Recorded],
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
    found = recorded_by(run_script, started)
    if name in WRONG_IN_LIGHTNING and name not in OWN_STEPS:
        expected = lightning(name)
        assert differences(of_all_ranks(expected), of_all_ranks(found), tolerance=ON_TWO_TOLERANCE) == []
        return
    expected = lightning(name, *ON_TWO, "ddp", "--keep-order")
    if name in WRONG_IN_LIGHTNING:
        assert differences(first_epoch(expected), first_epoch(found)) == []
        assert found["values"] == expected["values"]
    else:
        assert differences(expected, found) == []


def test_exceptions_are_scripts() -> None:
    """The tables of exceptions name scripts."""
    tables = (WITHOUT_LOGGER, OWN_STEPS, WRONG_IN_LIGHTNING, NOT_SPAWNED)
    assert {name for table in tables for name in table} <= {*NAMES}


# ------------------------------------------------------------------------------------------------ comparing


def of_all_ranks(recorded: Recorded) -> Recorded:
    """Leave out the values of one rank's batches."""

    def is_of_rank_zero(name: str) -> bool:
        return re.sub(r"(_step|_epoch)?(@\d+)?$", "", name) in OF_RANK_ZERO

    logged = {
        kind: {name: value for name, value in recorded[kind].items() if not is_of_rank_zero(name)}
        for kind in ("metrics", "history")
    }
    return {**recorded, **logged}


def first_epoch(recorded: Recorded) -> dict[str, float]:
    """Return what was logged in the first four steps, which are the first epoch of `finetuning`."""
    return {name: value for name, value in recorded["history"].items() if int(name.split("@")[1]) < 4}


def differences(lightning: Any, rankwise: Any, where: str = "", tolerance: float = TOLERANCE) -> list[str]:
    """Return where two values, or what is in them, differ."""
    if isinstance(lightning, Mapping):
        names = [*lightning, *(name for name in rankwise if name not in lightning)]
        return [
            line
            for name in names
            for line in (
                differences(lightning[name], rankwise[name], f"{where}/{name}", tolerance)
                if name in lightning and name in rankwise
                else [f"{where}/{name} is missing in {'rankwise' if name in lightning else 'lightning'}"]
            )
        ]
    if isinstance(lightning, (list, tuple)) and len(lightning) == len(rankwise):
        return [
            line
            for number, pair in enumerate(zip(lightning, rankwise, strict=True))
            for line in differences(*pair, f"{where}/{number}", tolerance)
        ]
    return [] if is_close(lightning, rankwise, tolerance) else [f"{where}: {lightning!r} became {rankwise!r}"]


def is_close(first: Any, second: Any, tolerance: float) -> bool:
    """Return whether two tensors, numbers or other values are equal to within `tolerance`."""
    if isinstance(first, torch.Tensor):
        return first.shape == second.shape and bool((first - second).abs().max() <= tolerance)
    if isinstance(first, (int, float)) and not isinstance(first, bool):
        return math.isclose(first, second, rel_tol=tolerance, abs_tol=tolerance)
    return bool(first == second)


def test_differences_are_found() -> None:
    """The comparison finds values that differ, that are missing, and lists of other lengths."""
    first = {"w": torch.ones(2), "m": {"a": 1.0, "b": 2.0}, "l": [1, 2], "t": "x"}
    second = {"w": torch.tensor([1.0, 1.1]), "m": {"a": 1.1, "c": 2.0}, "l": [1, 3], "t": "y"}
    assert differences(first, first) == []
    found = [line.split()[0].rstrip(":") for line in differences(first, second)]
    assert found == ["/w", "/m/a", "/m/b", "/m/c", "/l/1", "/t"]
    assert differences([1], [1, 2]) == [": [1] became [1, 2]"]
    assert differences(torch.ones(2), torch.ones(3)) != []
