"""What a custom DDP plug-in of PyTorch Lightning 1.1 could do, in one strategy on two processes."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from rankwise import DDPStrategy, TrainingModule
from tests.process.test_collective_counts import Count
from tests.process.training_tasks import quiet_trainer

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


class Checks(TrainingModule):
    """Counts its samples; checks on each rank what the strategy was asked for, and what it has changed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)
        self.counts = torch.zeros(SAMPLES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.counts[(batch[0][:, 0] - 1000).long()] += 1
        loss: Tensor = self.layer(batch[0] - 1000).mean()
        return loss

    def on_train_end(self) -> None:
        strategy, [optimizer] = self.trainer.strategy, self.trainer.optimizers
        assert isinstance(strategy, MyDDP)
        [wrapper] = strategy.job.modules.wrappers
        assert type(wrapper) is Wrapper
        assert (wrapper.gradient_as_bucket_view, wrapper.find_unused_parameters) == (True, False)
        assert strategy.unwrap_module(wrapper) is self
        assert {*strategy.seen} == {"configure_ddp None", "optimizers ['Adam']", "batch_to_device"}
        assert optimizer.param_groups[0]["lr"] == 0.5
        assert [*strategy.get_optimizer_state(optimizer)["state"]] == [0]
        dist.all_reduce(self.counts)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.1)


@pytest.mark.quick
def test_trainer_plugins() -> None:
    """`Trainer(plugins=[my_ddp])`: it wraps, forwards its arguments to DDP, and can change each step's input.

    By its sampler's arguments the ranks are numbers 1 and 2 of three, so number 0's samples are left out.
    """
    module, strategy = Checks(), MyDDP(gradient_as_bucket_view=True)
    trainer = quiet_trainer("auto", 2, plugins=[strategy], max_epochs=1)
    assert trainer.strategy is strategy
    trainer.fit(module, DataLoader(TensorDataset(torch.arange(float(SAMPLES)).unsqueeze(1)), batch_size=2))
    assert module.counts.tolist() == [float(number % 3 != 0) for number in range(SAMPLES)]


@pytest.mark.distributed
@pytest.mark.quick
def test_block_backward_sync(rank_strategy: DDPStrategy) -> None:
    """`block_backward_sync(model)`: no reduction happens in the block."""
    wrapped = rank_strategy.setup_module(nn.Linear(1, 1))
    for enabled in (True, True, True, False) * 2:
        with rank_strategy.no_backward_sync(wrapped, enabled=enabled):
            loss = wrapped(torch.ones(1, 1)).sum()
            count = Count()
            loss.backward()
        assert (count.now() > 0) is not enabled


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
