"""Every environment keeps the same contract: typed facts from variables, or an error that names them."""

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from rankwise.environments import (
    ClusterEnvironment,
    KubeflowEnvironment,
    LocalEnvironment,
    LSFEnvironment,
    MPIEnvironment,
    NodesEnvironment,
    PALSEnvironment,
    PlainEnvironment,
    SkyPilotEnvironment,
    SlurmEnvironment,
    TorchElasticEnvironment,
    TrainJobEnvironment,
    create_environment,
    detect_environment,
)
from rankwise.environments.detect import ENVIRONMENT_VARIABLE, environment_names
from rankwise.errors import (
    ContractError,
    EnvironmentVariableError,
    InvalidTypeError,
    UnknownNameError,
    WorldSizeMismatchError,
)
from rankwise.ranks import RankInfo, rank_zero_only
from rankwise.strategies import DDPStrategy, SingleDeviceStrategy
from rankwise.testing import check_environment
from tests.helpers.raising import raises
from tests.unit.environments.variables import plain, shell_variables

Variables = Mapping[str, str]


class OwnEnvironment(ClusterEnvironment):
    """A user's own environment: a table of names."""

    name = "own"
    markers = ("OWN_JOB",)
    variables: ClassVar[Mapping[str, str]] = {
        "global_rank": "OWN_RANK",
        "world_size": "OWN_SIZE",
        "local_rank": "OWN_LOCAL_RANK",
        "local_world_size": "OWN_LOCAL_SIZE",
        "main_address": "OWN_HEAD",
        "main_port": "OWN_PORT",
    }


class Pods(NodesEnvironment):
    """One that names no variable for the number of nodes."""

    name = "pods"
    variables: ClassVar[Variables] = {"node_rank": "POD", "main_address": "HEAD", "main_port": "PORT"}


class OwnNodes(NodesEnvironment):
    """A user's own environment of nodes: a table of names, with that of the number of nodes."""

    name = "own_nodes"
    variables: ClassVar[Mapping[str, str]] = {
        "node_rank": "BN_NODE",
        "num_nodes": "BN_NODES",
        "main_address": "BN_HEAD",
        "main_port": "BN_PORT",
    }


