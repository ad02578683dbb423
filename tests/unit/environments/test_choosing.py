"""An explicit choice overrides detection, also for installed environments."""

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from rankwise import ClusterEnvironment
from rankwise.environments import SlurmEnvironment, detect_environment
from rankwise.environments.detect import ENVIRONMENT_VARIABLE, environment_names
from rankwise.errors import EnvironmentVariableError
from rankwise.ranks import RankInfo, rank_zero_only
from rankwise.strategies import DDPStrategy, Strategy
from tests.helpers.installed import BROKEN, WORKING, installed_here
from tests.unit.environments.variables import step, torchrun
from tests.unit.trainer.helpers import trainer


@pytest.fixture(autouse=True)
def task_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the variables of a Slurm step and of torchrun: detection finds torchrun."""
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    for name, value in {**step(1, "1(x2)", "n[1-2]", place=(1, 0)), **torchrun()}.items():
        monkeypatch.setenv(name, value)
    assert detect_environment().environment.name == "torchelastic"


def constructed_with(environment: ClusterEnvironment | str) -> Strategy:
    strategy = DDPStrategy(accelerator="cpu", cluster_environment=environment)
    strategy.bind()
    return strategy


def bound_to(environment: ClusterEnvironment | str) -> Strategy:
    strategy = DDPStrategy(accelerator="cpu")
    strategy.bind(environment=environment)
    return strategy


CHOICES: dict[str, Callable[[Path], Strategy]] = {
    "instance in the constructor": lambda folder: constructed_with(SlurmEnvironment()),
    "name in the constructor": lambda folder: constructed_with("slurm"),
    "name in bind": lambda folder: bound_to("Slurm"),
    "name among the plug-ins": lambda folder: trainer(folder, strategy="ddp", plugins=["slurm"]).strategy,
    "instance among the plug-ins": (
        lambda folder: trainer(folder, strategy="ddp", plugins=[SlurmEnvironment()]).strategy
    ),
}


@pytest.mark.parametrize("choose", CHOICES.values(), ids=list(CHOICES))
def test_a_choice_beats_detection(choose: Callable[[Path], Strategy], tmp_path: Path) -> None:
    """The strategy has Slurm's ranks on the second node, not torchrun's on the first."""
    strategy = choose(tmp_path)
    assert strategy.environment.name == "slurm"
    assert strategy.ranks == RankInfo(1, 0, 1, 2, 1, 2)


def test_the_variable_beats_detection(monkeypatch: pytest.MonkeyPatch) -> None:
    """`RANKWISE_ENVIRONMENT` gives a strategy its environment."""
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "slurm")
    strategy = DDPStrategy(accelerator="cpu")
    assert strategy.bind() == RankInfo(1, 0, 1, 2, 1, 2)
    assert strategy.environment.name == "slurm"


def test_choosing_an_absent_launcher() -> None:
    """Choosing a launcher that has not started this process is an error that names the missing variables."""
    with pytest.raises(EnvironmentVariableError, match="OMPI_COMM_WORLD_RANK is not set"):
        constructed_with("mpi")


def test_an_installed_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a package is chosen by name or by variable; it is detected, but torchrun is nearer."""
    variables = {"PLUG_RANK": "1", "PLUG_SIZE": "3", "PLUG_HEAD": "127.0.0.1", "PLUG_PORT": "29500"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with installed_here(tmp_path, WORKING):
        assert {"plugenv", "slurm"} <= set(environment_names())
        assert constructed_with("PlugEnv").ranks == RankInfo(1, 1, 0, 3, 3, 1)
        assert detect_environment().rejected["plugenv"] == "torchelastic is nearer to this process"
        assert detect_environment({**step(), **variables}).environment.name == "plugenv"
        with pytest.raises(EnvironmentVariableError, match="plugenv cannot be right: PLUG_SIZE, "):
            detect_environment({"PLUG_RANK": "1"})
        monkeypatch.setenv(ENVIRONMENT_VARIABLE, "plugenv")
        detection = detect_environment()
    assert (detection.environment.name, detection.reason) == ("plugenv", "RANKWISE_ENVIRONMENT=plugenv")


def test_a_broken_environment_of_a_package(tmp_path: Path) -> None:
    """Detection warns of each that cannot be loaded, and goes on."""
    with installed_here(tmp_path, BROKEN), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert detect_environment().environment.name == "torchelastic"
    messages = "".join(str(each.message) for each in seen)
    for name in ("gone", "other_name", "number"):
        assert f"The entry point {name!r} of package plug 1.2 cannot be used" in messages
