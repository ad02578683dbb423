"""rankwise without optional packages: only torch, lightning-utilities and typing-extensions are there."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest

from tests.helpers.scripts import ScriptRunner
from tests.process.helpers import REPOSITORY

OPTIONAL = ("mlflow", "numpy", "psutil", "rich", "sklearn", "tensorboard", "torchmetrics", "tqdm", "wandb")

PROGRAM = """
    import sys
    import torch
    from rankwise import Trainer, seed_everything
    from tests.process.training_tasks import Regression, loader

    class Line(Regression):
        def __init__(self):
            super().__init__()
            self.save_hyperparameters()

    def fit(**where):
        seed_everything(1)
        model = Line()
        trainer = Trainer(max_epochs=2, accelerator="cpu", **where)
        trainer.fit(model, loader(32, 8 // trainer.world_size, shuffle=True), loader(32, 8))
        trainer.validate(model, loader(32, 8))
        assert len(trainer.predict(model, loader(32, 8))) == 4
        trainer.fit(Line(), loader(32, 8), ckpt_path=trainer.checkpoint_callback.best_model_path)
        return model.net[0].weight.detach()

    if __name__ == "__main__":
        alone, together = fit(devices=1), fit(devices=2, strategy=sys.argv[1])
        torch.testing.assert_close(alone, together)
        assert "numpy" not in sys.modules
        print("trained")
"""


ABSENT = f"""
from importlib.machinery import PathFinder

plain = PathFinder.find_spec

def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in {OPTIONAL!r} else plain(name, path, target)

PathFinder.find_spec = find_spec
"""


@pytest.fixture
def without_optional(tmp_path: Path) -> dict[str, str]:
    """Return variables for a program in whose processes Python finds none of the optional packages."""
    folder = tmp_path / "startup"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(ABSENT)
    return {"PYTHONPATH": f"{folder}{os.pathsep}{REPOSITORY}"}


@pytest.mark.quick
@pytest.mark.parametrize(
    "strategy", ["ddp_fork", *(pytest.param(name, marks=pytest.mark.soak) for name in ("ddp_spawn", "ddp"))]
)
def test_training(run_script: ScriptRunner, without_optional: dict[str, str], strategy: str) -> None:
    """Training on one process and on two gives equal weights without NumPy."""
    assert "trained" in run_script(PROGRAM, strategy, env=without_optional).check_returncode().stdout


@pytest.mark.soak  # it starts ranks by every method
def test_doctor(run_script: ScriptRunner, without_optional: dict[str, str]) -> None:
    """The doctor finds nothing wrong without NumPy."""
    command = [sys.executable, "-m", "rankwise", "doctor", "--json"]
    result = run_script.command(command, env=without_optional, timeout=110).check_returncode()
    assert json.loads(result.stdout)["ok"] is True


def requirements(name: str, found: set[str]) -> None:
    """Add the names of an installed distribution and of all that it needs, extras aside."""
    name = re.sub(r"[-_.]+", "-", name).lower()
    with suppress(importlib.metadata.PackageNotFoundError):
        lines = importlib.metadata.requires(name) or []
        if name not in found:
            found.add(name)
            for line in lines:
                if "extra ==" not in line:
                    requirements(re.split(r"[^\w.-]", line, maxsplit=1)[0], found)


def link_distribution(name: str, folder: Path) -> None:
    """Make an installed distribution importable from `folder`."""
    distribution = importlib.metadata.distribution(name)
    for top in {Path(file).parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
        if not (folder / top).exists():
            (folder / top).symlink_to(str(distribution.locate_file(top)))


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_a_wheel_alone(run_script: ScriptRunner, tmp_path: Path) -> None:
    """A built wheel trains with torch and the two declared dependencies, and the doctor passes."""
    pytest.importorskip("hatchling")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=REPOSITORY, check=True, capture_output=True, timeout=600)
    [wheel] = tmp_path.glob("*.whl")
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True, timeout=600)
    [packages] = environment.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    names: set[str] = set()
    for name in ("torch", "lightning-utilities", "typing-extensions"):
        requirements(name, names)
    assert "numpy" not in names
    for name in names:
        link_distribution(name, packages)
    python, plain = str(environment / "bin" / "python"), {"PYTHONPATH": str(REPOSITORY)}
    listed = run_script.command([python, "-c", "import rankwise; print(rankwise.__file__)"], env=plain)
    assert str(packages) in listed.stdout, listed
    program = run_script.write(PROGRAM)
    for strategy in ("ddp_fork", "ddp_spawn", "ddp"):
        trained = run_script.command([python, str(program), strategy], env=plain, timeout=300)
        assert "trained" in trained.check_returncode().stdout
    run_script.command([python, "-m", "rankwise", "doctor"], env=plain, timeout=300).check_returncode()
