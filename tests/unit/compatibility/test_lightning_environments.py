"""A `ClusterEnvironment` of Lightning's, or one written as Lightning's is, given to rankwise."""

from typing import Any

import pytest

from rankwise import Trainer
from rankwise.compatibility.lightning_environments import LightningClusterEnvironment
from rankwise.environments import ClusterEnvironment, LocalEnvironment
from rankwise.errors import (
    ConfigurationError,
    EnvironmentVariableError,
    InvalidTypeError,
    WorldSizeMismatchError,
)
from rankwise.ranks import RankInfo, rank_zero_only
from rankwise.strategies import DDPStrategy
from tests.helpers.raising import raises

pytestmark = pytest.mark.usefixtures("rank_kept")


@pytest.fixture
def rank_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the rank that an environment with ranks sets for this process."""
    monkeypatch.setattr(rank_zero_only, "rank", 0)


class OfLightning:
    """Has what Lightning's `ClusterEnvironment` has, as a scheduler's that determines the ranks."""

    main_address = "192.0.2.1"
    main_port = 29471

    def __init__(self, *, is_external: bool = True, places: tuple[int, int] = (0, 0), size: int = 0) -> None:
        self.creates_processes_externally = is_external
        self._node_rank, self._local_rank = places
        self._size = self._own_size = size
        self._rank = 0
        self.checked: tuple[int, int] | None = None

    def world_size(self) -> int:
        return self._size

    def set_world_size(self, size: int) -> None:
        self._size = self._own_size or size

    def global_rank(self) -> int:
        return self._rank

    def set_global_rank(self, rank: int) -> None:
        self._rank = rank

    def local_rank(self) -> int:
        return self._local_rank

    def node_rank(self) -> int:
        return self._node_rank

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        if num_nodes == 3:
            raise ValueError("this cluster has no 3 nodes")
        self.checked = num_devices, num_nodes

    def teardown(self) -> None:
        """Does nothing."""


class Broken(OfLightning):
    """Lacks a variable."""

    def node_rank(self) -> int:
        raise KeyError("NODE")


def derived(**methods: Any) -> Any:
    """Return one that derives from rankwise's class, and does not call its constructor."""
    facts = {"creates_processes_externally": True, "_size": 0, "_own_size": 0, "_rank": 0}
    places = {"_node_rank": 1, "_local_rank": 1, "__init__": lambda self: None}
    return type("Derived", (OfLightning, ClusterEnvironment), {**facts, **places, **methods})()


def bound(given: Any, **arguments: Any) -> DDPStrategy:
    """Return a strategy that is bound to an environment of Lightning's."""
    strategy = DDPStrategy(accelerator="cpu", cluster_environment=given, **arguments)
    strategy.bind()
    return strategy


def test_ranks_are_set_by_lightnings_rule() -> None:
    """Node by node, from the numbers of devices and nodes; then the environment is asked."""
    given = OfLightning(places=(1, 1))
    strategy = bound(given, devices=2, num_nodes=2)
    assert strategy.ranks == RankInfo(3, 1, 1, 4, 2, 2)
    assert given.checked == (2, 2)
    assert (strategy.environment.main_address, strategy.environment.main_port) == ("192.0.2.1", 29471)
    assert repr(strategy.environment) == "OfLightning of Lightning"


def test_one_number_follows_from_the_other() -> None:
    """Where the environment has the number of processes; node 0 cannot know whether it is alone."""
    for name, number in (("devices", 2), ("num_nodes", 2)):
        assert bound(OfLightning(places=(1, 0), size=4), **{name: number}).ranks == RankInfo(2, 0, 1, 4, 2, 2)
    assert bound(OfLightning(places=(1, 0), size=4), devices=1).ranks == RankInfo(1, 0, 1, 4, 1, 4)
    with pytest.raises(ConfigurationError, match=r"OfLightning does not know how many.*(?s:.)*devices="):
        bound(OfLightning(size=4))
    assert bound(OfLightning(size=1)).ranks == RankInfo()


def test_contradictions() -> None:
    """Other numbers than the environment's, ranks outside of them, and methods that fail are refused."""
    with pytest.raises(WorldSizeMismatchError, match=r"2 processes were asked for.*OfLightning started 4"):
        bound(OfLightning(size=4), devices=2, num_nodes=1)
    with pytest.raises(EnvironmentVariableError, match=r"(?s)global_rank.*Trainer\(devices="):
        bound(OfLightning(places=(1, 0)), devices=2, num_nodes=1)
    raises(ValueError, "no 3 nodes", bound, OfLightning(), devices=1, num_nodes=3)
    raises(ConfigurationError, r"Broken\.node_rank failed: KeyError: 'NODE'", bound, Broken(), devices=1)


def test_one_that_derives_from_rankwises_class() -> None:
    """It works as in Lightning, without a call of the constructor; methods that it inherits are refused."""
    strategy = bound(derived(), devices=2, num_nodes=2)
    assert strategy.ranks == RankInfo(3, 1, 1, 4, 2, 2)
    assert (strategy.environment.main_address, strategy.environment.main_port) == ("192.0.2.1", 29471)
    inherited = derived(main_port=ClusterEnvironment.main_port, node_rank=ClusterEnvironment.node_rank)
    with pytest.raises(ConfigurationError, match="Derived does not define main_port, node_rank"):
        DDPStrategy(cluster_environment=inherited)


def test_one_that_starts_nothing() -> None:
    """The strategy starts the processes of its node; on several nodes the environment has their address."""
    assert bound(OfLightning(is_external=False), devices=2).ranks == RankInfo(0, 0, 0, 2, 2, 1)
    strategy = bound(OfLightning(is_external=False, places=(1, 0)), devices=2, num_nodes=2)
    assert strategy.ranks == RankInfo(2, 0, 1, 4, 2, 2)
    with pytest.raises(ConfigurationError, match="starts no processes, but this is one of several"):
        bound(OfLightning(is_external=False, places=(0, 1)), devices=2)


def test_as_a_plugin_of_the_trainer() -> None:
    """As rankwise's own, from which its setters tell it; two are too many."""
    assert isinstance(OfLightning(), LightningClusterEnvironment)
    assert not isinstance(LocalEnvironment(), LightningClusterEnvironment)
    raises(InvalidTypeError, "cluster_environment", DDPStrategy, cluster_environment=3)
    made = Trainer(accelerator="cpu", strategy="ddp", devices=2, plugins=[OfLightning(places=(0, 1))])
    assert (made.global_rank, made.world_size) == (1, 2)
    raises(ConfigurationError, "2 of one kind", Trainer, plugins=[OfLightning(), LocalEnvironment()])
