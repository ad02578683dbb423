"""Subclass DDPStrategy to use a custom wrapper, here one that counts its forward passes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from rankwise import DDPStrategy, Trainer, TrainingModule, rank_zero_only


class CountingWrapper(DistributedDataParallel):
    """DistributedDataParallel that counts its calls."""

    calls = 0

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]  # torch's own has no types


class CountingStrategy(DDPStrategy):
    """DDPStrategy with that wrapper."""

    wrapper: CountingWrapper | None = None

    def configure_ddp(self, module: nn.Module, device_ids: list[int] | None) -> DistributedDataParallel:
        self.wrapper = CountingWrapper(
            module, device_ids=device_ids, process_group=self.data_parallel_group, **self.ddp_kwargs
        )
        return self.wrapper


class Line(TrainingModule):
    """Fit y = 3x + 1."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.layer(x), y)

    def on_train_end(self) -> None:
        strategy = self.trainer.strategy
        if isinstance(strategy, CountingStrategy) and strategy.wrapper is not None:
            report(f"{type(strategy.wrapper).__name__} was called {strategy.wrapper.calls} times")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.3)


@rank_zero_only
def report(text: str) -> None:
    """Print on global rank zero."""
    print(text)


def main() -> None:
    """Train on two processes with the strategy above."""
    x = torch.linspace(-1, 1, 64).unsqueeze(1)
    loader = DataLoader(TensorDataset(x, 3 * x + 1), batch_size=8, shuffle=True)
    model = Line()
    trainer = Trainer(
        strategy=CountingStrategy(), devices=2, max_epochs=10, logger=False, enable_checkpointing=False
    )
    trainer.fit(model, loader)
    report(f"y = {model.layer.weight.item():.2f} x + {model.layer.bias.item():.2f}")


if __name__ == "__main__":
    main()
