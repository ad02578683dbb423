"""A strategy without DDP: each rank steps by its own gradients, and the models are averaged (local SGD)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from rankwise import Strategy, Trainer, TrainingModule, rank_zero_only


class ModelAveraging(Strategy):
    """Average the models of all ranks after every `period`-th step."""

    has_equal_models = False  # not after each step

    def __init__(self, *, period: int = 4, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.period = period
        self.num_steps = 0

    def setup_module(self, module: nn.Module) -> nn.Module:
        self.module = super().setup_module(module)
        return self.module

    def sync_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Leave the gradients as they are."""

    def optimizer_step(self, optimizer: torch.optim.Optimizer, closure: Any = None, **options: Any) -> Any:
        returned = super().optimizer_step(optimizer, closure, **options)
        self.num_steps += 1
        if self.num_steps % self.period == 0:
            self.sync_models()
        return returned

    @torch.no_grad()
    def sync_models(self) -> None:
        for parameter in self.module.parameters():
            parameter.copy_(self.all_reduce(parameter))


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


@rank_zero_only
def report(text: str) -> None:
    """Print on global rank zero."""
    print(text)


def main() -> None:
    """Train on two processes with the strategy above."""
    x = torch.linspace(-1, 1, 64).unsqueeze(1)
    loader = DataLoader(TensorDataset(x, 3 * x + 1), batch_size=8, shuffle=True)
    model = Line()
    strategy = ModelAveraging(period=2)
    trainer = Trainer(strategy=strategy, devices=2, max_epochs=10, logger=False, enable_checkpointing=False)
    trainer.fit(model, loader)
    report(f"y = {model.layer.weight.item():.2f} x + {model.layer.bias.item():.2f}")


if __name__ == "__main__":
    main()
