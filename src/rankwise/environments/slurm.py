"""Slurm: tasks of a step that `srun` (or a similar launcher) has started; compressed lists of nodes."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice, repeat
from typing import ClassVar, TypeVar, final

from rankwise.environments.base import ClusterEnvironment, is_set, whole_number
from rankwise.environments.mpi import MPIEnvironment
from rankwise.errors import InvalidArgumentError
from rankwise.ranks import RankInfo, warn

T = TypeVar("T")

# Step ids from here on are not steps of srun, but a batch script, an allocation's own shell, ...
# Source: SLURM_MAX_NORMAL_STEP_ID in slurm.h
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
# How long the controller may take to answer, shortly before the job's time limit.
_REQUEUE_TIMEOUT_S = 30.0

_MAX_NODES = 100_000  # more than any cluster has: a longer list is damaged, and is not expanded
_MAX_NAME = 255  # characters of a node's name beside brackets: DNS allows no more
_MAX_BRACKETS = 16  # in a name: Slurm has names of five dimensions

_BRACKET = r"\[[^\[\]]*\]"
_WORD = rf"(?:[A-Za-z0-9._-]|{_BRACKET})+"
_LIST = f"{_WORD}(?:,{_WORD})*"
_RANGE = r"([0-9]{1,15})(?:-([0-9]{1,15}))?"
_COUNT = r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?"
_NAMES_WITH_RANGES = 'names with ranges, such as "gpu[01-03,7],login"'


@final
class SlurmEnvironment(ClusterEnvironment):
    """A task of a Slurm step; it reads the step's variables only, not the allocation's.

    The variables of an allocation (`SLURM_NTASKS`, `SLURM_JOB_NAME`, ...) describe what a job may use, not
    what runs: a batch script, a shell in an allocation and a notebook are one process each. In a step of a
    single task the strategy may start further processes too.

    `MASTER_ADDR` and `MASTER_PORT` override the address (the step's first node) and the port (computed from
    the ids of job and step).

    Args:
        environ: the variables; by default the process's.
        requeue_signal: the signal that announces the time limit, as with `sbatch --signal=USR1@90`; None for
            no signal.
        auto_requeue: whether the job is put back into the queue after training has stopped for that signal,
            as in Lightning, and `fit` without `ckpt_path` continues in a job that was requeued, from this
            step's newest checkpoint.

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
    optional = ("SLURM_GTIDS", "SLURM_JOB_NAME", "SLURMD_NODENAME")
    job_variables = ("SLURM_JOB_ID", "SLURM_STEP_ID")

    def __init__(
        self,
        environ: Mapping[str, str] | None = None,
        *,
        requeue_signal: signal.Signals | None = signal.SIGUSR1,
        auto_requeue: bool = True,
    ) -> None:
        super().__init__(environ)
        self.requeue_signal = None if requeue_signal is None else signal.Signals(requeue_signal)
        self.auto_requeue = auto_requeue

    @classmethod
    def rejection(cls, environ: Mapping[str, str]) -> str | None:
        """Return why srun has not started this process, or has started another launcher that did."""
        if not is_set("SLURM_STEP_ID", environ):
            if not is_set("SLURM_JOB_ID", environ):
                return "SLURM_JOB_ID and SLURM_STEP_ID not set"
            what = "batch step" if is_set("SLURM_PROCID", environ) else "shell in an allocation"
            return f"this is a {what} (SLURM_STEP_ID is not set): srun has not started it"
        step = cls(environ)._number("SLURM_STEP_ID", highest=0xFFFFFFFF)
        if step >= _FIRST_SPECIAL_STEP:
            return f"SLURM_STEP_ID={step} is the allocation's own shell, not a step of srun"
        return super().rejection(environ) or cls(environ)._rejection_beside(MPIEnvironment(environ))

    @property
    def creates_processes_externally(self) -> bool:
        """Whether the step has several tasks; in a single one the strategy may start processes."""
        return self.world_size > 1

    @property
    def local_world_size(self) -> int:
        """The number of tasks on this node, which may differ between nodes."""
        counts = self._expanded("SLURM_STEP_TASKS_PER_NODE", expand_counts)
        if len(counts) != self.num_nodes or sum(counts) != self.world_size:
            raise self._error(
                "SLURM_STEP_TASKS_PER_NODE does not add up to SLURM_STEP_NUM_TASKS on SLURM_STEP_NUM_NODES"
            )
        if self.node_rank >= len(counts):
            raise self._error("SLURM_NODEID is not below SLURM_STEP_NUM_NODES")
        return counts[self.node_rank]

    @property
    def other_node(self) -> str | None:
        """The step's second node; a malformed list raises, also if `MASTER_ADDR` is set."""
        return next(iter(self._node_names()[1:]), None)

    @property
    def ranks(self) -> RankInfo:
        """All ranks, validated against each other and against `SLURM_GTIDS`."""
        ranks = super().ranks
        if self._has("SLURM_GTIDS"):
            tasks = self._text("SLURM_GTIDS").split(",")
            if len(tasks) != ranks.local_world_size or str(ranks.global_rank) not in tasks:
                raise self._error(
                    "SLURM_GTIDS, the tasks on this node, is of another step than SLURM_STEP_*: these were "
                    "inherited from where the job was submitted"
                )
        return ranks

    @property
    def restart_count(self) -> int:
        """How often Slurm has started this job again, because it was requeued."""
        name = "SLURM_RESTART_COUNT"
        return self._number(name) if self._has(name) else 0

    @property
    def step_name(self) -> str:
        """A name that this step has in all starts of its job, and no other step."""
        names = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID")
        return "/".join(["slurm", *(self._environ.get(name, "") for name in names)])

    def requeue(self) -> None:
        """Put the job back into the queue with `scontrol requeue`; warn if that fails."""
        if not self.auto_requeue:
            return
        array = [self._environ.get(f"SLURM_ARRAY_{part}", "") for part in ("JOB_ID", "TASK_ID")]
        job = "_".join(array) if all(array) else self._text("SLURM_JOB_ID")
        try:
            command = ["scontrol", "requeue", job]
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=_REQUEUE_TIMEOUT_S)
        except (OSError, subprocess.SubprocessError) as error:
            message = error.stderr if isinstance(error, subprocess.CalledProcessError) else ""
            warn(f"scontrol requeue {job} failed: {message.strip() or error}")

    def _node_names(self) -> list[str]:
        return self._expanded("SLURM_STEP_NODELIST", expand_node_list)

    def _expanded(self, variable: str, expand: Callable[[str], list[T]]) -> list[T]:
        try:
            return expand(self._text(variable))
        except InvalidArgumentError as error:
            raise self._error(f"{variable}: {error.summary()}") from None

    def _rejection_beside(self, mpi: MPIEnvironment) -> str | None:
        """Return why mpirun has started this process rather than srun, if the variables of both are set.

        mpirun starts its daemons with srun, one on each node, and its ranks inherit the daemon's step. So
        mpirun has started the process if the step has one task on each node. Otherwise it is an error.
        """
        if mpi.rejection(self._environ) is not None:
            return None
        step, ranks = self.ranks, mpi.ranks
        if (step.global_rank, step.world_size) == (ranks.global_rank, ranks.world_size):
            return None
        has_one_task_per_node = step.world_size == step.num_nodes
        if has_one_task_per_node and (ranks.world_size > 1 or step.world_size == 1):
            return "mpirun is nearer: the step's tasks are its daemons, one on each node"
        raise self._error(
            f"a step of srun (task {step.global_rank} of {step.world_size}) and mpirun (rank "
            f"{ranks.global_rank} of {ranks.world_size}) both claim this process; name the one that started "
            "it: RANKWISE_ENVIRONMENT=slurm or RANKWISE_ENVIRONMENT=mpi",
            {**self.seen(), **mpi.seen()},
        )


