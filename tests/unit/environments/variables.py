"""Variables as launchers set them, for tests to use and to change."""

import json

Variables = dict[str, str]


def torchrun(rank: int = 1, size: int = 2) -> Variables:
    """One node, under torchrun."""
    return {
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_RANK": str(rank),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29400",
    }


def allocation(tasks: int = 2, name: str = "train") -> Variables:
    """A shell in an allocation of one node, as with `salloc`."""
    return {
        "SLURM_JOB_ID": "1042",
        "SLURM_JOBID": "1042",
        "SLURM_JOB_NAME": name,
        "SLURM_JOB_NODELIST": "n1",
        "SLURM_NODELIST": "n1",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_NNODES": "1",
        "SLURM_NTASKS": str(tasks),
        "SLURM_NPROCS": str(tasks),
        "SLURM_TASKS_PER_NODE": str(tasks),
        "SLURM_SUBMIT_HOST": "login",
    }


def batch(tasks: int = 2, name: str = "train") -> Variables:
    """The batch script of a job: one process, for any `SLURM_NTASKS`."""
    return {
        **allocation(tasks, name),
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
        "SLURM_GTIDS": "0",
        "SLURMD_NODENAME": "n1",
    }


def step(
    rank: int = 1, per_node: str = "2", nodes: str = "n1", *, place: tuple[int, int] = (0, 1)
) -> Variables:
    """A task of a step of srun; `place` is its node and its id there."""
    counts = [
        int(count.partition("(x")[0])
        for count in per_node.split(",")
        for _ in range(int(count.partition("(x")[2].rstrip(")") or 1))
    ]
    node, local = place
    first = sum(counts[:node])
    return {
        **allocation(sum(counts)),
        "SLURM_STEP_ID": "3",
        "SLURM_STEPID": "3",
        "SLURM_STEP_NUM_TASKS": str(sum(counts)),
        "SLURM_STEP_NUM_NODES": str(len(counts)),
        "SLURM_STEP_TASKS_PER_NODE": per_node,
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local),
        "SLURM_NODEID": str(node),
        "SLURM_GTIDS": ",".join(str(first + index) for index in range(counts[node])),
        "SLURM_TASK_PID": "4711",
    }


def open_mpi(
    rank: int = 1, size: int = 2, local: int | None = None, local_size: int | None = None
) -> Variables:
    """A rank of Open MPI's mpirun."""
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank if local is None else local),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(size if local_size is None else local_size),
        "OMPI_COMM_WORLD_NODE_RANK": str(rank if local is None else local),
        "OMPI_UNIVERSE_SIZE": str(size),
        "PMIX_NAMESPACE": "814546945",
        "PMIX_RANK": str(rank),
    }


def hydra(rank: int = 1, size: int = 2, local_size: int | None = None) -> Variables:
    """A rank of mpiexec.hydra: MPICH and Intel MPI."""
    on_node = size if local_size is None else local_size
    return {
        "PMI_RANK": str(rank),
        "PMI_SIZE": str(size),
        "PMI_FD": "8",
        "MPI_LOCALRANKID": str(rank % on_node),
        "MPI_LOCALNRANKS": str(on_node),
        "HYDI_CONTROL_FD": "7",
    }


def jsrun(rank: int = 1, size: int = 2, local_size: int | None = None) -> Variables:
    """A task of jsrun in a job of LSF, with the variables of Spectrum MPI."""
    on_node = size if local_size is None else local_size
    return {
        **bsub(),
        "JSM_NAMESPACE_ID": "1",
        "JSM_NAMESPACE_RANK": str(rank),
        "JSM_NAMESPACE_SIZE": str(size),
        "JSM_NAMESPACE_LOCAL_RANK": str(rank % on_node),
        "JSM_NAMESPACE_LOCAL_SIZE": str(on_node),
        **open_mpi(rank, size, rank % on_node, on_node),
    }


def bsub() -> Variables:
    """The script of a job of LSF."""
    return {
        "LSB_JOBID": "77",
        "LSB_JOBINDEX": "0",
        "LSB_JOBNAME": "train",
        "LSB_QUEUE": "batch",
        "LSB_DJOB_NUMPROC": "3",
        "LSB_HOSTS": "batch1 node1 node1",
        "LSB_MCPU_HOSTS": "batch1 1 node1 2",
        "LSB_SUB_HOST": "login1",
    }


