"""A data module in other processes: prepared once, split over the ranks, its attributes in the caller."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, random_split

from rankwise import DataModule
from rankwise.errors import NotPicklableError, WorkerRaisedError
from tests.process.training_tasks import Regression, dataset, quiet_trainer


class Prepared(DataModule):
    """Writes a line for each call of `prepare_data`, and fails there if asked to."""

    def __init__(self, path: Path, batch_size: int, fails: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters("batch_size")
        self.path, self.fails = path, fails
        self.stages: list[str] = []

    def prepare_data(self) -> None:
        if self.fails:
            raise OSError("no such archive")
        with self.path.open("a") as file:
            file.write("prepared\n")

    def setup(self, stage: str) -> None:
        assert self.path.exists()
        self.stages.append(stage)
        self.data = dataset(24)

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, self.hparams.batch_size, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.data, 5)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        assert self.trainer is not None
        self.world_size = self.trainer.world_size
        return batch


def fitted(strategy: str, devices: int, folder: Path) -> tuple[Prepared, Regression]:
    """Train with a data module for two epochs of four global batches of 6."""
    data, module = Prepared(folder / strategy, 6 // devices), Regression()
    quiet_trainer(strategy, devices, max_epochs=2).fit(module, data)
    return data, module


def test_two_processes_as_one(tmp_path: Path) -> None:
    """Under forkserver weights are those of one process, and what the hooks have set is in the caller."""
    _, expected = fitted("single_device", 1, tmp_path)
    data, module = fitted("ddp_forkserver", 2, tmp_path)
    torch.testing.assert_close([*module.parameters()], [*expected.parameters()], rtol=0, atol=1e-12)
    assert data.path.read_text() == "prepared\n"
    assert (data.stages, data.world_size, data.hparams.batch_size) == (["fit"], 2, 3)


class Drawn(Prepared):
    """Draws the samples of its training loader each time it is asked for it."""

    def train_dataloader(self) -> Any:
        part, _ = random_split(self.data, [12, 12])
        return DataLoader(part, self.hparams.batch_size, shuffle=True)


@pytest.mark.quick
def test_loaders_of_later_epochs(tmp_path: Path) -> None:
    """Loaders that are made again have the same samples on all ranks, as in one process."""

    def weights(strategy: str, devices: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(4)
        module = Regression()
        options = {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1}
        quiet_trainer(strategy, devices, **options).fit(module, Drawn(tmp_path / "data", 6 // devices))
        return module.state_dict()

    torch.testing.assert_close(weights("ddp_fork", 2), weights("single_device", 1), rtol=0, atol=1e-12)


@pytest.mark.quick
def test_a_failure_of_prepare_data(tmp_path: Path) -> None:
    """The other rank, which waits, ends too; the caller gets the error."""
    trainer = quiet_trainer("ddp_fork", 2)
    with pytest.raises(WorkerRaisedError, match="no such archive") as caught:
        trainer.fit(Regression(), Prepared(tmp_path / "data", 3, fails=True))
    assert caught.value.global_rank == 0


def test_what_spawn_cannot_send(tmp_path: Path) -> None:
    """The error names the attribute; no process has started."""
    data = Prepared(tmp_path / "data", 3)
    data.transform = lambda sample: sample  # type: ignore[attr-defined]  # no attribute of the class
    with pytest.raises(NotPicklableError, match=r"datamodule.*transform"):
        quiet_trainer("ddp_spawn", 2).fit(Regression(), data)
