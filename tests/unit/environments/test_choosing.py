"""An explicit choice overrides detection, also for installed environments."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rankwise import ClusterEnvironment
from rankwise.environments import SlurmEnvironment, create_environment, detect_environment
from rankwise.environments.detect import ENVIRONMENT_VARIABLE, environment_names
from rankwise.errors import EnvironmentVariableError, InvalidTypeError, UnknownNameError
from rankwise.ranks import RankInfo, rank_zero_only
from rankwise.strategies import DDPStrategy, Strategy
from tests.unit.environments.variables import step, torchrun
from tests.unit.trainer.helpers import trainer

INSTALLED = """
from rankwise import ClusterEnvironment

class OurCluster(ClusterEnvironment):
    name = "ourcluster"
    variables = {
        "global_rank": "OUR_RANK", "world_size": "OUR_SIZE",
        "local_rank": "OUR_RANK", "local_world_size": "OUR_SIZE", "main_port": "OUR_PORT",
    }

not_a_class = 3
"""
ENTRY_POINTS = """
[rankwise.environments]
ourcluster = our_cluster:OurCluster
broken = our_cluster:not_a_class
"""


@pytest.fixture(autouse=True)
def task_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the variables of a Slurm step and of torchrun: detection finds torchrun."""
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    for name, value in {**step(1, "1(x2)", "n[1-2]", place=(1, 0)), **torchrun()}.items():
        monkeypatch.setenv(name, value)
    assert detect_environment().environment.name == "torchelastic"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install a package with an environment and with a class that is not one."""
    (tmp_path / "our_cluster.py").write_text(INSTALLED)
    metadata = tmp_path / "our_cluster-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: our_cluster\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("our_cluster", None)


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


@pytest.mark.usefixtures("installed")
def test_an_installed_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of an entry point is listed, and chosen like any other, by name or by variable."""
    for name, value in {"OUR_RANK": "1", "OUR_SIZE": "3", "OUR_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    assert {"ourcluster", "slurm"} <= set(environment_names())
    assert constructed_with("ourcluster").ranks == RankInfo(1, 1, 0, 3, 3, 1)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "ourcluster")
    detection = detect_environment()
    assert (detection.environment.name, detection.reason) == ("ourcluster", "RANKWISE_ENVIRONMENT=ourcluster")


@pytest.mark.usefixtures("installed")
def test_an_entry_point_that_is_no_environment() -> None:
    """An entry point must be a subclass of ClusterEnvironment."""
    with pytest.raises(InvalidTypeError, match="entry point 'broken'"):
        create_environment("broken")


@pytest.mark.usefixtures("installed")
def test_an_unknown_name_suggests_an_installed_one() -> None:
    """A misspelt name is compared with the installed ones too."""
    with pytest.raises(UnknownNameError, match="Did you mean 'ourcluster'"):
        create_environment("ourclustr")
