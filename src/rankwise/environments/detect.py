"""Detect the environment that started this process, with the reason for the choice."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from typing import Any, NamedTuple, final

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
from rankwise.named_options import NameTable

ENVIRONMENT_VARIABLE = "RANKWISE_ENVIRONMENT"
_REASON, _LAST_REASON = "all of its variables are set and agree", "no launcher's variables are complete"

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
        if is_environment and loaded.name.lower() == point.name.lower():
            return {point.name: loaded}
        raise InvalidTypeError(
            argument=point.value,
            value=loaded,
            expected=f"a subclass of ClusterEnvironment with the attribute name = {point.name!r}",
        )

    def _unknown(self, name: str) -> UnknownNameError:
        return UnknownNameError(kind="environment", name=name, known=tuple(self))


_ENVIRONMENTS = _Environments()


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


def find_environment(name: str) -> type[ClusterEnvironment]:
    """Return the class of an environment's name.

    Raises:
        UnknownNameError: for an unknown name.
        ConfigurationError: when an installed package has the name, and it cannot be loaded.
    """
    return _ENVIRONMENTS.entry(name)


def create_environment(name: str, environ: Mapping[str, str] | None = None) -> ClusterEnvironment:
    """Return the environment of that name, validated.

    Raises:
        UnknownNameError, ConfigurationError: as `find_environment`.
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
