"""Variables as launchers set them, for tests to use and to change."""

import json
import shlex

Variables = dict[str, str]


def shell_variables(text: str) -> Variables:
    """Return the variables that a shell would set for this text."""
    return {name: value for name, _, value in (word.partition("=") for word in shlex.split(text))}


def torchrun(rank: int = 1, size: int = 2) -> Variables:
    """One node, under torchrun."""
    return shell_variables(f"""
        TORCHELASTIC_RUN_ID=none TORCHELASTIC_RESTART_COUNT=0 RANK={rank} WORLD_SIZE={size} LOCAL_RANK={rank}
        LOCAL_WORLD_SIZE={size} GROUP_RANK=0 GROUP_WORLD_SIZE=1 ROLE_RANK={rank} MASTER_ADDR=localhost
        MASTER_PORT=29400
    """)


def allocation(tasks: int = 2, name: str = "train") -> Variables:
    """A shell in an allocation of one node, as with `salloc`."""
    return shell_variables(f"""
        SLURM_JOB_ID=1042 SLURM_JOBID=1042 SLURM_JOB_NAME={name} SLURM_JOB_NODELIST=n1 SLURM_NODELIST=n1
        SLURM_JOB_NUM_NODES=1 SLURM_NNODES=1 SLURM_NTASKS={tasks} SLURM_NPROCS={tasks}
        SLURM_TASKS_PER_NODE={tasks} SLURM_SUBMIT_HOST=login
    """)


