"""Detect the environment that started this process, with the reason for the choice."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import NamedTuple, final

from rankwise.environments.base import ClusterEnvironment
from rankwise.environments.incomplete import check_is_alone
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

ENVIRONMENT_VARIABLE = "RANKWISE_ENVIRONMENT"
_ENTRY_POINTS = "rankwise.environments"
_REASON, _LAST_REASON = "all of its variables are set and agree", "no launcher's variables are complete"

# In the order of detection: a launcher that others may have started comes before them.
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
    installed = [point.name for point in entry_points(group=_ENTRY_POINTS)]
    return (*(cls.name for cls in _ORDER), *installed)


def find_environment(name: str) -> type[ClusterEnvironment]:
    """Return the class of an environment's name.

    Raises:
        UnknownNameError: for an unknown name.
        InvalidTypeError: when an installed entry point is not a `ClusterEnvironment`.
    """
    found: list[object] = [cls for cls in _ORDER if cls.name == name.lower()]
    found = found or [point.load() for point in entry_points(group=_ENTRY_POINTS, name=name)]
    if not found:
        raise UnknownNameError(kind="environment", name=name, known=environment_names())
    if not (isinstance(found[0], type) and issubclass(found[0], ClusterEnvironment)):
        raise InvalidTypeError(
            argument=f"entry point {name!r}", value=found[0], expected="a subclass of ClusterEnvironment"
        )
    return found[0]


def create_environment(name: str, environ: Mapping[str, str] | None = None) -> ClusterEnvironment:
    """Return the environment of that name, validated.

    Raises:
        UnknownNameError, InvalidTypeError: as `find_environment`.
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
    candidates = _ORDER[:-1]
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
