"""Scripts for Lightning run here with their imports changed only, and give Lightning's weights and values."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.needs import need_package
from tests.helpers.scripts import ScriptRunner
from tests.process.helpers import module_runner

for _package in ("lightning", "wandb"):
    need_package(_package)

pytestmark = [
    pytest.mark.timeout(900),  # three programs with all scripts, in the fixture of the first test
    pytest.mark.ranks_may_differ("replay buffers and the like differ between ranks"),
]

HERE = Path(__file__).parent
SCRIPTS = HERE / "scripts"
PAGE = Path(__file__).parents[3] / "docs" / "from_lightning.md"
NAMES = sorted(path.stem for path in SCRIPTS.glob("*.py") if path.stem not in ("__init__", "shared"))
TOLERANCE = 1e-6
ON_TWO_TOLERANCE = 1e-5  # sums are added in another order, which some optimizers enlarge
RUNNER = HERE / "runner.py"
ENV = {"OMP_NUM_THREADS": "1"}  # the same order of additions in both, and less time on few cores


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


FORKED = ("--", "--strategy", "ddp_fork", "--devices", "2")


def run_all(folder: Path, programs: Mapping[str, tuple[Path, tuple[str, ...]]]) -> dict[str, Path]:
    """Run all scripts of some folders with arguments, each folder in one program; return the results."""
    results = {name: folder / name for name in programs}
    with module_runner(folder) as run:
        running = [
            run.start_command(
                [sys.executable, str(RUNNER), str(scripts), str(results[name]), *arguments], env=ENV
            )
            for name, (scripts, arguments) in programs.items()
        ]
        for program in running:
            ended = program.finish(timeout=600)
            assert ended.returncode == 0, ended
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, scripts: dict[str, Path]) -> dict[str, Path]:
    """Run all scripts in Lightning and here, and here on two processes too; return where the results are."""
    programs = {
        "lightning": (scripts["lightning"], ()),
        "rankwise": (scripts["rankwise"], ()),
        "on two": (scripts["rankwise"], FORKED),
    }
    return run_all(tmp_path_factory.mktemp("results"), programs)


def result(folder: Path, name: str) -> dict[str, Any]:
    """Return what a script has recorded, unless it failed."""
    error = json.loads((folder / f"{name}.json").read_text())["error"]
    assert error is None, error
    return load(folder / f"{name}.pt")


@pytest.mark.parametrize("name", NAMES)
def test_on_one_process(results: dict[str, Path], name: str) -> None:
    """A script ends with Lightning's weights, metrics and logged values."""
    assert differences(result(results["lightning"], name), result(results["rankwise"], name)) == []


OWN_BATCHES = {
    "contrastive": "negatives of the other rank come in another order",
    "dqn": "each process plays for itself",
    "fabric_dcgan": "the noise depends on the size of the batch",
    "finetuning": "batch normalisation sees half a batch",
    "gan": "the noise depends on the size of the batch",
    "hydra_template": "batch normalisation sees half a batch",
    "ppo": "each process plays for itself",
    "text_classifier": "words are padded to the longest in the batch",
    "vae": "the noise depends on the size of the batch",
}
"""Scripts whose steps on two processes are not those of one, and why."""


def check_on_two(lightning: dict[str, Any], found: dict[str, Any], name: str) -> None:
    """Compare weights of two processes with those of Lightning on one process, which has the same batches.

    On two processes Lightning trains in another order: it shuffles data although the loader does not.
    """
    assert found["weights"].keys() == lightning["weights"].keys()
    assert all(weight.isfinite().all() for weight in found["weights"].values())
    if name not in OWN_BATCHES:
        assert differences(lightning["weights"], found["weights"], tolerance=ON_TWO_TOLERANCE) == []


@pytest.mark.parametrize("name", NAMES)
def test_on_two_processes(results: dict[str, Path], name: str) -> None:
    """On two processes, with half of each batch on each, a script ends with the weights of one process."""
    check_on_two(result(results["lightning"], name), result(results["on two"], name), name)


@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn"])
@pytest.mark.parametrize("name", NAMES)
def test_as_a_program(
    run_script: ScriptRunner, scripts: dict[str, Path], results: dict[str, Path], name: str, strategy: str
) -> None:
    """Started as a program with `ddp` or `ddp_spawn`, a script ends with the weights of one process."""
    out = run_script.folder / "result.pt"
    arguments = ("--strategy", strategy, "--devices", "2", "--out", str(out))
    ended = run_script(scripts["rankwise"] / f"{name}.py", *arguments, env=ENV, timeout=200)
    assert ended.returncode == 0, ended
    check_on_two(result(results["lightning"], name), load(out), name)


def load(path: Path) -> dict[str, Any]:
    """Return what a script has recorded."""
    recorded: dict[str, Any] = torch.load(path)
    return recorded


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