def batch(tasks: int = 2, name: str = "train") -> Variables:
    """The batch script of a job: one process, for any `SLURM_NTASKS`."""
    return {
        **allocation(tasks, name),
        **shell_variables("SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_GTIDS=0 SLURMD_NODENAME=n1"),
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
    tasks_here = ",".join(str(first + index) for index in range(counts[node]))
    return {
        **allocation(sum(counts)),
        **shell_variables(f"""
            SLURM_STEP_ID=3 SLURM_STEPID=3 SLURM_STEP_NUM_TASKS={sum(counts)}
            SLURM_STEP_NUM_NODES={len(counts)} SLURM_STEP_TASKS_PER_NODE={per_node}
            SLURM_STEP_NODELIST={nodes} SLURM_PROCID={rank} SLURM_LOCALID={local} SLURM_NODEID={node}
            SLURM_GTIDS={tasks_here} SLURM_TASK_PID=4711
        """),
    }


def open_mpi(
    rank: int = 1, size: int = 2, local: int | None = None, local_size: int | None = None
) -> Variables:
    """A rank of Open MPI's mpirun."""
    return shell_variables(f"""
        OMPI_COMM_WORLD_RANK={rank} OMPI_COMM_WORLD_SIZE={size}
        OMPI_COMM_WORLD_LOCAL_RANK={rank if local is None else local}
        OMPI_COMM_WORLD_LOCAL_SIZE={size if local_size is None else local_size}
        OMPI_COMM_WORLD_NODE_RANK={rank if local is None else local} OMPI_UNIVERSE_SIZE={size}
        PMIX_NAMESPACE=814546945 PMIX_RANK={rank}
    """)


def hydra(rank: int = 1, size: int = 2, local_size: int | None = None) -> Variables:
    """A rank of mpiexec.hydra: MPICH and Intel MPI."""
    on_node = size if local_size is None else local_size
    return shell_variables(f"""
        PMI_RANK={rank} PMI_SIZE={size} PMI_FD=8 MPI_LOCALRANKID={rank % on_node} MPI_LOCALNRANKS={on_node}
        HYDI_CONTROL_FD=7
    """)


def jsrun(rank: int = 1, size: int = 2, local_size: int | None = None) -> Variables:
    """A task of jsrun in a job of LSF, with the variables of Spectrum MPI."""
    on_node = size if local_size is None else local_size
    return {
        **bsub(),
        **shell_variables(f"""
            JSM_NAMESPACE_ID=1 JSM_NAMESPACE_RANK={rank} JSM_NAMESPACE_SIZE={size}
            JSM_NAMESPACE_LOCAL_RANK={rank % on_node} JSM_NAMESPACE_LOCAL_SIZE={on_node}
        """),
        **open_mpi(rank, size, rank % on_node, on_node),
    }


def bsub() -> Variables:
    """The script of a job of LSF."""
    return shell_variables("""
        LSB_JOBID=77 LSB_JOBINDEX=0 LSB_JOBNAME=train LSB_QUEUE=batch LSB_DJOB_NUMPROC=3
        LSB_HOSTS='batch1 node1 node1' LSB_MCPU_HOSTS='batch1 1 node1 2' LSB_SUB_HOST=login1
    """)


def pals(rank: int = 1, size: int = 2, local_size: int | None = None) -> Variables:
    """A rank of PALS."""
    on_node = size if local_size is None else local_size
    return shell_variables(f"""
        PBS_JOBID=391.pbs PALS_APID=0c7a PALS_RANKID={rank} PALS_LOCAL_RANKID={rank % on_node}
        PALS_NODEID={rank // on_node} PALS_DEPTH=1 PMI_RANK={rank} PMI_SIZE={size}
        PMI_LOCAL_RANK={rank % on_node} PMI_LOCAL_SIZE={on_node}
    """)


def pod(rank: int = 1, pods: int = 2, per_pod: str = "auto") -> Variables:
    """A pod of a PyTorchJob."""
    count = int(per_pod) if per_pod.isdecimal() else 1
    return shell_variables(f"""
        KUBERNETES_SERVICE_HOST=10.96.0.1 KUBERNETES_PORT=tcp://10.96.0.1:443 PYTHONUNBUFFERED=1
        MASTER_ADDR=job-master-0 MASTER_PORT=23456 RANK={rank} WORLD_SIZE={pods * count}
        PET_MASTER_ADDR=job-master-0 PET_MASTER_PORT=23456 PET_NPROC_PER_NODE={per_pod} PET_NNODES={pods}
        PET_NODE_RANK={rank}
    """)


def train_job(rank: int = 1, pods: int = 2, per_pod: str = "auto") -> Variables:
    """A pod of a TrainJob of Kubeflow Trainer v2, whose command does not start torchrun."""
    return shell_variables(f"""
        KUBERNETES_SERVICE_HOST=10.96.0.1 PET_NNODES={pods} PET_NPROC_PER_NODE={per_pod} PET_NODE_RANK={rank}
        PET_MASTER_ADDR=job-node-0-0.job PET_MASTER_PORT=29400 JOB_COMPLETION_INDEX={rank}
    """)


def skypilot(rank: int = 1, nodes: int = 2) -> Variables:
    """A node of a SkyPilot task."""
    addresses = "\n".join(f"10.0.0.{node + 1}" for node in range(nodes))
    return shell_variables(f"""
        SKYPILOT_NODE_RANK={rank} SKYPILOT_NODE_IPS='{addresses}'
        SKYPILOT_NUM_NODES={nodes} SKYPILOT_NUM_GPUS_PER_NODE=0
        SKYPILOT_TASK_ID=sky-2026-01-05-10-11-12-345678_train_1
    """)


def sagemaker(rank: int = 1, hosts: int = 2) -> Variables:
    """A host of a training job of SageMaker, whose script no launcher starts."""
    names = [f"algo-{host + 1}" for host in range(hosts)]
    return shell_variables(f"""
        SM_HOSTS='{json.dumps(names)}' SM_CURRENT_HOST={names[rank]} SM_NUM_GPUS=0 TRAINING_JOB_NAME=train
    """)


def ray_train(rank: int = 1, size: int = 2, local_size: int | None = None) -> Variables:
    """A worker of Ray Train's TorchTrainer."""
    on_node = size if local_size is None else local_size
    return shell_variables(f"""
        RANK={rank} LOCAL_RANK={rank % on_node} WORLD_SIZE={size} LOCAL_WORLD_SIZE={on_node}
        NODE_RANK={rank // on_node} MASTER_ADDR=10.0.0.1 MASTER_PORT=40001
    """)


def submitit_local(rank: int = 1, size: int = 2) -> Variables:
    """A task of submitit's executor for this machine."""
    return shell_variables(f"""
        SUBMITIT_EXECUTOR=local SUBMITIT_LOCAL_JOB_ID=4711 SUBMITIT_LOCAL_NTASKS={size}
        SUBMITIT_LOCAL_JOB_NUM_NODES=1 SUBMITIT_LOCAL_NODEID=0 SUBMITIT_LOCAL_GLOBALID={rank}
        SUBMITIT_LOCAL_LOCALID={rank}
    """)


def plain(rank: int = 1, size: int = 2) -> Variables:
    """Torch's own variables."""
    return shell_variables(f"""
        RANK={rank} WORLD_SIZE={size} LOCAL_RANK={rank} MASTER_ADDR=10.0.0.1 MASTER_PORT=5000
    """)


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
