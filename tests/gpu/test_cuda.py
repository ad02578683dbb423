"""What only a GPU can show: scaled float16, streams, NCCL, SyncBatchNorm, a shared device."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from rankwise import DDPSpawnStrategy, DDPStrategy
from rankwise.errors import WorkerError
from tests.gpu import cuda_tasks
from tests.gpu.cuda_tasks import Images, images, quiet
from tests.helpers.ports import free_port
from tests.helpers.scripts import ScriptRunner
from tests.process.helpers import with_tests

SHARED = """
import sys
from tests.gpu.cuda_tasks import fit_shared

fit_shared(sys.argv[1], sys.argv[2], int(sys.argv[3]))
"""
FORKED = """
import torch
from rankwise import DDPForkStrategy
from rankwise.errors import LaunchRefusedError

def run(strategy):
    return 1

torch.zeros(1, device="cuda")
try:
    DDPForkStrategy(accelerator="cuda", devices=1).launch(run)
except LaunchRefusedError as error:
    print("refused:", error)
"""


def on_gpu(**arguments: Any) -> DDPSpawnStrategy:
    return DDPSpawnStrategy(accelerator="cuda", devices=1, **arguments)


@pytest.mark.parametrize("name", ["16-mixed", "16-master"])
def test_float16_is_scaled(name: str) -> None:
    """On a GPU a float16 overflow skips one step and halves the scale; the others train."""
    seen = on_gpu().launch(cuda_tasks.train_scaled, name)
    is_mixed = name == "16-mixed"
    assert seen["output"] == "torch.float16"
    assert seen["convolution"] == ("torch.float32" if is_mixed else "torch.float16")
    assert seen["normalisation"] == "torch.float32"
    assert seen["updated"] == ["torch.float32"]
    assert seen["devices"] == ["cuda:0"]
    assert (seen["skipped"], seen["scale"]) == ([False, True, False, False], 32.0)
    assert seen["is_finite"]


def test_wrapped_on_the_right_stream() -> None:
    """A module wrapped on a side stream trains as one that is not wrapped."""
    assert max(on_gpu().launch(cuda_tasks.train_plainly)) < 1e-5


def test_nccl_knows_its_device() -> None:
    """NCCL carries collectives on CUDA, and was told the device, so that none is guessed."""
    seen = on_gpu().launch(cuda_tasks.describe_group)
    assert seen == {"backend": "nccl", "device": "cuda:0", "sum": [2.0] * 3, "is_current": True}


two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch sees fewer than two devices")


@two_devices
@pytest.mark.parametrize("backend", ["nccl", "cuda:nccl", "cpu:gloo,cuda:nccl"])
def test_values_of_the_cpu_over_nccl(backend: str) -> None:
    """They travel on the group's device, and come back to the CPU, as do their gradients."""
    strategy = DDPSpawnStrategy(accelerator="cuda", devices=2, process_group_backend=backend)
    one_side = [[1.0, 1.0, 2.0, 2.0], [2.0, 2.0]]
    assert strategy.launch(cuda_tasks.gather_on_two) == [*one_side, *one_side, [1.5]]


@two_devices
@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_a_failure_beside_a_collective_of_nccl(start_method: str) -> None:
    """The rank that waits for the one that failed ends soon: its group is aborted, not destroyed."""
    strategy = DDPStrategy(accelerator="cuda", devices=2, start_method=start_method)
    began = time.monotonic()
    with pytest.raises(WorkerError, match="rank 1 fails") as failed:
        strategy.launch(cuda_tasks.fail_on_one)
    assert failed.value.global_rank == 1
    assert time.monotonic() - began < 60


def test_state_comes_back_to_the_cpu() -> None:
    """After a fit on the GPU elsewhere the caller's module is on the CPU; a second fit goes on."""
    trainer = quiet(accelerator="cuda", devices=1, strategy="ddp_spawn", precision="16-mixed")
    module = Images()
    weight: Any = module.net[0].weight
    before = weight.detach().clone()
    for epochs in (1, 2):
        trainer.max_epochs = epochs
        trainer.fit(module, DataLoader(TensorDataset(images()), batch_size=8))
        assert weight is module.net[0].weight
        assert weight.device.type == "cpu"
        assert trainer.global_step == 2 * epochs
    assert trainer.strategy.precision.state_dict()["scaler"]["scale"] > 0
    assert not torch.equal(weight, before)


def test_two_ranks_share_a_gpu_with_sync_batchnorm(run_script: ScriptRunner, tmp_path: Path) -> None:
    """Two gloo ranks on one GPU, with batch statistics over both, train as one process on the CPU."""
    script, found = tmp_path / "shared.py", {}
    script.write_text(SHARED)
    for devices, accelerator in ((2, "cuda"), (1, "cpu")):
        result = tmp_path / f"{devices}.json"
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(devices)]
        port = ["--master-port", str(free_port())]
        command = [sys.executable, *torchrun, *port, str(script), str(result), accelerator, str(devices)]
        run = run_script.command(command, env=with_tests(), timeout=100)
        assert run.returncode == 0, run
        found[devices] = json.loads(result.read_text())
    assert found[2]["world_size"] == 2
    assert "SyncBatchNorm" in found[2]["during"]
    assert found[2]["after"] == found[1]["after"]
    assert "BatchNorm2d" in found[2]["after"]
    for name, values in found[1]["state"].items():
        mine, theirs = torch.tensor(found[2]["state"][name]), torch.tensor(values)
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6, msg=name)


def test_fork_after_cuda_is_refused(run_script: ScriptRunner) -> None:
    """A process that has initialised CUDA is not forked: that is said, before anything starts."""
    result = run_script(FORKED, timeout=100, fresh=True)
    assert result.returncode == 0, result
    assert result.stdout.count("refused:") == 1
    assert "CUDA" in result.stdout
