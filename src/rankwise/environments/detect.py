"""Detect the environment that started this process, with the reason for the choice."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint
from typing import Any, NamedTuple, final

from rankwise.checks import check_value
from rankwise.environments.base import ClusterEnvironment, is_set, whole_number
from rankwise.environments.mpi import LSFEnvironment, MPIEnvironment, PALSEnvironment
from rankwise.environments.nodes import (
    KubeflowEnvironment,
    NodesEnvironment,
    SkyPilotEnvironment,
    TrainJobEnvironment,
)
from rankwise.environments.slurm import SlurmEnvironment
from rankwise.environments.torch_variables import LocalEnvironment, PlainEnvironment, TorchElasticEnvironment
from rankwise.errors import EnvironmentVariableError, InvalidTypeError, UnknownNameError
from rankwise.named_options import NameTable
from rankwise.ranks import warn

ENVIRONMENT_VARIABLE = "RANKWISE_ENVIRONMENT"
_REASON, _LAST_REASON = "all of its variables are set and agree", "no launcher's variables are complete"
_SIZES, _RANKS = ("world_size", "num_nodes"), ("global_rank", "node_rank")

# Variables of launchers that have no environment here: how many processes, or which hosts, a job has.
_OTHER_LAUNCHERS = {"SM_HOSTS": "SageMaker", "SUBMITIT_LOCAL_NTASKS": "submitit's local executor"}
_REMEDY = (
    "start the script with torchrun; or set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and "
    "MASTER_PORT for each process, or NODE_RANK, NNODES, MASTER_ADDR and MASTER_PORT for one process on each "
    "node; or RANKWISE_ENVIRONMENT=local if each process shall train alone."
)

# In the order of detection: a launcher that others may have started comes before them. Environments of
# installed packages come after the first one: they know their site, but torchrun is nearer to the process.
_ORDER: tuple[type[ClusterEnvironment], ...] = (
    TorchElasticEnvironment,
    SlurmEnvironment,
    LSFEnvironment,  # jsrun sets Open MPI's variables too
    MPIEnvironment,
    PALSEnvironment,
    KubeflowEnvironment,
    PlainEnvironment,
    TrainJobEnvironment,
    SkyPilotEnvironment,
    NodesEnvironment,
    LocalEnvironment,
)


@final
class _Environments(NameTable[type[ClusterEnvironment]]):
    """Maps names, in any case, to classes of environments."""

    kind = "Environment"
    title = "environments"
    argument = "cluster_environment"
    group = "environments"

    def __init__(self) -> None:
        super().__init__()
        self._entries = {cls.name: cls for cls in _ORDER}

    def in_order(self) -> tuple[type[ClusterEnvironment], ...]:
        """Return the classes in the order of detection."""
        others = (cls for cls in map(self.entry, self) if cls not in _ORDER)
        return (_ORDER[0], *others, *_ORDER[1:])

    def _entries_of(self, point: EntryPoint, loaded: Any) -> Mapping[str, type[ClusterEnvironment]]:
        is_environment = isinstance(loaded, type) and issubclass(loaded, ClusterEnvironment)
        is_named = is_environment and loaded.name.lower() == point.name.lower()
        expected = f"a subclass of ClusterEnvironment with the attribute name = {point.name!r}"
        check_value(point.value, loaded, is_named, expected, error=InvalidTypeError)
        return {point.name: loaded}

    def _unknown(self, name: str) -> UnknownNameError:
        return UnknownNameError(kind="environment", name=name, known=tuple(self))


_ENVIRONMENTS = _Environments()
find_environment = _ENVIRONMENTS.entry
"""Return the class of a name; a ConfigurationError if it is unknown, or its package cannot be loaded."""


@final
class Detection(NamedTuple):
    """The detected environment, the reason, and why each other candidate was rejected."""

    environment: ClusterEnvironment
    reason: str
    rejected: Mapping[str, str]

    def __str__(self) -> str:
        lines = [f"environment {self.environment.name!r}: {self.reason}"]
        lines += [f"not {name!r}: {reason}" for name, reason in self.rejected.items()]
        return "; ".join(lines)


def environment_names() -> tuple[str, ...]:
    """Return the names of all environments, built-in and installed."""
    return tuple(_ENVIRONMENTS)


def create_environment(name: str, environ: Mapping[str, str] | None = None) -> ClusterEnvironment:
    """Return the environment of that name, validated.

    Raises:
        UnknownNameError: for an unknown name.
        ConfigurationError: when an installed package has the name, and it cannot be loaded.
        EnvironmentVariableError: when its variables are incomplete or contradict each other.
    """
    environment = find_environment(name)(environ)
    environment.ranks  # noqa: B018  reading the ranks validates them
    return environment


def detect_environment(environ: Mapping[str, str] | None = None) -> Detection:
    """Detect the environment; the variable `RANKWISE_ENVIRONMENT` overrides detection.

    It warns if there are several processes or nodes, by a variable that belongs to no complete set.

    Raises:
        UnknownNameError: when `RANKWISE_ENVIRONMENT` is an unknown name.
        EnvironmentVariableError: when a launcher has started this process but its variables are wrong.
    """
    environ = os.environ if environ is None else environ
    if chosen := environ.get(ENVIRONMENT_VARIABLE, "").strip():
        return Detection(create_environment(chosen, environ), f"{ENVIRONMENT_VARIABLE}={chosen}", {})
    found: type[ClusterEnvironment] = LocalEnvironment  # which accepts every process
    rejected: dict[str, str] = {}
    candidates = _ENVIRONMENTS.in_order()[:-1]
    for cls in candidates:
        try:
            reason = cls.rejection(environ)
        except EnvironmentVariableError as error:
            if found is LocalEnvironment:
                raise
            reason = error.problem
        if reason is None and found is LocalEnvironment:
            found = cls
        else:
            rejected[cls.name] = reason or f"{found.name} is nearer to this process"
    if found is LocalEnvironment:
        check_is_alone(candidates, environ)
    return Detection(found(environ), _LAST_REASON if found is LocalEnvironment else _REASON, rejected)


def check_is_alone(candidates: Sequence[type[ClusterEnvironment]], environ: Mapping[str, str]) -> None:
    """Check that this process may train alone, for which no environment of `candidates` was found.

    A variable for the number of processes or nodes may be preset: it is a warning. With a rank it means that
    a launcher has started several processes, each of which would train alone: an error; it names what the
    most complete set lacks.
    """
    for variable, launcher in _OTHER_LAUNCHERS.items():
        if _count(variable, environ) > 1:
            raise EnvironmentVariableError(
                environment=launcher,
                problem=f"{variable} means several processes, but rankwise has no environment for {launcher}",
                variables={variable: environ[variable]},
                remedy=_REMEDY,
            )
    incomplete = [cls for cls in candidates if cls.missing(environ)]
    sizes = {cls: _above(1, cls, _SIZES, environ) for cls in incomplete}
    # Beside such a size, rank 0 is one of several ranks too.
    of_several = [cls for cls in incomplete if _above(-1 if sizes[cls] else 0, cls, _RANKS, environ)]
    if of_several:  # of equally complete sets the later is the more general one
        nearest = min(reversed(of_several), key=lambda cls: len(cls.missing(environ)))
        raise nearest(environ).error_of_missing()
    if names := dict.fromkeys(name for found in sizes.values() for name in found):
        warn(
            f"{', '.join(f'{name}={environ[name]}' for name in names)} is set, which means several processes "
            "or nodes, but no launcher's variables are complete: this process trains alone. If this is "
            "intended, set RANKWISE_ENVIRONMENT=local.",
        )


def _above(
    lowest: int, cls: type[ClusterEnvironment], facts: Sequence[str], environ: Mapping[str, str]
) -> list[str]:
    """Return the variables of these facts that are set to a greater number."""
    table = cls.full_table(environ)
    names = (table[fact] for fact in facts if fact in table)
    return [name for name in names if is_set(name, environ) and _count(name, environ) > lowest]


def _count(name: str, environ: Mapping[str, str]) -> int:
    """Return a variable's number, or the number of items of a list or a range; 0 without a variable."""
    text = environ.get(name, "").strip()
    number = whole_number(text)
    return len(re.findall(r"[^\s,:]+", text)) if number is None else number
