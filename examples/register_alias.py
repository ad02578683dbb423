"""Register a name for a configured strategy, and use it like any other name."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from rankwise import DDPStrategy, StrategyRegistry, Trainer, TrainingModule, rank_zero_only

StrategyRegistry.register(
    "ddp_small_buckets",
    DDPStrategy,
    description="DDP with buckets of 1 MB and gradients that are views of them",
    bucket_cap_mb=1,
    gradient_as_bucket_view=True,
)


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
    """Train on two processes by the new name."""
    x = torch.linspace(-1, 1, 64).unsqueeze(1)
    loader = DataLoader(TensorDataset(x, 3 * x + 1), batch_size=8, shuffle=True)
    model = Line()
    trainer = Trainer(
        strategy="ddp_small_buckets", devices=2, max_epochs=10, logger=False, enable_checkpointing=False
    )
    trainer.fit(model, loader)
    report(StrategyRegistry.describe("ddp_small_buckets"))
    report(f"y = {model.layer.weight.item():.2f} x + {model.layer.bias.item():.2f}")


if __name__ == "__main__":
    main()
