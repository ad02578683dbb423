"""Which device each rank takes, by what torch sees and what was started."""

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from rankwise.environments import ClusterEnvironment, NodesEnvironment, SlurmEnvironment
from rankwise.errors import ConfigurationError, InvalidArgumentError
from rankwise.ranks import RankInfo, rank_zero_only
from rankwise.strategies import DDPForkStrategy, DDPStrategy, SingleDeviceStrategy, Strategy
from rankwise.strategies.placement import local_devices
from tests.helpers.raising import raises
from tests.unit.environments.variables import Variables, allocation, batch, step

UUID = "GPU-5a3c7f1e-0d7a-4f0e-9a0b-1c2d3e4f5a6b"


def bound(monkeypatch: pytest.MonkeyPatch, local_rank: int, visible: str, **arguments: int) -> DDPStrategy:
    """Return the strategy of one of four tasks on a node, which sees these devices."""
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(visible.split(",")))
    more = {"SLURM_GPUS_PER_TASK": "1", "SLURM_STEP_GPUS": visible}
    environment = SlurmEnvironment({**step(local_rank, "4", place=(0, local_rank)), **more})
    strategy = DDPStrategy(cluster_environment=environment, **arguments)  # type: ignore[arg-type]  # devices
    strategy.bind()
    return strategy


@pytest.mark.parametrize("visible", ["3", UUID], ids=["number", "uuid"])
@pytest.mark.parametrize("local_rank", range(4))
def test_one_visible_device_per_task(monkeypatch: pytest.MonkeyPatch, local_rank: int, visible: str) -> None:
    """With `srun --gpus-per-task=1` each sees its own alone, as number 0; `devices=4` is right there too."""
    for arguments in ({}, {"devices": 4}):
        strategy = bound(monkeypatch, local_rank, visible, **arguments)
        assert strategy.root_device == torch.device("cuda", 0)
        assert strategy.determine_ddp_device_ids() == [0]
        assert (strategy.world_size, strategy.local_rank) == (4, local_rank)


@pytest.mark.parametrize("local_rank", range(4))
def test_all_devices_visible(monkeypatch: pytest.MonkeyPatch, local_rank: int) -> None:
    """Every task sees all, and takes the one of its local rank; chosen ones are taken, if they are there."""
    assert bound(monkeypatch, local_rank, "0,1,2,3").root_device == torch.device("cuda", local_rank)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert local_devices("cuda", (3, 1), None) == [torch.device("cuda", 3), torch.device("cuda", 1)]
    raises(InvalidArgumentError, "torch sees 4", local_devices, "cuda", (4,), None)
    raises(InvalidArgumentError, "torch sees 4", local_devices, "cuda", 5, None)


class StartsNothing(ClusterEnvironment):
    """A user's environment that says that the strategy starts the processes."""

    name = "mine"
    variables: ClassVar[Variables] = {
        "local_rank": "MY_LOCAL_RANK",
        "local_world_size": "MY_LOCAL_SIZE",
        "world_size": "MY_SIZE",
    }
    creates_processes_externally = False


class TwoOnANode(NodesEnvironment):
    """A user's environment of nodes, which has two processes on each."""

    constants: ClassVar[Mapping[str, int]] = {"local_rank": 0, "local_world_size": 2}


NODE = {"NODE_RANK": "0", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5000"}


@pytest.mark.parametrize("strategy", [DDPStrategy, DDPForkStrategy, SingleDeviceStrategy])
@pytest.mark.parametrize(
    ("environment", "seen"),
    [
        (StartsNothing({"MY_LOCAL_RANK": "1"}), "local_rank=1"),
        (StartsNothing({"MY_LOCAL_RANK": "0", "MY_LOCAL_SIZE": "2"}), "local_world_size=2"),
        (StartsNothing({"MY_SIZE": "2"}), "world_size=2"),
        (TwoOnANode(NODE), "local_world_size=2"),
    ],
    ids=["local_rank", "local_world_size", "world_size", "nodes"],
)
def test_a_rank_is_not_launched_again(
    strategy: type[Strategy], environment: ClusterEnvironment, seen: str
) -> None:
    """An environment that starts nothing and describes one of several processes is refused on each."""
    with pytest.raises(ConfigurationError, match=seen) as caught:
        strategy(accelerator="cpu", devices=1, cluster_environment=environment).bind()
    assert "creates_processes_externally" in caught.value.fix()


@pytest.mark.parametrize("variables", [{}, {"MY_LOCAL_RANK": "0", "MY_SIZE": "1"}], ids=["nothing", "one"])
def test_an_environment_that_starts_nothing(variables: Variables) -> None:
    """It need not know any rank: the strategy starts the processes."""
    strategy = DDPForkStrategy(accelerator="cpu", devices=2, cluster_environment=StartsNothing(variables))
    assert strategy.bind() == RankInfo(0, 0, 0, 2, 2, 1)


@pytest.fixture
def with_srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put an `srun` on PATH."""
    (tmp_path / "srun").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


@pytest.mark.usefixtures("with_srun")
@pytest.mark.parametrize(
    ("variables", "is_said"),
    [
        *((batch(4), True), (allocation(4), True), ({**batch(1), "SLURM_JOB_NUM_NODES": "4"}, True)),
        *((batch(2), False), (batch(1), False), ({"SLURM_NTASKS": "4"}, False)),
        ({**batch(4), "RANKWISE_ENVIRONMENT": "local"}, False),
    ],
    ids=["batch", "shell", "nodes", "all are used", "one task", "no job", "intended"],
)
def test_tasks_without_srun_are_said(
    monkeypatch: pytest.MonkeyPatch, variables: Variables, is_said: bool
) -> None:
    """A job whose other tasks do nothing, as srun has not started this one, unless that was chosen."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    text = "job 1042 has 4 tasks, but srun has not started this process: .* 2"
    with pytest.warns(UserWarning, match=text) if is_said else nullcontext():
        assert DDPForkStrategy(accelerator="cpu", devices=2).bind().world_size == 2


def test_devices_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting may initialise CUDA: not for the CPU, nor for slices named by UUID before a fork."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-5a3c7f1e")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigurationError, match="MIG-5a3c7f1e; torch initialises CUDA to count them"):
        DDPForkStrategy(accelerator="cuda", devices=1).bind()
    DDPStrategy(accelerator="cuda", devices=1).bind()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: pytest.fail("counted"))
    DDPForkStrategy(accelerator="cpu", devices=2).bind()