def pals(rank: int = 1, size: int = 2, local_size: int | None = None) -> Variables:
    """A rank of PALS."""
    on_node = size if local_size is None else local_size
    return {
        "PBS_JOBID": "391.pbs",
        "PALS_APID": "0c7a",
        "PALS_RANKID": str(rank),
        "PALS_LOCAL_RANKID": str(rank % on_node),
        "PALS_NODEID": str(rank // on_node),
        "PALS_DEPTH": "1",
        "PMI_RANK": str(rank),
        "PMI_SIZE": str(size),
        "PMI_LOCAL_RANK": str(rank % on_node),
        "PMI_LOCAL_SIZE": str(on_node),
    }


def pod(rank: int = 1, pods: int = 2, per_pod: str = "auto") -> Variables:
    """A pod of a PyTorchJob."""
    count = int(per_pod) if per_pod.isdecimal() else 1
    return {
        "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        "KUBERNETES_PORT": "tcp://10.96.0.1:443",
        "PYTHONUNBUFFERED": "1",
        "MASTER_ADDR": "job-master-0",
        "MASTER_PORT": "23456",
        "RANK": str(rank),
        "WORLD_SIZE": str(pods * count),
        "PET_MASTER_ADDR": "job-master-0",
        "PET_MASTER_PORT": "23456",
        "PET_NPROC_PER_NODE": per_pod,
        "PET_NNODES": str(pods),
        "PET_NODE_RANK": str(rank),
    }


def train_job(rank: int = 1, pods: int = 2, per_pod: str = "auto") -> Variables:
    """A pod of a TrainJob of Kubeflow Trainer v2, whose command does not start torchrun."""
    return {
        "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        "PET_NNODES": str(pods),
        "PET_NPROC_PER_NODE": per_pod,
        "PET_NODE_RANK": str(rank),
        "PET_MASTER_ADDR": "job-node-0-0.job",
        "PET_MASTER_PORT": "29400",
        "JOB_COMPLETION_INDEX": str(rank),
    }


def skypilot(rank: int = 1, nodes: int = 2) -> Variables:
    """A node of a SkyPilot task."""
    return {
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NODE_IPS": "\n".join(f"10.0.0.{node + 1}" for node in range(nodes)),
        "SKYPILOT_NUM_NODES": str(nodes),
        "SKYPILOT_NUM_GPUS_PER_NODE": "0",
        "SKYPILOT_TASK_ID": "sky-2026-01-05-10-11-12-345678_train_1",
    }


def sagemaker(rank: int = 1, hosts: int = 2) -> Variables:
    """A host of a training job of SageMaker, whose script no launcher starts."""
    names = [f"algo-{host + 1}" for host in range(hosts)]
    return {
        "SM_HOSTS": json.dumps(names),
        "SM_CURRENT_HOST": names[rank],
        "SM_NUM_GPUS": "0",
        "TRAINING_JOB_NAME": "train",
    }


def ray_train(rank: int = 1, size: int = 2, local_size: int | None = None) -> Variables:
    """A worker of Ray Train's TorchTrainer."""
    on_node = size if local_size is None else local_size
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % on_node),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(on_node),
        "NODE_RANK": str(rank // on_node),
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "40001",
    }


def submitit_local(rank: int = 1, size: int = 2) -> Variables:
    """A task of submitit's executor for this machine."""
    return {
        "SUBMITIT_EXECUTOR": "local",
        "SUBMITIT_LOCAL_JOB_ID": "4711",
        "SUBMITIT_LOCAL_NTASKS": str(size),
        "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
        "SUBMITIT_LOCAL_NODEID": "0",
        "SUBMITIT_LOCAL_GLOBALID": str(rank),
        "SUBMITIT_LOCAL_LOCALID": str(rank),
    }


def plain(rank: int = 1, size: int = 2) -> Variables:
    """Torch's own variables."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "5000",
    }


def local_plain(rank: int = 1, size: int = 2) -> Variables:
    """Torch's own variables, with rank 0 at a loopback address."""
    return {**plain(rank, size), "MASTER_ADDR": "localhost"}


def one_node(rank: int = 1, size: int = 2) -> Variables:
    """Torch's own variables, with as many processes on this node as in the job."""
    return {**plain(rank, size), "LOCAL_WORLD_SIZE": str(size)}


def by_hand(node: int = 1) -> Variables:
    """One process on each node."""
    return {"NODE_RANK": str(node), "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5000", "NNODES": "2"}


def without(variables: Variables, *names: str) -> Variables:
    """Return the variables without some."""
    return {name: value for name, value in variables.items() if name not in names}
