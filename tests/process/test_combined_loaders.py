"""Several training loaders on two ranks: each is split, and the ranks train as one process would."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from rankwise.callbacks import LambdaCallback
from rankwise.data import CombinedLoader
from rankwise.errors import ConfigurationError, WorkerRaisedError
from tests.process.helpers import ddp
from tests.process.test_uneven_inputs import Lengths
from tests.process.training_tasks import Regression, loader, quiet_trainer


class Both(Regression):
    """Trains on labelled samples and on others, each with its own loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self(batch["a"][0]), batch["a"][1])
        self.log("train_loss", loss.detach(), on_epoch=True, sync_dist=True)
        return loss if batch["b"] is None else loss + self(batch["b"][0]).square().mean()


def loaders(devices: int) -> dict[str, Any]:
    """Return loaders of 6 and 2 global batches, in random orders."""
    return {"a": loader(24, 4 // devices, shuffle=True), "b": loader(8, 4 // devices, shuffle=True)}


def fitted(strategy: Any, devices: int, given: Any, **options: Any) -> tuple[dict[str, Tensor], float]:
    """Train for two epochs; return the weights and the epoch's loss."""
    ckpt_path = options.pop("ckpt_path", None)
    torch.manual_seed(options.pop("seed", 5))
    trainer, module = quiet_trainer(strategy, devices, max_epochs=2, **options), Both()
    trainer.fit(module, given, ckpt_path=ckpt_path)
    return module.state_dict(), float(trainer.callback_metrics.get("train_loss_epoch", 0))


@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle", "max_size"])
def test_two_ranks_as_one(mode: Any) -> None:
    """Weights and logged means are one process's on the same global batches."""
    expected = fitted("single_device", 1, CombinedLoader(loaders(1), mode))
    found = fitted(ddp("fork"), 2, CombinedLoader(loaders(2), mode))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_resuming_within_an_epoch(tmp_path: Path) -> None:
    """In the second pass over the shorter loader: the same to the bit, on the same number of ranks only."""
    path = tmp_path / "four.ckpt"

    def save(trainer: Any, *_: Any) -> None:
        if trainer.global_step == 10:
            trainer.save_checkpoint(path)

    whole = fitted(ddp("fork"), 2, loaders(2), callbacks=LambdaCallback(on_train_batch_end=save))
    resumed = fitted(ddp("fork"), 2, loaders(2), ckpt_path=path, seed=6)
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)
    with pytest.raises(ConfigurationError, match="within an epoch on another number of ranks"):
        fitted("single_device", 1, loaders(1), ckpt_path=path)


def test_loaders_of_other_lengths_on_a_rank() -> None:
    """Parts that the user has split unevenly are an error that names the loader, on all ranks."""

    class Uneven(Both):
        def train_dataloader(self) -> Any:
            return {"a": loader(8, 2), "b": loader(6 + 2 * self.global_rank, 2)}

    trainer = quiet_trainer(ddp("fork"), 2, use_distributed_sampler=False)
    with pytest.raises(WorkerRaisedError, match=r"(?s)Training loader 1 of several.*3.*4"):
        trainer.fit(Uneven())


def test_streams_that_end_at_different_batches() -> None:
    """`uneven_inputs="truncate"` ends the epoch on both ranks with the shorter; `"max_size"` is refused."""
    data = Lengths((5, 3))
    data.shards_itself = True  # type: ignore[attr-defined]  # read by rankwise
    streams = {"a": loader(40, 2), "b": DataLoader(data)}
    trainer = quiet_trainer(ddp("fork"), 2, max_epochs=1, uneven_inputs="truncate")
    trainer.fit(Both(), CombinedLoader(streams))
    assert trainer.global_step == 3
    with pytest.raises(WorkerRaisedError, match="needs loaders whose lengths are known"):
        quiet_trainer(ddp("fork"), 2).fit(Both(), CombinedLoader(streams, "max_size"))
