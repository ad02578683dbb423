"""Hyperparameters and attributes of modules that train in other processes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rankwise.callbacks import ModelCheckpoint
from rankwise.loggers import CSVLogger
from tests.process.training_tasks import Regression, loader, quiet_trainer


class Configured(Regression):
    def __init__(self, optimizer: str, factor: float, layers: list[int]) -> None:
        super().__init__(optimizer)
        self.save_hyperparameters()
        self.gathered: list[Any] = []
        self.gradient = torch.zeros(2)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.gathered.append(self.all_gather({"rank": self.global_rank})["rank"].tolist())
        loss: Tensor = super().training_step(batch, batch_idx) * self.hparams.factor
        return loss

    def on_train_end(self) -> None:
        self.hparams.trained = True
        self.print(f"rank {self.global_rank} of {self.trainer.world_size}")
        own = torch.full((2,), 1.0 + self.global_rank, requires_grad=True)
        self.all_gather(own, sync_grads=True).square().sum().backward()
        assert own.grad is not None
        self.gradient = own.grad


@pytest.mark.quick
@pytest.mark.parametrize("strategy", ["ddp_fork", pytest.param("ddp_spawn", marks=pytest.mark.soak)])
def test_they_are_everywhere(strategy: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """They reach workers, checkpoints, one logger, and the caller again, as attributes do."""
    saving, logger = ModelCheckpoint(tmp_path), CSVLogger(tmp_path)
    trainer = quiet_trainer(
        strategy, 2, max_epochs=1, callbacks=saving, logger=logger, enable_checkpointing=True
    )
    given: dict[str, Any] = {"optimizer": "sgd", "factor": 0.5, "layers": [3, 4]}
    module = Configured(**given)
    gathered = module.gathered
    trainer.fit(module, loader(16, 4))
    assert (module.hparams, module.hparams_initial) == ({**given, "trained": True}, given)
    assert module.gathered is gathered == [[0, 1], [0, 1]]
    assert module.gradient.tolist() == [4, 4]  # 2 * own, summed over two ranks
    assert capfd.readouterr().out == "rank 0 of 2\n"
    assert json.loads((Path(logger.log_dir) / "hparams.json").read_text()) == given
    loaded = Configured.load_from_checkpoint(saving.best_model_path)
    assert loaded.hparams == given
    for mine, theirs in zip(module.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(mine, theirs)