TORCHRUN = shell_variables("""
    TORCHELASTIC_RUN_ID=none RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 GROUP_RANK=1
    GROUP_WORLD_SIZE=2 MASTER_ADDR=node0 MASTER_PORT=29400
""")
OWN = shell_variables("""
    OWN_JOB=17 OWN_RANK=3 OWN_SIZE=4 OWN_LOCAL_RANK=1 OWN_LOCAL_SIZE=2 OWN_HEAD=head OWN_PORT=1
""")
SLURM = shell_variables("""
    SLURM_STEP_ID=0 SLURM_PROCID=3 SLURM_STEP_NUM_TASKS=4 SLURM_LOCALID=1 SLURM_NODEID=1
    SLURM_STEP_NUM_NODES=2 SLURM_JOB_ID=1042 SLURM_STEP_TASKS_PER_NODE=2(x2) SLURM_STEP_NODELIST=gpu[07-08]
""")
LSF = shell_variables("""
    JSM_NAMESPACE_RANK=3 JSM_NAMESPACE_SIZE=4 JSM_NAMESPACE_LOCAL_RANK=1 JSM_NAMESPACE_LOCAL_SIZE=2
    LSB_JOBID=77
""")
OPEN_MPI = shell_variables("""
    OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2
""")
PALS = shell_variables("PALS_RANKID=3 PMI_SIZE=4 PALS_LOCAL_RANKID=1 PMI_LOCAL_SIZE=2 PALS_NODEID=1")
KUBEFLOW = shell_variables("""
    KUBERNETES_SERVICE_HOST=10.96.0.1 RANK=1 WORLD_SIZE=2 MASTER_ADDR=job-master-0 MASTER_PORT=23456
""")
TRAIN_JOB = shell_variables("""
    PET_NODE_RANK=1 PET_NNODES=2 PET_MASTER_ADDR=job-node-0-0.job PET_MASTER_PORT=29400
""")
SKYPILOT = shell_variables("""
    SKYPILOT_NODE_RANK=1 SKYPILOT_NUM_NODES=2 SKYPILOT_NODE_IPS="10.0.0.1\n10.0.0.2"
""")
OWN_NODES = shell_variables("BN_NODE=1 BN_NODES=2 BN_HEAD=10.0.0.1 BN_PORT=5000")
NODES = shell_variables("NODE_RANK=1 MASTER_ADDR=10.0.0.1 MASTER_PORT=5000")
PODS = shell_variables("POD=1 NNODES=2 HEAD=10.0.0.1 PORT=5000")
OF_FOUR, OF_TWO_NODES = RankInfo(3, 1, 1, 4, 2, 2), RankInfo(1, 0, 1, 2, 1, 2)
JOB_PORT = 20000 + 1042 * 31 % 12000
CASES: list[tuple[type[ClusterEnvironment], Variables, RankInfo, tuple[str, int] | None]] = [
    (TorchElasticEnvironment, TORCHRUN, RankInfo(5, 1, 1, 8, 4, 2), ("node0", 29400)),
    (SlurmEnvironment, SLURM, OF_FOUR, ("gpu07", JOB_PORT)),
    (LSFEnvironment, LSF, OF_FOUR, None),
    (MPIEnvironment, OPEN_MPI, OF_FOUR, None),
    (PALSEnvironment, PALS, OF_FOUR, None),
    (KubeflowEnvironment, KUBEFLOW, OF_TWO_NODES, ("job-master-0", 23456)),
    (PlainEnvironment, plain(), RankInfo(1, 1, 0, 2, 2, 1), ("10.0.0.1", 5000)),
    (TrainJobEnvironment, TRAIN_JOB, OF_TWO_NODES, ("job-node-0-0.job", 29400)),
    (SkyPilotEnvironment, SKYPILOT, OF_TWO_NODES, None),
    (NodesEnvironment, NODES, OF_TWO_NODES, ("10.0.0.1", 5000)),
    (OwnNodes, OWN_NODES, OF_TWO_NODES, ("10.0.0.1", 5000)),
    (Pods, PODS, OF_TWO_NODES, ("10.0.0.1", 5000)),
    (OwnEnvironment, OWN, OF_FOUR, ("head", 1)),
]
GOOD = {cls: variables for cls, variables, *_ in CASES}


@pytest.mark.parametrize(
    ("cls", "variables", "expected", "address"), CASES, ids=[cls.name for cls, *_ in CASES]
)
def test_contract(
    cls: type[ClusterEnvironment], variables: Variables, expected: RankInfo, address: tuple[str, int] | None
) -> None:
    """The environment keeps the rules that other people's are checked for; address and port are read."""
    check_environment(cls, variables, expected)
    environment = cls(variables)
    assert address is None or (environment.main_address, environment.main_port) == address


