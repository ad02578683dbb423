"""What the GPU tests run in processes of their own, so that CUDA is never initialised in pytest's."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from rankwise import DDPStrategy, Strategy, Trainer, TrainingModule
from rankwise.precision import MasterWeightsPrecision, MixedPrecision
from rankwise.process_group.collectives import all_gather, all_reduce

SAMPLES = 16


def images() -> Tensor:
    return torch.randn(SAMPLES, 1, 4, 4, generator=torch.Generator().manual_seed(3))


def net() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 1))


def train_scaled(strategy: Strategy, name: str) -> dict[str, Any]:
    """Take 4 steps with a scaled loss, one of them infinite; say what was seen."""
    precision: Any = MixedPrecision if name == "16-mixed" else MasterWeightsPrecision
    strategy.precision = precision(name, init_scale=64.0)
    strategy.precision.device_type = strategy.root_device.type
    model = strategy.setup_module(net())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    strategy.precision.configure(strategy.unwrap_module(model), [optimizer])
    x, skipped, output = images().to(strategy.root_device), [], torch.empty(0)
    for step in range(4):
        strategy.precision.zero_grad(optimizer)
        with strategy.precision.forward_context():
            output = model(strategy.precision.convert_input(x))
        loss = output.float().square().mean()
        strategy.backward(loss * float("inf") if step == 1 else loss)
        strategy.precision.clip_gradients_norm(optimizer, 1.0)
        strategy.optimizer_step(optimizer)
        skipped.append(strategy.precision.has_skipped_step)
    inner: Any = strategy.unwrap_module(model)
    return {
        "output": str(output.dtype),
        "convolution": str(inner[0].weight.dtype),
        "normalisation": str(inner[1].weight.dtype),
        "updated": sorted({str(each.dtype) for each in strategy.precision.main_parameters(optimizer)}),
        "skipped": skipped,
        "scale": strategy.precision.state_dict()["scaler"]["scale"],
        "is_finite": all(bool(each.isfinite().all()) for each in inner.parameters()),
        "devices": sorted({str(each.device) for each in strategy.precision.main_parameters(optimizer)}),
    }


def train_plainly(strategy: Strategy) -> list[float]:
    """Return the weights after 5 steps through the wrapper, less those of a loop without one."""
    wrapped, plain = strategy.setup_module(net()), net().to(strategy.root_device)
    x = images().to(strategy.root_device)
    for model in (wrapped, plain):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    pairs = zip(wrapped.parameters(), plain.parameters(), strict=True)
    return [float((mine - theirs).detach().abs().max()) for mine, theirs in pairs]


def describe_group(strategy: Strategy) -> dict[str, Any]:
    """Say what carries the collectives, and whether they work on the device."""
    group: Any = dist.group.WORLD
    total = torch.full((3,), 2.0, device=strategy.root_device)
    dist.all_reduce(total)
    return {
        "backend": dist.get_backend(),
        "device": str(group.bound_device_id),
        "sum": total.tolist(),
        "is_current": torch.cuda.current_device() == strategy.root_device.index,
    }


def gather_on_two(strategy: Strategy) -> list[list[float]]:
    """Gather values of the CPU and the GPU over a group of NCCL alone, forward and back, and a weight."""
    rank, found = strategy.global_rank, []
    for device in (torch.device("cpu"), strategy.root_device):
        own = torch.full((2,), rank + 1.0, device=device, requires_grad=True)
        gathered: Any = all_gather(own, sync_grads=True)
        (gathered * gathered.new_tensor([[1.0], [10.0]])).sum().backward()
        assert own.grad is not None
        assert gathered.device == own.grad.device == device
        found += [gathered.flatten().tolist(), own.grad.tolist()]
    return [*found, [all_reduce(rank + 1.0)]]


def fail_on_one(strategy: Strategy) -> None:
    """Fail on rank 1 while rank 0 waits for it in a collective of NCCL."""
    if strategy.global_rank == 1:
        raise ValueError("rank 1 fails")
    total = torch.ones(1, device=strategy.root_device)
    dist.all_reduce(total)
    total.item()


class Images(TrainingModule):
    """A small convolution with batch normalisation, whose layers it names."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.kinds: list[str] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch[0]).square().mean()
        return loss

    def on_train_start(self) -> None:
        self.kinds = [type(layer).__name__ for layer in self.net]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def quiet(**arguments: Any) -> Trainer:
    silent: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    return Trainer(**{**silent, "max_epochs": 2, **arguments})


def fit_shared(path: str, accelerator: str, devices: int) -> None:
    """Train over the ranks that torchrun has started, with SyncBatchNorm; write the weights down."""
    is_shared = devices > 1
    strategy = DDPStrategy(process_group_backend="gloo")
    trainer = quiet(accelerator=accelerator, strategy=strategy, sync_batchnorm=is_shared, precision="64-true")
    module = Images()
    trainer.fit(module, DataLoader(TensorDataset(images()), batch_size=8 // devices))
    if trainer.is_global_zero:
        state = {name: value.double().flatten().tolist() for name, value in module.net.state_dict().items()}
        after = [type(layer).__name__ for layer in module.net]
        found = {"during": module.kinds, "after": after, "state": state, "world_size": trainer.world_size}
        Path(path).write_text(json.dumps(found))
