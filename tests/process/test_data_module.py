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


def fitted(
    strategy: str, devices: int, folder: Path, kind: type[Prepared] = Prepared, **options: Any
) -> tuple[Prepared, Regression]:
    """Train with a data module for epochs of global batches of 6."""
    data, module = kind(folder / strategy, 6 // devices), Regression()
    quiet_trainer(strategy, devices, **{"max_epochs": 2, **options}).fit(module, data)
    return data, module


@pytest.mark.soak
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
    options = {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1}
    _, module = fitted("ddp_fork", 2, tmp_path, Drawn, **options)
    _, expected = fitted("single_device", 1, tmp_path, Drawn, **options)
    torch.testing.assert_close(module.state_dict(), expected.state_dict(), rtol=0, atol=1e-12)


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
