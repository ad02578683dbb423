"""Train under Slurm in a job that may be interrupted: it saves, is requeued, and resumes.

srun --ntasks 2 python examples/slurm/requeue.py FOLDER_THAT_ALL_NODES_SEE
"""

from __future__ import annotations

import argparse
import hashlib

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from rankwise import Trainer, TrainingModule, rank_zero_only, seed_everything

print_once = rank_zero_only(print)


class Classifier(TrainingModule):
    """Two layers and dropout, whose random numbers are resumed too."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))

    def on_train_start(self) -> None:
        print_once(f"training from step {self.global_step}", flush=True)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def on_train_epoch_end(self) -> None:
        print_once(f"epoch {self.current_epoch}", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main() -> None:
    """Train to the end, in as many jobs as needed; then print a hash of the weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--max-epochs", type=int, default=100)
    arguments = parser.parse_args()
    seed_everything(7)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    model = Classifier()
    trainer = Trainer(
        strategy="ddp",
        max_epochs=arguments.max_epochs,
        default_root_dir=arguments.folder,
        enable_checkpointing=False,
        logger=False,
    )
    trainer.fit(model, DataLoader(data, batch_size=16, shuffle=True))
    weights = b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())
    print_once(f"{trainer.global_step} steps, weights {hashlib.sha256(weights).hexdigest()}")


if __name__ == "__main__":
    main()