def test_local_ranks() -> None:
    """Without a launcher a process is alone."""
    assert LocalEnvironment({}).ranks == RankInfo(0, 0, 0, 1, 1, 1)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"variables": {}}, "the ranks are right"),
        ({"name": ""}, "it has a name: name is empty"),
        ({"global_rank": 0}, "the ranks are right"),
        ({"detect": classmethod(lambda cls, environ=None: True)}, "is refused by an error that names it"),
        ({"seen": lambda self: dict(self._environ)}, "and nobody else's"),
        ({"missing": classmethod(lambda cls, environ=None: ())}, "where OWN_SIZE is not set"),
        ({"main_port": 5}, "OWN_PORT='x' is refused by an error that names it"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_broken_contract(changes: dict[str, Any], problem: str) -> None:
    """A rule that an environment breaks is a line of the error."""
    broken: Any = type("Broken", (OwnEnvironment,), changes)
    raises(ContractError, re.escape(problem), check_environment, broken, OWN, RankInfo(3, 1, 1, 4, 2, 2))


CONTRADICTIONS: dict[type[ClusterEnvironment], tuple[str, ...]] = {
    TorchElasticEnvironment: (
        *("RANK=8", "LOCAL_RANK=4", "GROUP_RANK=2", "WORLD_SIZE=0", "LOCAL_WORLD_SIZE=0"),
        *("GROUP_WORLD_SIZE=0", "LOCAL_WORLD_SIZE=9", "GROUP_WORLD_SIZE=9 GROUP_RANK=8"),
    ),
    PlainEnvironment: (
        *("RANK=2 LOCAL_RANK=2", "LOCAL_RANK=0", "WORLD_SIZE=0", "LOCAL_WORLD_SIZE=0", "LOCAL_WORLD_SIZE=3"),
        *("LOCAL_WORLD_SIZE=x", "NODE_RANK=1", "GROUP_RANK=-1"),
    ),
    OwnEnvironment: ("OWN_RANK=4", "OWN_LOCAL_SIZE=0", "OWN_LOCAL_SIZE=1"),
}


@pytest.mark.parametrize(
    ("cls", "changes"),
    [(cls, changes) for cls, texts in CONTRADICTIONS.items() for changes in texts],
    ids=str,
)
def test_contradictions_are_refused(cls: type[ClusterEnvironment], changes: str) -> None:
    """Contradicting numbers are an error with the variables and their values."""
    with pytest.raises(EnvironmentVariableError) as caught:
        cls.detect({**GOOD[cls], **shell_variables(changes)})
    for name, value in shell_variables(changes).items():
        assert name in str(caught.value)
        assert value in str(caught.value)


# ---------------------------------------------------------------------- detection


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        *(({}, "local"), (plain(), "plain"), (TORCHRUN, "torchelastic")),
        *(({**plain(), **TORCHRUN}, "torchelastic"), ({"LOCAL_RANK": "0"}, "local")),
        *(({"NODE_RANK": "0", "LOCAL_RANK": "0"}, "local"), ({ENVIRONMENT_VARIABLE: ""}, "local")),
        ({ENVIRONMENT_VARIABLE: " "}, "local"),
    ],
    ids=["nothing", "plain", "torchrun", "both", "LOCAL_RANK", "NODE_RANK", "empty", "blank"],
)
def test_detection(variables: Variables, name: str) -> None:
    """The launcher nearest to the process is detected; an incomplete set and a blank name are ignored."""
    assert detect_environment(variables).environment.name == name


def test_detection_explains_itself() -> None:
    """The result has the reason for this environment and against each one before it."""
    text = str(detect_environment({"RANK": "0"}))
    assert text == (
        "environment 'local': no launcher's variables are complete; "
        "not 'torchelastic': TORCHELASTIC_RUN_ID, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, "
        "GROUP_WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set; "
        "not 'slurm': SLURM_JOB_ID and SLURM_STEP_ID not set; "
        "not 'lsf': none of its variables is set; "
        "not 'mpi': none of its variables is set; "
        "not 'pals': none of its variables is set; "
        "not 'kubeflow': KUBERNETES_SERVICE_HOST, WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set; "
        "not 'plain': WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT not set; "
        "not 'trainjob': RANK is set: whoever set it has started a process for each rank; "
        "not 'skypilot': RANK is set: whoever set it has started a process for each rank; "
        "not 'nodes': RANK is set: whoever set it has started a process for each rank"
    )


def test_a_named_environment_must_be_there() -> None:
    """Torchrun with damaged variables, or named without any, is an error, not a job of one process."""
    with pytest.raises(EnvironmentVariableError, match=r"torchelastic.*WORLD_SIZE is not set"):
        detect_environment({key: value for key, value in TORCHRUN.items() if key != "WORLD_SIZE"})
    with pytest.raises(EnvironmentVariableError, match="RANK is not set"):
        detect_environment({ENVIRONMENT_VARIABLE: "torchelastic"})


