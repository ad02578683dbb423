"""Find out who started this process, and say why."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import final

from rankwise.environments.base import ClusterEnvironment
from rankwise.environments.kubeflow import KubeflowEnvironment
from rankwise.environments.local import LocalEnvironment
from rankwise.environments.lsf import LSFEnvironment
from rankwise.environments.mpi import MPIEnvironment
from rankwise.environments.nodes import NodesEnvironment
from rankwise.environments.pals import PALSEnvironment
from rankwise.environments.plain import PlainEnvironment
from rankwise.environments.slurm import SlurmEnvironment
from rankwise.environments.torchelastic import TorchElasticEnvironment
from rankwise.errors import EnvironmentVariableError, InvalidTypeError, UnknownNameError

__all__ = [
    "ENVIRONMENT_VARIABLE",
    "Detection",
    "create_environment",
    "detect_environment",
    "environment_names",
]

ENVIRONMENT_VARIABLE = "RANKWISE_ENVIRONMENT"
_ENTRY_POINTS = "rankwise.environments"

# In the order of detection: who is nearest to the process comes first.
_ORDER: tuple[type[ClusterEnvironment], ...] = (
    TorchElasticEnvironment,
    SlurmEnvironment,
    LSFEnvironment,  # jsrun sets Open MPI's variables too
    MPIEnvironment,
    PALSEnvironment,
    KubeflowEnvironment,
    PlainEnvironment,
    NodesEnvironment,
    LocalEnvironment,
)


@final
@dataclass(frozen=True)
class Detection:
    """What was found: the environment, the reason, and each other candidate with why it is not the one."""

    environment: ClusterEnvironment
    reason: str
    rejected: Mapping[str, str]

    def __str__(self) -> str:
        lines = [f"environment {self.environment.name!r}: {self.reason}"]
        lines += [f"not {name!r}: {reason}" for name, reason in self.rejected.items()]
        return "; ".join(lines)


def environment_names() -> tuple[str, ...]:
    """Return the names of all environments, built in and installed."""
    installed = [point.name for point in entry_points(group=_ENTRY_POINTS)]
    return (*(cls.name for cls in _ORDER), *installed)


def create_environment(name: str, environ: Mapping[str, str] | None = None) -> ClusterEnvironment:
    """Return the environment of that name, validated.

    Raises:
        UnknownNameError: when there is none of that name.
        InvalidTypeError: when an installed entry point is no `ClusterEnvironment`.
        EnvironmentVariableError: when its variables are not all there or contradict each other.
    """
    environment = _class_named(name)(environ)
    environment.ranks  # noqa: B018  reading the ranks validates them
    return environment


def detect_environment(environ: Mapping[str, str] | None = None) -> Detection:
    """Find the environment; `RANKWISE_ENVIRONMENT` beats detection.

    Raises:
        UnknownNameError: when `RANKWISE_ENVIRONMENT` names nothing.
        EnvironmentVariableError: when a launcher has surely been at work but its variables are wrong.
    """
    environ = os.environ if environ is None else environ
    if chosen := environ.get(ENVIRONMENT_VARIABLE, "").strip():
        return Detection(create_environment(chosen, environ), f"{ENVIRONMENT_VARIABLE}={chosen}", {})
    rejected: dict[str, str] = {}
    for place, cls in enumerate(_ORDER):
        reason = cls.rejection(environ)
        if reason is None:
            others = {other.name: _reason_behind(cls, other, environ) for other in _ORDER[place + 1 : -1]}
            return Detection(cls(environ), _reason_for(cls), {**rejected, **others})
        rejected[cls.name] = reason
    raise LookupError("the last environment in the order must fit everywhere")


def _reason_for(cls: type[ClusterEnvironment]) -> str:
    is_last = cls is _ORDER[-1]
    return "no launcher's variables are complete" if is_last else "all of its variables are set and agree"


def _reason_behind(
    found: type[ClusterEnvironment], other: type[ClusterEnvironment], environ: Mapping[str, str]
) -> str:
    """Return why an environment was passed over that comes after the one that was found."""
    try:
        return other.rejection(environ) or f"{found.name} is nearer to this process"
    except EnvironmentVariableError as error:
        return error.problem


def _class_named(name: str) -> type[ClusterEnvironment]:
    for cls in _ORDER:
        if cls.name == name.lower():
            return cls
    for point in entry_points(group=_ENTRY_POINTS, name=name):
        loaded = point.load()
        if not (isinstance(loaded, type) and issubclass(loaded, ClusterEnvironment)):
            raise InvalidTypeError(
                argument=f"entry point {name!r}", value=loaded, expected="a subclass of ClusterEnvironment"
            )
        return loaded
    raise UnknownNameError(kind="environment", name=name, known=environment_names())
