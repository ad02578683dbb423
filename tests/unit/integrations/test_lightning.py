"""Lightning's `Trainer` and `Fabric` given rankwise's strategies: what is decided before a launch."""

import importlib
import sys
from collections.abc import Callable
from typing import Any

import pytest

from rankwise import DDPElasticStrategy, DDPStrategy, SingleDeviceStrategy, StrategyRegistry, Trainer
from rankwise.checkpoint import TorchCheckpointIO
from rankwise.errors import (
    ConfigurationError,
    InvalidTypeError,
    LifecycleError,
    MissingExtraError,
    UnknownArgumentError,
)
from rankwise.precision import Precision
from tests.helpers.raising import raises
from tests.unit.environments.variables import step

pytestmark = pytest.mark.filterwarnings("ignore")  # what Lightning and its dependencies warn of


@pytest.fixture(scope="module")
def pl() -> Any:
    """Return `lightning.pytorch`, in which rankwise's strategies are registered."""
    importlib.import_module("rankwise.integrations.lightning")
    return importlib.import_module("lightning.pytorch")


@pytest.fixture
def strategy(pl: Any) -> Callable[..., Any]:
    """Return `RankwiseStrategy`."""
    return importlib.import_module("rankwise.integrations.lightning").RankwiseStrategy  # type: ignore[no-any-return]  # known by name


def trainer(pl: Any, strategy: Any, **arguments: Any) -> Any:
    """Return a Trainer of Lightning's that writes nothing."""
    environments = importlib.import_module("lightning.fabric.plugins.environments")
    # Lightning's detection starts MPI, where it is installed.
    arguments = {"plugins": [environments.LightningEnvironment()], **arguments}
    return pl.Trainer(
        strategy=strategy, accelerator="cpu", logger=False, enable_checkpointing=False, **arguments
    )


def test_every_ddp_name_is_registered(pl: Any) -> None:
    """Lightning's Trainer and Fabric know each DDP strategy but the elastic one."""
    expected = {f"rankwise_{name}" for name in StrategyRegistry if name.startswith("ddp")}
    expected = {name for name in expected if "elastic" not in name}
    assert expected
    for registry in (
        pl.strategies.StrategyRegistry,
        importlib.import_module("lightning.fabric.strategies").STRATEGY_REGISTRY,
    ):
        assert {name for name in registry if name.startswith("rankwise_")} == expected


def test_the_other_package(strategy: Any) -> None:
    """The Trainer of `pytorch_lightning` says which package has the strategies."""
    other: Any = importlib.import_module("pytorch_lightning")
    importlib.import_module("rankwise.integrations.lightning").register_strategies(strategy, strategy)
    raises(ConfigurationError, "import lightning.pytorch", other.Trainer, strategy="rankwise_ddp_fork")


def test_a_trainer_knows_its_ranks_before_a_launch(pl: Any) -> None:
    """Devices are the strategy's, samplers get their number; what Lightning does in a launch is refused."""
    made = trainer(pl, "rankwise_ddp_spawn_find_unused_parameters_true", devices=3)
    assert (made.world_size, made.global_rank, made.num_devices) == (3, 0, 3)
    assert made.strategy.rankwise.start_method == "spawn"
    assert made.strategy.rankwise.ddp_kwargs["find_unused_parameters"] is True
    assert made.strategy.distributed_sampler_kwargs == {"num_replicas": 3, "rank": 0}
    made = trainer(pl, "rankwise_ddp", devices=2)
    raises(LifecycleError, "fit", made.strategy.setup_distributed)
    with pytest.raises(LifecycleError):
        made.strategy.cluster_environment.main_port  # noqa: B018  it raises


