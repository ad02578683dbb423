"""Adapt environments written as Lightning's `ClusterEnvironment`; Lightning itself is not imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, final, runtime_checkable

from rankwise.checks import check_overrides
from rankwise.compatibility.names import MISSING_HOOKS
from rankwise.environments.base import ClusterEnvironment
from rankwise.environments.nodes import NodesEnvironment
from rankwise.errors import ConfigurationError, WorldSizeMismatchError

_RANKS = ("world_size", "global_rank", "local_rank", "node_rank")
_ABSTRACT = ("creates_processes_externally", "main_address", "main_port", *_RANKS)


@runtime_checkable
class LightningClusterEnvironment(Protocol):
    """Methods of Lightning's `ClusterEnvironment` that rankwise's lacks: they identify such an environment.

    It may derive from either class.

    It also has `creates_processes_externally`, `main_address`, `main_port`, `validate_settings`, `teardown`.
    """

    def set_world_size(self, size: int) -> None:
        """Set the number of processes, unless the environment determines it."""

    def set_global_rank(self, rank: int) -> None:
        """Set this process's rank, unless the environment determines it."""


GivenEnvironment = ClusterEnvironment | LightningClusterEnvironment | str
"""An environment as users pass it: an instance of either class, or a name."""


def check_given_environment(given: object) -> None:
    """Check the methods of an environment: of Lightning's class all must be there, see `check_overrides`."""
    if not isinstance(given, LightningClusterEnvironment):
        check_overrides(given, MISSING_HOOKS["environment"])
        return
    kind = type(given)
    missing = [name for name in _ABSTRACT if getattr(kind, name, None) is getattr(ClusterEnvironment, name)]
    if missing:
        raise ConfigurationError(
            message=f"{kind.__name__} does not define {', '.join(missing)}.",
            facts="it defines set_world_size and set_global_rank, so its other methods are as in Lightning.",
            remedy="define them; or leave out the two, and derive it from rankwise's ClusterEnvironment.",
        )


def adapted_environment(
    given: Any, devices: int | None, num_nodes: int | None, *, is_rerun: bool
) -> ClusterEnvironment:
    """Return an environment of rankwise that reads its facts from an environment of Lightning.

    `is_rerun` says that a strategy has started this process, which Lightning's environment may not see.
    """
    if is_rerun or not _ask(given, "creates_processes_externally"):
        return _AdaptedNodes(given)
    return _AdaptedRanks(given, devices, num_nodes)


class _Adapted(ClusterEnvironment):
    """The facts that both kinds of environments have."""

    name = "lightning"
    optional_variables: ClassVar[Mapping[str, str]] = {}
    remedy = "give devices and num_nodes as that environment has them: Trainer(devices=..., num_nodes=...)."

    def __init__(self, given: Any) -> None:
        super().__init__({})
        self._given = given

    def _fact(self, fact: str) -> int:
        return int(_ask(self._given, fact)) if fact in _RANKS else super()._fact(fact)

    @property
    def node_rank(self) -> int:
        return self._fact("node_rank")

    @property
    def main_address(self) -> str:
        return str(_ask(self._given, "main_address"))

    @property
    def main_port(self) -> int:
        return int(_ask(self._given, "main_port"))

    def validate_settings(self, devices: int, num_nodes: int) -> None:
        self._given.validate_settings(devices, num_nodes)

    def teardown(self) -> None:
        self._given.teardown()

    def seen(self) -> dict[str, str]:
        return {f"{name}()": str(_ask(self._given, name)) for name in _RANKS}

    def __repr__(self) -> str:
        return f"{type(self._given).__name__} of Lightning"


@final
class _AdaptedRanks(_Adapted):
    """An environment whose launcher has started each rank; gets world size and rank as in Lightning."""

    def __init__(self, given: Any, devices: int | None, num_nodes: int | None) -> None:
        super().__init__(given)
        world_size = self.world_size
        self._local_world_size = per_node = devices or self._without_devices(world_size, num_nodes)
        num_nodes = num_nodes or max(1, world_size // per_node)
        given.set_world_size(num_nodes * per_node)
        given.set_global_rank(self.node_rank * per_node + self.local_rank)
        if self.world_size != num_nodes * per_node:
            raise WorldSizeMismatchError(
                devices=per_node,
                num_nodes=num_nodes,
                launched_by=type(given).__name__,
                world_size=self.world_size,
                variables=self.seen(),
            )

    def _without_devices(self, world_size: int, num_nodes: int | None) -> int:
        if num_nodes is None and world_size > 1:
            raise ConfigurationError(
                message=f"{type(self._given).__name__} does not know how many processes this node has.",
                facts=f"world_size()={world_size}; Lightning takes the rest from the arguments.",
                remedy="Trainer(devices=...), with the number of processes on each node.",
            )
        return max(1, world_size // (num_nodes or 1))

    @property
    def local_world_size(self) -> int:
        return self._local_world_size


@final
class _AdaptedNodes(_Adapted, NodesEnvironment):
    """An environment of one process on each node, from which the strategy starts the others."""


def _ask(given: Any, name: str) -> Any:
    """Return a fact of the given environment, which has it as a method or a property."""
    try:
        fact = getattr(given, name)
        return fact() if callable(fact) else fact
    except Exception as error:
        raise ConfigurationError(
            message=f"{type(given).__name__}.{name} failed: {type(error).__name__}: {error}.",
            remedy="start the job with the launcher of this environment, or leave the environment out.",
        ) from error
