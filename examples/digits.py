"""Train a small network on scikit-learn's handwritten digits, on several processes, and test it.

python examples/digits.py --strategy ddp --devices 2
torchrun --nproc-per-node 2 examples/digits.py
srun --ntasks 2 python examples/digits.py
"""

from __future__ import annotations

import argparse
import socket

import torch
from sklearn.datasets import load_digits
from sklearn.utils import shuffle
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from rankwise import Trainer, TrainingModule, rank_zero_only, seed_everything

print_once = rank_zero_only(print)


class DigitClassifier(TrainingModule):
    """Two layers over 8 x 8 pixels; counts how often each sample was trained on, on this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        self.seen = torch.zeros(1440, dtype=torch.long)  # not a buffer: DDP would copy rank 0's to all ranks

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels, numbers = batch
        self.seen[numbers.cpu()] += 1
        loss = nn.functional.cross_entropy(self.net(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def test_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> None:
        images, labels, _ = batch
        accuracy = (self.net(images).argmax(dim=1) == labels).double().mean()
        self.log("test_accuracy", accuracy, sync_dist=True)

    def on_train_end(self) -> None:
        strategy, epochs = self.trainer.strategy, self.trainer.current_epoch
        mine = f"node_rank {strategy.node_rank}, {socket.gethostname()}: {self.seen.sum() // epochs} samples"
        for rank, text in enumerate(strategy.all_gather_object(mine)):
            print_once(f"global_rank {rank} of {strategy.world_size}, {text} per epoch")
        seen = strategy.all_reduce(self.seen.to(self.device), reduce_op="sum")
        print_once(f"{epochs} epochs: each sample was seen {seen.min()} to {seen.max()} times")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def loaders() -> tuple[DataLoader[tuple[Tensor, ...]], DataLoader[tuple[Tensor, ...]]]:
    """Return the loaders for training (1440 samples, which 2, 3 or 4 ranks share evenly) and testing."""
    images, labels = shuffle(*load_digits(return_X_y=True), random_state=0)
    pixels = torch.tensor(images / 16, dtype=torch.float32)
    samples = TensorDataset(pixels, torch.tensor(labels), torch.arange(len(labels)))
    train, test = Subset(samples, range(1440)), Subset(samples, range(1440, len(samples)))
    return DataLoader(train, batch_size=16, shuffle=True), DataLoader(test, batch_size=64)


def main() -> None:
    """Train, test, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--devices", default="auto", help="processes on each node; default: all there are")
    parser.add_argument("--num-nodes", type=int, default=argparse.SUPPRESS, help="default: all there are")
    parser.add_argument("--max-epochs", type=int, default=15)
    seed_everything(7)
    trainer = Trainer(**vars(parser.parse_args()), enable_checkpointing=False, logger=False)
    train, test = loaders()
    model = DigitClassifier()
    trainer.fit(model, train)
    [metrics] = trainer.test(model, test)
    print_once(f"world size {trainer.world_size}, test accuracy {metrics['test_accuracy']:.1%}")


if __name__ == "__main__":
    main()
