"""Detection for many sets of variables: complete, partial, contradictory and hostile."""

import re

import pytest

from rankwise.environments import detect_environment
from rankwise.environments.detect import ENVIRONMENT_VARIABLE, environment_names
from rankwise.errors import EnvironmentVariableError
from rankwise.ranks import RankInfo
from tests.unit.environments.variables import (
    Variables,
    allocation,
    batch,
    bsub,
    by_hand,
    hydra,
    jsrun,
    local_plain,
    one_node,
    open_mpi,
    pals,
    plain,
    pod,
    ray_train,
    sagemaker,
    skypilot,
    step,
    submitit_local,
    torchrun,
    train_job,
    without,
)

FOUND: list[tuple[str, Variables, str]] = [
    ("nothing", {}, "local"),
    # ---- good
    ("srun", step(), "slurm"),
    ("srun on two nodes", step(2, "2(x2)", "n[1-2]", place=(1, 0)), "slurm"),
    ("srun, unequal tasks", step(2, "2,1", "n[1-2]", place=(1, 0)), "slurm"),
    ("srun of one task", step(0, "1", place=(0, 0)), "slurm"),
    ("srun, named bash", {**step(), "SLURM_JOB_NAME": "bash"}, "slurm"),
    ("srun, named interactive", {**step(), "SLURM_JOB_NAME": "interactive"}, "slurm"),
    ("srun, GTIDS unset by the site", without(step(), "SLURM_GTIDS"), "slurm"),
    ("srun that exports RANK and so on", {**step(), **plain()}, "slurm"),
    ("srun with PMI", {**step(), "PMI_RANK": "1", "PMI_SIZE": "2"}, "slurm"),
    ("jsrun", jsrun(), "lsf"),
    ("jsrun on two nodes", jsrun(3, 4, 2), "lsf"),
    ("Open MPI", open_mpi(), "mpi"),
    ("Open MPI on two nodes", open_mpi(3, 4, 1, 2), "mpi"),
    ("hydra", hydra(), "mpi"),
    ("hydra on two nodes", hydra(3, 4, 2), "mpi"),
    ("PALS", pals(), "pals"),
    ("a pod of two processes", pod(1, 2, "2"), "kubeflow"),
    ("a pod of an older operator", without(pod(), *(name for name in pod() if "PET" in name)), "kubeflow"),
    ("plain", plain(), "plain"),
    ("plain, LOCAL_WORLD_SIZE", {**plain(3, 4), "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, "plain"),
    ("plain on loopback without LOCAL_RANK", without(local_plain(), "LOCAL_RANK"), "plain"),
    ("plain on one node without LOCAL_RANK", without(one_node(), "LOCAL_RANK"), "plain"),
    ("by hand", by_hand(), "nodes"),
    ("by hand, number of nodes elsewhere", without(by_hand(), "NNODES"), "nodes"),
    # ---- one within another
    ("torchrun in a batch script", {**batch(), **torchrun()}, "torchelastic"),
    ("torchrun in a step of srun", {**step(0, "1", place=(0, 0)), **torchrun()}, "torchelastic"),
    ("torchrun in a pod", {**pod(), **torchrun()}, "torchelastic"),
    ("torchrun in a TrainJob's pod", {**train_job(), **torchrun()}, "torchelastic"),
    ("torchrun on a node of SkyPilot", {**skypilot(), **torchrun()}, "torchelastic"),
    ("ranks by hand on a node of SkyPilot", {**skypilot(), **plain()}, "plain"),
    ("LOCAL_RANK preset on a node of SkyPilot", {**skypilot(), "LOCAL_RANK": "0"}, "skypilot"),
    ("LOCAL_RANK preset in a TrainJob's pod", {**train_job(), "LOCAL_RANK": "0"}, "trainjob"),
    ("torchrun under jsrun", {**jsrun(), **torchrun()}, "torchelastic"),
    ("mpirun in a batch script", {**batch(), **open_mpi()}, "mpi"),
    ("mpirun in an allocation", {**allocation(), **open_mpi()}, "mpi"),
    ("mpirun's daemon started by srun", {**step(0, "1", place=(0, 0)), **open_mpi(3, 4, 1, 2)}, "mpi"),
    (
        "mpirun's daemons on three nodes",
        {**step(1, "1(x3)", "n[2-4]", place=(1, 0)), **open_mpi(5, 8, 1, 2)},
        "mpi",
    ),
    ("hydra's proxy started by srun", {**step(1, "1(x2)", "n[1-2]", place=(1, 0)), **hydra(3, 4, 2)}, "mpi"),
    ("mpirun of one in srun's shell", {**step(0, "1", place=(0, 0)), **open_mpi(0, 1)}, "slurm"),
    ("srun and MPI say the same", {**step(), **open_mpi()}, "slurm"),
    ("mpirun in a job of LSF", {**bsub(), **open_mpi()}, "mpi"),
    ("started inside of a pod", {**pod(1, 2), "LOCAL_RANK": "1"}, "plain"),
    ("plain in a batch script", {**batch(), **plain()}, "plain"),
    ("by hand in an allocation", {**allocation(), **by_hand()}, "nodes"),
    # ---- partial: nobody's
    ("LOCAL_RANK preset", {"LOCAL_RANK": "0"}, "local"),
    ("NODE_RANK preset", {"NODE_RANK": "0"}, "local"),
    ("RANK preset", {"RANK": "0", "WORLD_SIZE": "1"}, "local"),
    ("one host of SageMaker", sagemaker(0, 1), "local"),
    ("one task of submitit", submitit_local(0, 1), "local"),
    ("PMI of one process", {"PMI_RANK": "0", "PMI_SIZE": "1"}, "local"),
    ("MASTER_* preset", {"MASTER_ADDR": "a", "MASTER_PORT": "1"}, "local"),
    ("env:// of one process", without({**local_plain(0, 1), "RANK": "0"}, "LOCAL_RANK"), "local"),
    ("LOCAL_RANK that is no number", {"LOCAL_RANK": "auto"}, "local"),
    ("a rank of srun's that exports its local rank", {**step(), "LOCAL_RANK": "1"}, "slurm"),
    ("all but RUN_ID of torchrun", without(torchrun(), "TORCHELASTIC_RUN_ID"), "plain"),
    ("a pod that is no PyTorchJob", {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}, "local"),
    ("OMPI_UNIVERSE_SIZE alone", {"OMPI_UNIVERSE_SIZE": "2"}, "local"),
    ("LSF's own script", bsub(), "local"),
    ("PBS without PALS", {"PBS_JOBID": "391.pbs", "PBS_NODEFILE": "/nowhere"}, "local"),
    ("an allocation", allocation(), "local"),
    ("a batch step of one task", batch(1), "local"),
    ("Jupyter on a Slurm node", batch(1, "ood-jupyter"), "local"),
    ("an array's batch step", {**batch(), "SLURM_ARRAY_TASK_ID": "3"}, "local"),
    ("an interactive step", {**step(0, "1", place=(0, 0)), "SLURM_STEP_ID": "4294967290"}, "local"),
    (
        "an interactive step of two nodes",
        {**step(0, "2", place=(0, 0)), "SLURM_STEP_ID": "4294967290"},
        "local",
    ),
    ("a blank step id", {**batch(), "SLURM_STEP_ID": ""}, "local"),
]

REFUSED: list[tuple[str, Variables, str]] = [
    # ---- a launcher was at work, but its set has a hole
    ("torchrun without RANK", without(torchrun(), "RANK"), "RANK is not set"),
    ("torchrun without address", without(torchrun(), "MASTER_ADDR"), "MASTER_ADDR is not set"),
    ("step without its size", without(step(), "SLURM_STEP_NUM_TASKS"), "SLURM_STEP_NUM_TASKS is not set"),
    ("step without a rank", without(step(), "SLURM_PROCID"), "SLURM_PROCID is not set"),
    ("step without its nodes", without(step(), "SLURM_STEP_NODELIST"), "SLURM_STEP_NODELIST is not set"),
    ("Open MPI without a size", without(open_mpi(), "OMPI_COMM_WORLD_SIZE"), "SIZE is not set"),
    ("hydra without PMI", without(hydra(), "PMI_SIZE", "PMI_RANK"), "PMI_RANK, PMI_SIZE is not set"),
    ("jsrun without a local rank", without(jsrun(), "JSM_NAMESPACE_LOCAL_RANK"), "LOCAL_RANK is not set"),
    ("PALS without a node", without(pals(), "PALS_NODEID"), "PALS_NODEID is not set"),
    # ---- one of several, by a set that is nobody's
    (
        "RANK and WORLD_SIZE",
        {"RANK": "0", "WORLD_SIZE": "2"},
        "plain.*LOCAL_RANK, MASTER_ADDR, MASTER_PORT is",
    ),
    ("a later rank alone", {"RANK": "3"}, "RANK is not set|WORLD_SIZE, LOCAL_RANK"),
    ("a later node alone", {"NODE_RANK": "1"}, "nodes.*MASTER_ADDR, MASTER_PORT is not set"),
    ("by hand without an address", without(by_hand(0), "MASTER_ADDR"), "nodes.*MASTER_ADDR is not set"),
    (
        "PMI_RANK and PMI_SIZE alone",
        {"PMI_RANK": "0", "PMI_SIZE": "2"},
        "MPI_LOCALRANKID, MPI_LOCALNRANKS is",
    ),
    (
        "pod without an address",
        without(train_job(0), "PET_MASTER_ADDR"),
        "trainjob.*PET_MASTER_ADDR is not set",
    ),
    (
        "SkyPilot without a number",
        without(skypilot(0), "SKYPILOT_NUM_NODES"),
        "SKYPILOT_NUM_NODES is not set",
    ),
    ("SkyPilot without addresses", without(skypilot(0), "SKYPILOT_NODE_IPS"), "SKYPILOT_NODE_IPS is not set"),
    ("LOCAL_RANK on a node of SkyPilot", {**skypilot(0), "LOCAL_RANK": "1"}, "RANK, WORLD_SIZE"),
    ("two hosts of SageMaker", sagemaker(0), "SM_HOSTS means several"),
    # ---- contradictions
    ("torchrun, rank too high", {**torchrun(), "RANK": "2"}, "global_rank=2"),
    ("step, rank too high", {**step(), "SLURM_PROCID": "2"}, "global_rank=2"),
    ("step, local rank too high", {**step(), "SLURM_LOCALID": "2"}, "local_rank=2"),
    ("step, node too high", {**step(), "SLURM_NODEID": "1"}, "SLURM_NODEID"),
    ("step, counts do not add up", {**step(), "SLURM_STEP_TASKS_PER_NODE": "3"}, "does not add up"),
    ("step, counts of other nodes", {**step(), "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, "does not add up"),
    ("step inherited by sbatch", {**batch(), **without(step(0, place=(0, 0)), "SLURM_GTIDS")}, "inherited"),
    (
        "mpirun of one inside of a step of four",
        {**step(3, "4", place=(0, 3)), **open_mpi(0, 1)},
        "both claim",
    ),
    ("mpirun and srun disagree", {**step(1, "2"), **open_mpi(0, 2)}, "both claim"),
    ("mpirun, rank too high", open_mpi(5, 2, 0), "global_rank=5"),
    ("mpirun, more here than there are", open_mpi(1, 2, 1, 3), "world_size=2"),
    ("hydra, no ranks here", {**hydra(), "MPI_LOCALNRANKS": "0"}, "local_rank=1"),
    ("jsrun, rank too high", jsrun(9, 2, 2), "global_rank=9"),
    ("PALS, node too high", {**pals(), "PALS_NODEID": "7"}, "node_rank=7"),
    ("pod, rank too high", {**pod(), "RANK": "2", "PET_NODE_RANK": "2"}, "node_rank|global_rank"),
    ("pod, two ranks", {**pod(), "PET_NODE_RANK": "0"}, "not the same"),
    ("pod, sizes disagree", {**pod(), "PET_NNODES": "3"}, "WORLD_SIZE is not"),
    ("pod, size no multiple", {**without(pod(1, 2, "2"), "PET_NNODES"), "WORLD_SIZE": "3"}, "PET_NNODES"),
    ("plain, LOCAL_RANK unknown", without(plain(), "LOCAL_RANK"), "LOCAL_RANK is not set"),
    (
        "plain, LOCAL_RANK unknown, in a batch script",
        {**batch(), **without(plain(0), "LOCAL_RANK")},
        "LOCAL_RANK is not set",
    ),
    (
        "plain, LOCAL_RANK unknown, several nodes",
        without({**plain(3, 4), "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK"),
        "LOCAL_RANK is not set",
    ),
    ("Lightning's ranks by hand", {**by_hand(), "LOCAL_RANK": "1"}, "RANK, WORLD_SIZE is not set"),
    ("Lightning's first rank by hand", {**by_hand(0), "LOCAL_RANK": "0"}, "RANK, WORLD_SIZE is not set"),
    ("Lightning's ranks by hand, with a size", without(local_plain(), "RANK"), "RANK is not set"),
    ("plain without a port", without(plain(), "MASTER_PORT"), "MASTER_PORT is not set"),
    ("plain, a blank port", {**plain(), "MASTER_PORT": "  "}, "MASTER_PORT is not set"),
    (
        "a second local rank alone",
        {"LOCAL_RANK": "1"},
        "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT is not set",
    ),
    ("a first local rank with an address", {"LOCAL_RANK": "0", "MASTER_ADDR": "a"}, "MASTER_PORT is not set"),
    ("a second of two ranks", {"RANK": "1", "WORLD_SIZE": "2"}, "MASTER_ADDR, MASTER_PORT is not set"),
    ("a rank of an unknown number", without(local_plain(), "WORLD_SIZE"), "WORLD_SIZE is not set"),
    ("plain, local rank differs", {**plain(), "LOCAL_RANK": "0"}, "LOCAL_WORLD_SIZE is not set"),
    ("plain, rank too high", {**plain(2), "LOCAL_RANK": "2"}, "global_rank=2"),
    ("by hand, node too high", {**by_hand(2)}, "node_rank=2|global_rank=2"),
    # ---- hostile
    ("torchrun, empty", {**torchrun(), "WORLD_SIZE": ""}, "WORLD_SIZE is not set"),
    ("torchrun, no number", {**torchrun(), "RANK": "${RANK}"}, "RANK is not a number"),
    ("torchrun, negative", {**torchrun(), "LOCAL_RANK": "-1"}, "LOCAL_RANK is not a number"),
    ("torchrun, huge", {**torchrun(), "WORLD_SIZE": "9" * 40}, "WORLD_SIZE is not a number"),
    ("plain, no number", {**plain(), "RANK": "nan"}, "RANK is not a number"),
    ("plain, negative", {**plain(), "LOCAL_RANK": "-1"}, "LOCAL_RANK is not a number"),
    ("plain, huge", {**plain(), "WORLD_SIZE": "10000001"}, "WORLD_SIZE is not a number from"),
    ("step, empty", {**step(), "SLURM_STEP_TASKS_PER_NODE": " "}, "SLURM_STEP_TASKS_PER_NODE is not set"),
    ("step, no number", {**step(), "SLURM_PROCID": "one"}, "SLURM_PROCID is not a number"),
    ("step, negative", {**step(), "SLURM_NODEID": "-1"}, "SLURM_NODEID is not a number"),
    ("step, huge", {**step(), "SLURM_STEP_NUM_TASKS": "9" * 40}, "SLURM_STEP_NUM_TASKS is not a number"),
    ("step, other digits", {**step(), "SLURM_LOCALID": "\u0661"}, "SLURM_LOCALID is not a number"),
    ("step, a strange id", {**step(), "SLURM_STEP_ID": "batch"}, "SLURM_STEP_ID is not a number"),
    ("step, a bomb of tasks", {**step(), "SLURM_STEP_TASKS_PER_NODE": "1(x999999999)"}, "at most 100000"),
    ("step, no counts", {**step(), "SLURM_STEP_TASKS_PER_NODE": "2(x"}, "SLURM_STEP_TASKS_PER_NODE"),
    ("step, strange tasks here", {**step(), "SLURM_GTIDS": "\x00,"}, "SLURM_GTIDS"),
    ("mpirun, a fraction", {**open_mpi(), "OMPI_COMM_WORLD_SIZE": "2.0"}, "OMPI_COMM_WORLD_SIZE is not"),
    ("hydra, a sign", {**hydra(), "PMI_RANK": "+1"}, "PMI_RANK is not a number"),
    ("jsrun, text", {**jsrun(), "JSM_NAMESPACE_SIZE": "many"}, "JSM_NAMESPACE_SIZE is not a number"),
    ("PALS, huge", {**pals(), "PMI_SIZE": "10000001"}, "PMI_SIZE is not a number from"),
    ("pod, no pods", {**pod(), "WORLD_SIZE": "0"}, "WORLD_SIZE is not a number from"),
    ("pod, strange count", {**pod(), "PET_NPROC_PER_NODE": "many"}, "PET_NPROC_PER_NODE is not a number"),
    ("pod, no processes", {**pod(), "PET_NPROC_PER_NODE": "0"}, "PET_NPROC_PER_NODE is not a number from"),
    ("TrainJob, rank too high", train_job(2), "node_rank=2|global_rank=2"),
    ("TrainJob, elastic nodes", {**train_job(), "PET_NNODES": "1:4"}, "PET_NNODES is not a number"),
    ("SkyPilot, rank too high", skypilot(0) | {"SKYPILOT_NODE_RANK": "2"}, "node_rank=2|global_rank=2"),
    ("pod, elastic nodes", {**pod(), "PET_NNODES": "1:4"}, "PET_NNODES is not a number"),
    ("mpirun, negative", {**open_mpi(), "OMPI_COMM_WORLD_LOCAL_RANK": "-1"}, "LOCAL_RANK is not a number"),
    ("mpirun, empty", {**open_mpi(), "OMPI_COMM_WORLD_LOCAL_SIZE": ""}, "LOCAL_SIZE is not set"),
    ("jsrun, negative", {**jsrun(), "JSM_NAMESPACE_RANK": "-1"}, "JSM_NAMESPACE_RANK is not a number"),
    ("jsrun, empty", {**jsrun(), "LSB_JOBID": ""}, "LSB_JOBID is not set"),
    ("PALS, no number", {**pals(), "PALS_NODEID": "x1000c0s0b0n0"}, "PALS_NODEID is not a number"),
    ("pod, negative", {**pod(), "RANK": "-1"}, "RANK is not a number"),
    ("by hand, no number", {**by_hand(), "NODE_RANK": "first"}, "NODE_RANK is not a number"),
    ("by hand, no nodes", {**by_hand(), "NNODES": "0"}, "node_rank=1|global_rank=1"),
]


PRESET = [
    {"WORLD_SIZE": "2"},
    {"NNODES": "2"},
    {"PET_NNODES": "1:4"},
    {"SLURM_STEP_NUM_NODES": "2"},
    {"GROUP_WORLD_SIZE": "2"},
]

# Each launcher: the variables of the second process of two (or of the only one), what is found, and where.
SECOND, SECOND_NODE = RankInfo(1, 1, 0, 2, 2, 1), RankInfo(1, 0, 1, 2, 1, 2)
LAUNCHERS: dict[str, tuple[Variables, str, RankInfo]] = {
    "PyTorchJob (Kubeflow v1)": (pod(), "kubeflow", SECOND_NODE),
    "TrainJob (Kubeflow v2)": (train_job(), "trainjob", SECOND_NODE),
    "SkyPilot": (skypilot(), "skypilot", SECOND_NODE),
    "SageMaker with torchrun": ({**sagemaker(), **torchrun()}, "torchelastic", SECOND),
    "SageMaker with MPI": ({**sagemaker(), **open_mpi(1, 2, 0, 1)}, "mpi", SECOND_NODE),
    "Ray Train": (ray_train(), "plain", SECOND),
    "Ray Train, two nodes": (ray_train(1, 2, 1), "plain", SECOND_NODE),
    "submitit on Slurm": ({**step(), "SUBMITIT_EXECUTOR": "slurm"}, "slurm", SECOND),
    "Slurm with srun": (step(1, "1(x2)", "n[1-2]", place=(1, 0)), "slurm", SECOND_NODE),
    "Slurm without srun": (batch(), "local", RankInfo(0, 0, 0, 1, 1, 1)),
    "Open MPI": (open_mpi(1, 2, 0, 1), "mpi", SECOND_NODE),
    "MPICH": (hydra(1, 2, 1), "mpi", SECOND_NODE),
    "LSF": (jsrun(1, 2, 1), "lsf", SECOND_NODE),
    "PALS": (pals(1, 2, 1), "pals", SECOND_NODE),
    "torchrun": (torchrun(), "torchelastic", SECOND),
}
# The processes of launchers that have no environment, the first one too.
WITHOUT_ENVIRONMENT = {
    "SageMaker": (sagemaker(0), sagemaker(1)),
    "submitit on this machine": (submitit_local(0), submitit_local(1)),
}


@pytest.mark.parametrize(("variables", "name", "ranks"), LAUNCHERS.values(), ids=list(LAUNCHERS))
def test_launchers(variables: Variables, name: str, ranks: RankInfo) -> None:
    """The process of each launcher has the right ranks, and each other candidate has a reason."""
    detection = detect_environment(variables)
    assert (detection.environment.name, detection.environment.ranks) == (name, ranks)
    assert all(detection.rejected.values())


@pytest.mark.parametrize("processes", WITHOUT_ENVIRONMENT.values(), ids=list(WITHOUT_ENVIRONMENT))
def test_launchers_without_an_environment(processes: tuple[Variables, ...]) -> None:
    """Each of several processes is refused, with what to set; none trains alone."""
    for variables in processes:
        with pytest.raises(EnvironmentVariableError, match="rankwise has no environment for") as caught:
            detect_environment(variables)
        assert "torchrun" in caught.value.fix()
        assert detect_environment({**variables, ENVIRONMENT_VARIABLE: "local"}).environment.name == "local"


@pytest.mark.parametrize("variables", PRESET, ids=str)
def test_a_number_without_a_rank(variables: Variables) -> None:
    """A number of processes or nodes that belongs to no complete set is a warning that names it."""
    [(name, value)] = variables.items()
    with pytest.warns(UserWarning, match=f"^{name}={value} is set, .* this process trains alone"):
        assert detect_environment(variables).environment.name == "local"
    assert detect_environment({**variables, ENVIRONMENT_VARIABLE: "local"}).environment.name == "local"


def test_the_right_environment() -> None:
    """The launcher of the process is found, and each other candidate has a reason."""
    for case, variables, name in FOUND:
        detection = detect_environment(variables)
        assert detection.environment.name == name, case
        assert all(detection.rejected.values()), case


def test_the_right_error() -> None:
    """A launcher whose variables are wrong is an error that says so."""
    for case, variables, problem in REFUSED:
        with pytest.raises(EnvironmentVariableError) as caught:
            detect_environment(variables)
        assert re.search(problem, str(caught.value)), case


@pytest.mark.parametrize("variables", [local_plain(), one_node()], ids=["loopback", "LOCAL_WORLD_SIZE"])
def test_local_rank_on_one_node(variables: Variables) -> None:
    """What `env://` needs is enough on one node: the local rank is the global rank."""
    found = detect_environment(without(variables, "LOCAL_RANK")).environment
    assert found.ranks == RankInfo(1, 1, 0, 2, 2, 1)


@pytest.mark.parametrize("rank", range(4))
def test_nodes_of_equal_size(rank: int) -> None:
    """Without a variable for it the node follows from the ranks."""
    found = detect_environment({**plain(rank, 4), "LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2"})
    assert found.environment.ranks == RankInfo(rank, rank % 2, rank // 2, 4, 2, 2)


def test_the_error_says_what_to_set() -> None:
    """A set that lacks one rank is refused with what to set, and how to start nodes instead."""
    for missing in ("RANK", "LOCAL_RANK"):
        with pytest.raises(EnvironmentVariableError) as caught:
            detect_environment(without(plain(), missing))
        assert "set RANK, WORLD_SIZE, LOCAL_RANK" in caught.value.fix()
        assert "RANKWISE_ENVIRONMENT=local" in caught.value.fix()


def reason(variables: Variables, name: str) -> str:
    return detect_environment(variables).rejected[name]


def test_reasons() -> None:
    """All environments but the found and the last one have a reason, which describes the situation."""
    assert set(detect_environment(open_mpi()).rejected) == set(environment_names()) - {"mpi", "local"}
    assert (
        reason(batch(), "slurm") == "this is a batch step (SLURM_STEP_ID is not set): srun has not started it"
    )
    assert reason(allocation(), "slurm").startswith("this is a shell in an allocation")
    assert reason(bsub(), "lsf").startswith("this is the job's own script")
    assert "mpirun is nearer" in reason({**step(0, "1", place=(0, 0)), **open_mpi(3, 4, 1, 2)}, "slurm")
    assert reason({**jsrun()}, "mpi") == "lsf is nearer to this process"


def test_wrong_variables_of_a_later_candidate() -> None:
    """A later candidate's broken variables do not prevent detection of an earlier one."""
    detection = detect_environment({**step(), **without(pals(), "PALS_NODEID")})
    assert detection.environment.name == "slurm"
    assert detection.rejected["pals"] == "PALS_NODEID is not set"
