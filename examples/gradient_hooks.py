"""A strategy without DDP: hooks average gradients during the backward pass, as Horovod's do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from rankwise import Strategy, Trainer, TrainingModule


class GradientHooks(Strategy):
    """Average each gradient as soon as the backward pass has computed it."""

    is_blocked = False

    def setup_module(self, module: nn.Module) -> nn.Module:
        module = super().setup_module(module)
        self.works: dict[Tensor, Any] = {}
        for parameter in module.parameters():
            handle = parameter.register_post_accumulate_grad_hook(self.on_gradient)
            self.job.cleanup.callback(handle.remove)
        return module

    def on_gradient(self, parameter: Tensor) -> None:
        if not self.is_blocked:
            self.begin_average(parameter)

    def begin_average(self, parameter: Tensor) -> None:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        self.works[parameter] = dist.all_reduce(parameter.grad.div_(self.world_size), async_op=True)

    @contextmanager
    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> Iterator[None]:
        before, self.is_blocked = self.is_blocked, enabled
        try:
            yield
        finally:
            self.is_blocked = before

    def sync_gradients(self, parameters: Sequence[Tensor]) -> None:
        for parameter in parameters:
            if parameter not in self.works:
                self.begin_average(parameter)
        for work in self.works.values():
            work.wait()
        self.works.clear()


class Line(TrainingModule):
    """Fit y = 3x + 1."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.layer(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.3)


def main() -> None:
    """Train on two processes with the strategy above."""
    x = torch.linspace(-1, 1, 64).unsqueeze(1)
    loader = DataLoader(TensorDataset(x, 3 * x + 1), batch_size=8, shuffle=True)
    model = Line()
    strategy = GradientHooks()
    trainer = Trainer(strategy=strategy, devices=2, max_epochs=10, logger=False, enable_checkpointing=False)
    trainer.fit(model, loader)
    if trainer.is_global_zero:
        print(f"y = {model.layer.weight.item():.2f} x + {model.layer.bias.item():.2f}")


if __name__ == "__main__":
    main()
