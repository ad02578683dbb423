"""What a custom DDP plug-in of PyTorch Lightning 1.1 could do, in one strategy on two processes."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from rankwise import DDPStrategy, Trainer, TrainingModule
from tests.helpers.shared import computed_once

SAMPLES = 12


class Wrapper(DistributedDataParallel):
    """A wrapper of one's own."""


class MyDDP(DDPStrategy):
    """Overrides every hook, and records its arguments."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(start_method="fork", **arguments)
        self.seen: list[str] = []

    def configure_ddp(self, module: nn.Module, device_ids: list[int] | None) -> DistributedDataParallel:
        self.seen.append(f"configure_ddp {device_ids}")
        return Wrapper(module, device_ids=device_ids, **self.ddp_kwargs)

    def batch_to_device(self, batch: Any) -> Any:
        self.seen.append("batch_to_device")
        return [tensor + 1000 for tensor in super().batch_to_device(batch)]

    def on_after_setup_optimizers(self, optimizers: list[torch.optim.Optimizer]) -> None:
        super().on_after_setup_optimizers(optimizers)
        self.seen.append(f"optimizers {[type(optimizer).__name__ for optimizer in optimizers]}")
        optimizers[0].param_groups[0]["lr"] = 0.5

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        return {"num_replicas": 3, "rank": self.global_rank + 1}


class Notes(TrainingModule):
    """Keeps the records of the ranks among its hyperparameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        self.counts = torch.zeros(SAMPLES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.counts[(batch[0][:, 0] - 1000).long()] += 1
        loss: Tensor = self.layer(batch[0] - 1000).mean()
        return loss

    def on_train_end(self) -> None:
        strategy = self.trainer.strategy
        assert isinstance(strategy, MyDDP)
        [wrapper] = strategy.job.modules.wrappers
        dist.all_reduce(self.counts)
        self.hparams = {
            "counts": self.counts.tolist(),
            "seen": [*dict.fromkeys(strategy.seen)],
            "wrapper": type(wrapper).__name__,
            "find_unused_parameters": wrapper.find_unused_parameters,
            "broadcasts": getattr(wrapper, "gradient_as_bucket_view", None),
            "unwrapped": strategy.unwrap_module(wrapper) is self,
            "optimizer_state": list(strategy.get_optimizer_state(self.trainer.optimizers[0])["state"]),
            "lr": self.trainer.optimizers[0].param_groups[0]["lr"],
        }

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.1)


@pytest.fixture
@computed_once
def fitted() -> Notes:
    """Fit once, with the strategy among the plug-ins."""
    module = Notes()
    strategy = MyDDP(gradient_as_bucket_view=True)
    data = DataLoader(TensorDataset(torch.arange(float(SAMPLES)).unsqueeze(1)), batch_size=2)
    trainer = Trainer(
        plugins=[strategy],
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    assert trainer.strategy is strategy
    trainer.fit(module, data)
    return module


@pytest.mark.quick
def test_trainer_plugins(fitted: Notes) -> None:
    """`Trainer(plugins=[my_ddp])`: the strategy among the plug-ins is the one that trains."""
    assert fitted.hparams["wrapper"] == "Wrapper"


def test_ddp_plugin_kwargs(fitted: Notes) -> None:
    """`DDPPlugin(**kwargs)`: DDP gets them, and `find_unused_parameters=False` where it is unset."""
    assert (fitted.hparams["broadcasts"], fitted.hparams["find_unused_parameters"]) == (True, False)


def test_configure_ddp(fitted: Notes) -> None:
    """`configure_ddp(model, device_ids)`: any wrapper may be returned; on the CPU there are no ids."""
    assert "configure_ddp None" in fitted.hparams["seen"]


def test_on_before_forward(fitted: Notes) -> None:
    """`on_before_forward`: `batch_to_device` is called before each step, and may change the batch."""
    assert "batch_to_device" in fitted.hparams["seen"]
    assert sum(fitted.hparams["counts"]) == 2 * SAMPLES / 3


def test_optimizer_state(fitted: Notes) -> None:
    """`optimizer_state(optimizer)`: the whole state, for every parameter."""
    assert fitted.hparams["optimizer_state"] == [0]


@pytest.mark.quick
def test_on_after_setup_optimizers(fitted: Notes) -> None:
    """`on_after_setup_optimizers`: called once they exist, and may change them."""
    assert "optimizers ['Adam']" in fitted.hparams["seen"]
    assert fitted.hparams["lr"] == 0.5


@pytest.mark.quick
def test_get_model_from_plugin(fitted: Notes) -> None:
    """`get_model_from_plugin(model)`: the user's own module is what comes out of the wrapper."""
    assert fitted.hparams["unwrapped"] is True


@pytest.mark.quick
def test_distributed_sampler_kwargs(fitted: Notes) -> None:
    """`distributed_sampler_kwargs`: the ranks are numbers 1 and 2 of three, so number 0's are left out."""
    assert fitted.hparams["counts"] == [float(number % 3 != 0) for number in range(SAMPLES)]


@pytest.mark.distributed
@pytest.mark.quick
def test_block_backward_sync(rank_strategy: DDPStrategy) -> None:
    """`block_backward_sync(model)`: no reduction happens in the block."""
    seen: list[int] = []

    def counting(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        seen.append(bucket.index())
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    rank_strategy.gradients = DDPStrategy(comm_hook=counting).gradients
    wrapped = rank_strategy.setup_module(nn.Linear(1, 1))
    for enabled in (True, True, True, False) * 2:
        with rank_strategy.no_backward_sync(wrapped, enabled=enabled):
            wrapped(torch.ones(1, 1)).sum().backward()
        assert (len(seen) > 0) is not enabled
        seen.clear()


class InPlace(DDPStrategy):
    """Replaces `self.model`, as strategies of Lightning 2 do."""

    model: Any = "the user's own"

    def configure_ddp(self) -> None:  # type: ignore[override]
        options: Any = vars(self)["_ddp_kwargs"]
        self.model = Wrapper(self.model, device_ids=self.determine_ddp_device_ids(), **options)


class AroundSuper(InPlace):
    """Changes the wrapper that the strategy makes by itself."""

    def configure_ddp(self) -> None:  # type: ignore[override]
        configure_ddp: Any = super(InPlace, self).configure_ddp
        configure_ddp()
        self.model.name = "changed"


@pytest.mark.distributed
@pytest.mark.quick
def test_configure_ddp_of_lightning_2(rank_strategy: DDPStrategy) -> None:
    """`configure_ddp(self)` gets the module as `self.model`, which is its own again after the wrapping."""
    strategy: Any = rank_strategy
    for kind in (InPlace, AroundSuper):
        strategy.__class__ = kind
        module = nn.Linear(1, 1)
        wrapped: Any = strategy.setup_module(module)
        assert wrapped.module is module
        assert isinstance(wrapped, Wrapper) or wrapped.name == "changed"
        assert strategy.model == "the user's own"
        assert "_setup_model" not in vars(strategy)
    with pytest.raises(TypeError, match="missing 2 required positional arguments"):
        super(InPlace, strategy).configure_ddp()  # outside of the wrapping