def test_the_variable_beats_detection() -> None:
    """`RANKWISE_ENVIRONMENT` decides, in any case, and is named as the reason."""
    detection = detect_environment({**TORCHRUN, ENVIRONMENT_VARIABLE: "Local"})
    assert detection.environment.name == "local"
    assert detection.reason == "RANKWISE_ENVIRONMENT=Local"


def test_the_variable_must_name_one() -> None:
    """An unknown name is an error that suggests the nearest name and lists all."""
    with pytest.raises(UnknownNameError, match="Did you mean 'torchelastic'") as caught:
        detect_environment({ENVIRONMENT_VARIABLE: "torchelastc"})
    assert set(caught.value.known) == set(environment_names())


@pytest.mark.parametrize("name", environment_names())
def test_every_environment_has_a_name(name: str) -> None:
    """Each name that is listed creates its environment."""
    variables = next((good for cls, good in GOOD.items() if cls.name == name), {})
    assert create_environment(name, variables).name == name
    assert create_environment(name.upper(), variables).name == name


# ---------------------------------------------------------------------- with a strategy


def test_a_users_own_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """An instance of a user's subclass gives the strategy its ranks, and `rank_zero_only` too."""
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    strategy = DDPStrategy(accelerator="cpu", cluster_environment=OwnEnvironment(OWN))
    assert strategy.bind() == RankInfo(3, 1, 1, 4, 2, 2)
    assert strategy.environment.name == "own"
    assert strategy.runs_in_caller
    assert rank_zero_only.rank == 3  # type: ignore[attr-defined]  # its documented place


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        ({"devices": 3}, ("6 processes", "devices=3 x num_nodes=2", "own started 4", "OWN_SIZE=4")),
        ({"num_nodes": 3}, ("6 processes", "devices=2 x num_nodes=3", "own started 4")),
        ({"devices": 4, "num_nodes": 1}, ("4 processes", "devices=4 x num_nodes=1", "own started 4")),
    ],
    ids=str,
)
def test_another_world_is_refused(arguments: dict[str, int], texts: tuple[str, ...]) -> None:
    """The error has the requested and the existing size, with the variables."""
    with pytest.raises(WorldSizeMismatchError) as caught:
        DDPStrategy(accelerator="cpu", cluster_environment=OwnEnvironment(OWN), **arguments).bind()  # type: ignore[arg-type]  # devices and num_nodes
    for text in texts:
        assert text in str(caught.value)


def test_an_environment_can_refuse() -> None:
    """`validate_settings` is asked with the numbers that were found."""

    class Refusing(OwnEnvironment):
        def validate_settings(self, devices: int, num_nodes: int) -> None:
            raise RuntimeError(f"not {devices} on {num_nodes}")

    with pytest.raises(RuntimeError, match="not 2 on 2"):
        DDPStrategy(accelerator="cpu", cluster_environment=Refusing(OWN)).bind()


@pytest.mark.parametrize("wrong", [OwnEnvironment, 3, object()], ids=["a class", "a number", "an object"])
def test_what_is_no_environment_is_refused(wrong: object) -> None:
    """A class instead of an instance, or anything else, is refused by the constructor."""
    with pytest.raises(InvalidTypeError, match="cluster_environment"):
        DDPStrategy(cluster_environment=wrong)  # type: ignore[arg-type]  # wrong on purpose


def test_single_device_refuses_a_world_of_several() -> None:
    """One process, where a launcher has started four, is refused with their number."""
    strategy = SingleDeviceStrategy(accelerator="cpu", cluster_environment=OwnEnvironment(OWN))
    raises(ValueError, "own has started 4 processes", strategy.bind)


def test_a_fact_without_a_variable_says_so() -> None:
    """A subclass that names no variable for a fact gets our error, not a KeyError."""
    bare: Any = type("Bare", (ClusterEnvironment,), {"name": "bare"})
    with pytest.raises(EnvironmentVariableError, match="no variable is known for global_rank"):
        bare({}).ranks  # noqa: B018 -- the property raises