def test_arguments_are_the_named_strategys(strategy: Callable[..., Any]) -> None:
    """They are checked as rankwise's own; an elastic strategy restarts no Trainer of Lightning's."""
    made = strategy("ddp_fork", timeout=120, static_graph=True)
    assert made.rankwise.timeout.total_seconds() == 120
    assert made.rankwise.ddp_kwargs["static_graph"] is True
    raises(UnknownArgumentError, "find_unused_parameters", strategy, "ddp", find_unused_parameter=True)
    for given in (DDPElasticStrategy(), SingleDeviceStrategy(), "ddp_elastic", 3):
        raises(InvalidTypeError, "torchrun", strategy, given)


def test_options_without_effect_are_refused(strategy: Callable[..., Any]) -> None:
    """What only rankwise's own loops can do is named; an instance has its arguments already."""
    options: dict[str, Any] = {"precision": Precision(), "checkpoint_io": TorchCheckpointIO()}
    options |= {"sync_batchnorm": True, "sync_mode": "forced_sync", "gradient_weighting": "samples"}
    for option, value in options.items():
        with pytest.raises(ConfigurationError, match=f"^{option} cannot have an effect"):
            strategy(DDPStrategy(**{option: value}))
    raises(ConfigurationError, "timeout cannot be added", strategy, DDPStrategy(), timeout=3)


def test_each_trainer_has_its_ranks(pl: Any, strategy: Callable[..., Any]) -> None:
    """Also where two share a strategy; the strategy's devices and the Trainer's must agree."""
    raises(ConfigurationError, "devices", trainer, pl, strategy("ddp", devices=2), devices=3)
    own = DDPStrategy(start_method="fork")
    first, second = (trainer(pl, strategy(own), devices=devices) for devices in (2, 3))
    assert (first.world_size, second.world_size) == (2, 3)


@pytest.fixture
def environments(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return Lightning's environments; this process gets its rank back."""
    for rank_zero in ("lightning_utilities.core.rank_zero", "lightning.fabric.utilities.rank_zero"):
        monkeypatch.setattr(importlib.import_module(rank_zero).rank_zero_only, "rank", 0)
    return importlib.import_module("lightning.fabric.plugins.environments")


def as_variables(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    """Set variables for the test."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_environments_given_as_plug_ins(pl: Any, environments: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that Lightning never detects determines the ranks, in rankwise's Trainer, too."""
    pod = {"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "29471", "WORLD_SIZE": "2", "RANK": "1"}
    as_variables(monkeypatch, pod)
    kubeflow = environments.KubeflowEnvironment()
    made = trainer(pl, "rankwise_ddp", devices=1, num_nodes=2, plugins=[kubeflow])
    assert (made.global_rank, made.local_rank, made.world_size, made.node_rank) == (1, 0, 2, 1)
    own = Trainer(accelerator="cpu", strategy="ddp", devices=1, plugins=[kubeflow])
    assert own.strategy.ranks == made.strategy.rankwise.ranks
    assert own.strategy.environment.main_address == "192.0.2.1"


def test_lightnings_default_given_within_a_launcher(
    pl: Any, environments: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says that this process is no rank of the launcher; without it, the launcher is detected."""
    as_variables(monkeypatch, {**step(1), "SLURM_NTASKS_PER_NODE": "2"})  # which Lightning asks for
    alone = trainer(pl, "rankwise_ddp_fork", devices=2, plugins=[environments.LightningEnvironment()])
    assert (alone.global_rank, alone.world_size) == (0, 2)
    assert not alone.strategy.rankwise.environment.creates_processes_externally
    srun = trainer(pl, "rankwise_ddp", devices=2, plugins=[environments.SLURMEnvironment()])
    assert srun.strategy.rankwise.environment.name == "slurm"
    assert (srun.global_rank, srun.world_size) == (1, 2)


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Lightning is not installed, the error says how to install it."""
    for name in [name for name in sys.modules if name.startswith("rankwise.integrations.lightning")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("lightning", "lightning.pytorch"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=r'pip install "rankwise\[lightning\]"'):
        importlib.import_module("rankwise.integrations.lightning")
