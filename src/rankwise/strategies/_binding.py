"""Find the environment that a strategy is bound to, and check that it has the world that was asked for."""

from __future__ import annotations

from rankwise.environments import ClusterEnvironment, create_environment, detect_environment
from rankwise.environments.local import LocalEnvironment
from rankwise.errors import InvalidTypeError, WorldSizeMismatchError
from rankwise.launchers.script import script_ranks


def check_environment(given: object) -> ClusterEnvironment | str | None:
    """Return what may name an environment.

    Raises:
        InvalidTypeError: for anything else.
    """
    if given is None or isinstance(given, (str, ClusterEnvironment)):
        return given
    raise InvalidTypeError(
        argument="cluster_environment", value=given, expected="a ClusterEnvironment instance or a name"
    )


def find_environment(wanted: ClusterEnvironment | str | None) -> tuple[ClusterEnvironment, str]:
    """Return the environment, and why it is that one.

    Raises:
        UnknownNameError: for a name that is none.
        EnvironmentVariableError: when a launcher's variables are wrong.
    """
    if isinstance(wanted, ClusterEnvironment):
        return wanted, "it was given"
    if isinstance(wanted, str):
        return create_environment(wanted), "it was named"
    if script_ranks() is not None:
        return LocalEnvironment(), "this script runs under strategy 'ddp' already"
    detection = detect_environment()
    return detection.environment, str(detection)


def check_world(
    environment: ClusterEnvironment, how: str, devices: int | None, num_nodes: int | None
) -> None:
    """Refuse numbers that are not those of the processes that exist.

    Raises:
        WorldSizeMismatchError: says both.
    """
    ranks = environment.ranks
    is_right = devices in (None, ranks.local_world_size) and num_nodes in (None, ranks.num_nodes)
    if not is_right:
        raise WorldSizeMismatchError(
            devices=devices or ranks.local_world_size,
            num_nodes=num_nodes or ranks.num_nodes,
            launched_by=environment.name,
            world_size=ranks.world_size,
            variables=environment.seen(),
            detection=how,
        )
