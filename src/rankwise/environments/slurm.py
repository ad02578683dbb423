"""Slurm: a task of a step that `srun` (or an `srun`-like launcher, such as submitit's) has started."""

from __future__ import annotations

import signal
import subprocess
import warnings
from collections.abc import Mapping
from typing import ClassVar, final

from rankwise.environments.base import ClusterEnvironment
from rankwise.environments.mpi import MPIEnvironment
from rankwise.environments.node_list import expand_counts, expand_node_list
from rankwise.errors import InvalidArgumentError
from rankwise.ranks import RankInfo

__all__ = ["SlurmEnvironment"]

# From here up, Slurm's step ids are no steps of srun: a batch script, an allocation's own shell, ...
# Source: SLURM_MAX_NORMAL_STEP_ID in slurm.h
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
# How long a controller may take to answer; the job's time is about to be up.
_REQUEUE_TIMEOUT_S = 30.0


@final
class SlurmEnvironment(ClusterEnvironment):
    """A task of a Slurm step; only the step's variables count, those of the allocation do not.

    An allocation (`SLURM_NTASKS`, `SLURM_JOB_NAME`, ...) says what a job may use, not what runs: a batch
    script, a shell in an allocation and a notebook are one process each. A step of a single task is alone
    as well, so a strategy may start further processes in it.

    `MASTER_ADDR` and `MASTER_PORT` overrule the address (the step's first node) and the port (from the ids
    of job and step).

    Args:
        environ: the variables; by default those of the process.
        requeue_signal: what announces the end of the job's time, as with `sbatch --signal=USR1@90`; None for
            nothing.
        auto_requeue: whether the job is put back into the queue once training has stopped for that signal.

    Source: https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES
    """

    name = "slurm"
    markers = ("SLURM_STEP_ID",)
    variables: ClassVar[Mapping[str, str]] = {
        "global_rank": "SLURM_PROCID",
        "world_size": "SLURM_STEP_NUM_TASKS",
        "local_rank": "SLURM_LOCALID",
        "node_rank": "SLURM_NODEID",
        "num_nodes": "SLURM_STEP_NUM_NODES",
    }
    required = ("SLURM_JOB_ID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST")
    optional = ("SLURM_GTIDS", "SLURM_JOB_NAME", "SLURMD_NODENAME", "MASTER_ADDR", "MASTER_PORT")
    job_variables = ("SLURM_JOB_ID", "SLURM_STEP_ID")

    def __init__(
        self,
        environ: Mapping[str, str] | None = None,
        *,
        requeue_signal: signal.Signals | None = signal.SIGUSR1,
        auto_requeue: bool = False,
    ) -> None:
        super().__init__(environ)
        self.requeue_signal = None if requeue_signal is None else signal.Signals(requeue_signal)
        self.auto_requeue = auto_requeue

    @classmethod
    def rejection(cls, environ: Mapping[str, str]) -> str | None:
        """Return why this is no task of a step, or of one that has started something nearer."""
        if not environ.get("SLURM_STEP_ID", "").strip():
            return _outside_of_steps(environ)
        if cls(environ)._is_special_step:
            return f"SLURM_STEP_ID={environ['SLURM_STEP_ID']} is the allocation's own shell, no step of srun"
        return super().rejection(environ) or cls(environ)._beside_mpi(MPIEnvironment)

    @property
    def creates_processes_externally(self) -> bool:
        """Whether the step has several tasks; a single one may start others."""
        return self.world_size > 1

    @property
    def local_world_size(self) -> int:
        """The number of tasks on this node, which need not be the same on each."""
        counts = self._tasks_per_node()
        if len(counts) != self.num_nodes or sum(counts) != self.world_size:
            raise self._values.error(
                "SLURM_STEP_TASKS_PER_NODE does not add up to SLURM_STEP_NUM_TASKS on SLURM_STEP_NUM_NODES",
                self.seen(),
            )
        if self.node_rank >= len(counts):
            raise self._values.error("SLURM_NODEID is not below SLURM_STEP_NUM_NODES", self.seen())
        return counts[self.node_rank]

    @property
    def main_address(self) -> str:
        """`MASTER_ADDR`, or the step's first node."""
        if self._values.has("MASTER_ADDR"):
            return self._values.text("MASTER_ADDR")
        return self._nodes()[0]

    @property
    def other_node(self) -> str | None:
        """The step's second node."""
        return next(iter(self._nodes()[1:]), None)

    @property
    def ranks(self) -> RankInfo:
        """All ranks at once, validated against each other and against `SLURM_GTIDS`."""
        ranks = super().ranks
        if self._values.has("SLURM_GTIDS"):
            here = self._values.text("SLURM_GTIDS").split(",")
            if len(here) != ranks.local_world_size or str(ranks.global_rank) not in here:
                raise self._values.error(
                    "SLURM_GTIDS, the tasks on this node, is of another step than SLURM_STEP_*: these were "
                    "inherited from where the job was submitted",
                    self.seen(),
                )
        return ranks

    def requeue(self) -> None:
        """Put the job back into the queue with `scontrol requeue`; say so where that fails."""
        if not self.auto_requeue:
            return
        array = [self._values.environ.get(f"SLURM_ARRAY_{part}", "") for part in ("JOB_ID", "TASK_ID")]
        job = "_".join(array) if all(array) else self._values.text("SLURM_JOB_ID")
        try:
            command = ["scontrol", "requeue", job]
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=_REQUEUE_TIMEOUT_S)
        except (OSError, subprocess.SubprocessError) as error:
            said = error.stderr if isinstance(error, subprocess.CalledProcessError) else ""
            warnings.warn(f"scontrol requeue {job} failed: {said.strip() or error}", stacklevel=2)

    def _nodes(self) -> list[str]:
        try:
            return expand_node_list(self._values.text("SLURM_STEP_NODELIST"))
        except InvalidArgumentError as error:
            raise self._values.error(f"SLURM_STEP_NODELIST: {error.summary()}", self.seen()) from None

    def _tasks_per_node(self) -> list[int]:
        try:
            return expand_counts(self._values.text("SLURM_STEP_TASKS_PER_NODE"))
        except InvalidArgumentError as error:
            raise self._values.error(f"SLURM_STEP_TASKS_PER_NODE: {error.summary()}", self.seen()) from None

    @property
    def _is_special_step(self) -> bool:
        return self._values.number("SLURM_STEP_ID", highest=0xFFFFFFFF) >= _FIRST_SPECIAL_STEP

    def _beside_mpi(self, mpi: type[MPIEnvironment]) -> str | None:
        """Return why an MPI launcher's variables, seen beside the step's, are nearer to this process.

        mpirun starts its daemons with srun, one on each node, and its ranks inherit the daemon's step. So a
        step with one task on each node yields. Where that cannot be, one of the two was inherited.
        """
        if mpi.rejection(self._values.environ) is not None:
            return None
        step, ranks = self.ranks, mpi(self._values.environ).ranks
        if (step.global_rank, step.world_size) == (ranks.global_rank, ranks.world_size):
            return None
        may_be_daemons = set(self._tasks_per_node()) == {1} and (ranks.world_size > 1 or step.world_size == 1)
        if may_be_daemons:
            return "mpirun is nearer: the step's tasks are its daemons, one on each node"
        raise self._values.error(
            f"a step of srun (task {step.global_rank} of {step.world_size}) and mpirun (rank "
            f"{ranks.global_rank} of {ranks.world_size}) both claim this process; name the one that started "
            "it: RANKWISE_ENVIRONMENT=slurm or RANKWISE_ENVIRONMENT=mpi",
            {**self.seen(), **mpi(self._values.environ).seen()},
        )


def _outside_of_steps(environ: Mapping[str, str]) -> str:
    if not environ.get("SLURM_JOB_ID", "").strip():
        return "SLURM_JOB_ID and SLURM_STEP_ID not set"
    if environ.get("SLURM_PROCID", "").strip():
        return "this is a batch step (SLURM_STEP_ID is not set): srun has not started it"
    return "this is a shell in an allocation (SLURM_STEP_ID is not set): srun has not started it"