def warn_of_unused_tasks(environ: Mapping[str, str], world_size: int) -> None:
    """Warn if this job of Slurm has more tasks than processes train, and srun could start them."""
    counts = [environ.get(name, "") for name in ("SLURM_NTASKS", "SLURM_JOB_NUM_NODES")]
    tasks = max(whole_number(count.strip()) or 0 for count in counts)
    if tasks > world_size and is_set("SLURM_JOB_ID", environ) and shutil.which("srun") is not None:
        warn(
            f"Slurm job {environ['SLURM_JOB_ID']} has {tasks} tasks, but srun has not started this process: "
            f"the number of processes that train is {world_size}. To train on all tasks, put srun before the "
            "command. If this is intended, set RANKWISE_ENVIRONMENT=local.",
        )


def expand_node_list(text: str) -> list[str]:
    """Return the names of the nodes, in the list's order.

    It supports ranges, commas, zero padding, several brackets in a name and text after a bracket.

    Example:
        >>> expand_node_list("gpu[08-10,3],login")
        ['gpu08', 'gpu09', 'gpu10', 'gpu3', 'login']
    """
    if re.fullmatch(_LIST, text.strip()) is None:
        raise _error("node list", text, _NAMES_WITH_RANGES)
    words = re.findall(_WORD, text)
    longest = max(len(re.sub(_BRACKET, "", word)) for word in words)
    if longest > _MAX_NAME or max(word.count("[") for word in words) > _MAX_BRACKETS:
        expected = f"names of at most {_MAX_NAME} characters and {_MAX_BRACKETS} brackets"
        raise _error("node list", text, expected)
    return _limited(chain.from_iterable(_names(word, text) for word in words), text)


def expand_counts(text: str) -> list[int]:
    """Return one count for each node, from a value of `SLURM_TASKS_PER_NODE`.

    Example:
        >>> expand_counts("2(x3),1")
        [2, 2, 2, 1]
    """
    return _limited(_counts(text), text)


def _names(word: str, text: str) -> Iterator[str]:
    before, bracket, rest = word.partition("[")
    if not bracket:
        yield word
        return
    inside, _, after = rest.partition("]")
    for number in _numbers(inside, text):
        for end in _names(after, text):
            yield f"{before}{number}{end}"


def _numbers(inside: str, text: str) -> Iterator[str]:
    for item in inside.split(","):
        found = re.fullmatch(_RANGE, item)
        if found is None or int(found[1]) > int(found[2] or found[1]):
            raise _error("node list", text, _NAMES_WITH_RANGES)
        for number in range(int(found[1]), int(found[2] or found[1]) + 1):
            yield str(number).zfill(len(found[1]))


def _counts(text: str) -> Iterator[int]:
    for word in text.strip().split(","):
        found = re.fullmatch(_COUNT, word.strip())
        if found is None:
            raise _error("tasks per node", text, 'counts, such as "2(x3),1"')
        yield from repeat(int(found[1]), int(found[2] or 1))


def _limited(items: Iterable[T], text: str) -> list[T]:
    found = list(islice(items, _MAX_NODES + 1))
    if len(found) > _MAX_NODES:
        raise _error("node list", text, f"at most {_MAX_NODES} nodes")
    return found


def _error(argument: str, text: str, expected: str) -> InvalidArgumentError:
    shown = text if len(text) <= 80 else f"{text[:77]}..."
    return InvalidArgumentError(argument=argument, value=shown, expected=expected)
