"""Train a small network on scikit-learn's handwritten digits, on two processes, and test it.

python examples/digits.py --strategy ddp --devices 2
torchrun --nproc-per-node 2 examples/digits.py
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from rankwise import Trainer, TrainingModule, rank_zero_only, seed_everything

print_once = rank_zero_only(print)


class DigitClassifier(TrainingModule):
    """Two layers over 8 x 8 pixels; counts the samples that this rank has trained on."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        self.seen.add_(len(labels))
        loss = nn.functional.cross_entropy(self.net(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        accuracy = (self.net(images).argmax(dim=1) == labels).double().mean()
        self.log("test_accuracy", accuracy, sync_dist=True)

    def on_train_end(self) -> None:
        seen = self.trainer.strategy.all_gather(self.seen)
        for rank, count in enumerate(seen.reshape(-1).tolist()):
            print_once(f"global_rank {rank} trained on {count} samples")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def loaders() -> tuple[DataLoader[tuple[Tensor, ...]], DataLoader[tuple[Tensor, ...]]]:
    """Return the loaders for training and testing, not yet split over ranks: the Trainer does that."""
    images, labels = load_digits(return_X_y=True)
    samples = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    train, test = random_split(samples, [1437, 360], torch.Generator().manual_seed(0))
    return DataLoader(train, batch_size=16, shuffle=True), DataLoader(test, batch_size=64)


def main() -> None:
    """Train, test, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--num-nodes", type=int, help="default: as many as there are")
    arguments = parser.parse_args()
    seed_everything(7)
    trainer = Trainer(
        strategy=arguments.strategy,
        devices=arguments.devices,
        num_nodes=arguments.num_nodes or "auto",
        max_epochs=15,
        enable_checkpointing=False,
        logger=False,
    )
    train, test = loaders()
    model = DigitClassifier()
    trainer.fit(model, train)
    [metrics] = trainer.test(model, test)
    print_once(f"world size {trainer.world_size}, test accuracy {metrics['test_accuracy']:.1%}")


if __name__ == "__main__":
    main()
