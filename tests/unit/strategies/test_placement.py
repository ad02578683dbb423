"""Which device each rank takes, by what torch sees and what was started."""

from __future__ import annotations

import pytest
import torch

from rankwise.environments import SlurmEnvironment
from rankwise.errors import InvalidArgumentError
from rankwise.ranks import rank_zero_only
from rankwise.strategies import DDPStrategy
from rankwise.strategies.placement import local_devices
from tests.unit.environments.variables import step

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
    """With `srun --gpus-per-task=1` each task sees its own device alone, as number 0, whatever its rank."""
    strategy = bound(monkeypatch, local_rank, visible)
    assert strategy.root_device == torch.device("cuda", 0)
    assert strategy.determine_ddp_device_ids() == [0]
    assert (strategy.world_size, strategy.local_rank) == (4, local_rank)


def test_one_visible_device_per_task_and_a_number_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """`devices=4`, the number of tasks on the node, is right there too."""
    assert bound(monkeypatch, 2, UUID, devices=4).root_device == torch.device("cuda", 0)


@pytest.mark.parametrize("local_rank", range(4))
def test_all_devices_visible(monkeypatch: pytest.MonkeyPatch, local_rank: int) -> None:
    """With `--gpus-per-node=4` every task sees all, and takes the one of its local rank."""
    assert bound(monkeypatch, local_rank, "0,1,2,3").root_device == torch.device("cuda", local_rank)


def test_chosen_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of indices is taken as it is, and one that is not there refused."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert local_devices("cuda", (3, 1), None) == [torch.device("cuda", 3), torch.device("cuda", 1)]
    with pytest.raises(InvalidArgumentError, match="torch sees 4"):
        local_devices("cuda", (4,), None)
    with pytest.raises(InvalidArgumentError, match="torch sees 4"):
        local_devices("cuda", 5, None)
