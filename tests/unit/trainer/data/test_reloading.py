"""`reload_dataloaders_every_n_epochs`, and the Trainer's properties that have the loaders."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate, random_split

from rankwise import DataModule, Trainer
from rankwise.callbacks import LambdaCallback
from rankwise.data import CombinedLoader
from rankwise.errors import InvalidArgumentError
from tests.unit.trainer.helpers import Line, fitted, loader, samples, saving_each_step, trainer


class Growing(DataModule):
    """Has more training samples in later epochs, chosen at random; notes when its loaders are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        self.asked.append(f"train {self.trainer.current_epoch}")
        part, _ = random_split(samples(20), [8, 12])
        generator = torch.Generator().manual_seed(int(torch.randint(1000, ())))
        drawn = DataLoader(part, 2, shuffle=True, generator=generator)
        return drawn if self.trainer.current_epoch < 4 else loader(12, 2)

    def val_dataloader(self) -> Any:
        assert self.trainer is not None
        self.asked.append(f"val {self.trainer.current_epoch}")
        return loader(4, 4)


class Noting(Line):
    """Notes the numbers of its batches' samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(str(batch[0][:, 0].tolist()))
        return self.loss(batch)


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        (0, "train 0, val 0"),
        (1, "train 0, val 0, train 1, val 1, train 2, val 2, train 3, val 3, train 4, val 4"),
        (2, "train 0, val 0, train 2, val 2, train 4, val 4"),
    ],
)
def test_when_loaders_are_asked_for(tmp_path: Path, every: int, expected: str) -> None:
    """In the epochs in which Lightning asks for them, in its order."""
    data = Growing()
    runs = fitted(tmp_path, None, data, max_epochs=5, reload_dataloaders_every_n_epochs=every)
    assert ", ".join(data.asked) == expected
    assert runs.num_training_batches == (6 if every else 4)
    assert runs.global_step == 4 * 4 + (6 if every else 4)


def test_resuming(tmp_path: Path) -> None:
    """A run that is stopped after any step of three epochs has the same batches and weights afterwards."""
    options = {"max_epochs": 4, "reload_dataloaders_every_n_epochs": 2}
    torch.manual_seed(1)
    whole = Noting()
    trainer(tmp_path, callbacks=saving_each_step(tmp_path), **options).fit(whole, Growing())
    assert len(set(whole.seen)) > 8
    for step in range(1, 16):
        torch.manual_seed(2)
        model = Noting()
        trainer(tmp_path, **options).fit(model, Growing(), ckpt_path=tmp_path / f"{step}.ckpt")
        steps = [each for each in model.seen if not each.startswith("v")]
        assert steps == [each for each in whole.seen if not each.startswith("v")][step:]
        assert torch.equal(model.layer.weight, whole.layer.weight)


def test_given_loaders(tmp_path: Path) -> None:
    """Loaders that were given are used again, in a new order."""
    model = Noting()
    trainer(tmp_path, max_epochs=2, reload_dataloaders_every_n_epochs=1).fit(model, loader(shuffle=True))
    assert sorted(model.seen[:4]) != sorted(model.seen[4:])
    with pytest.raises(InvalidArgumentError, match="reload_dataloaders_every_n_epochs"):
        trainer(tmp_path, reload_dataloaders_every_n_epochs=-1)


def test_properties(tmp_path: Path) -> None:
    """They have this rank's loaders in the containers they were given in, also after the stage.

    They are not sent with the trainer, as loaders may not pickle.
    """
    seen: list[Any] = []

    def look(runs: Trainer, _: Any) -> None:
        seen.append((runs.train_dataloader, runs.val_dataloaders))

    class Evaluated(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss(batch["a"])

    def collate(items: Any) -> Any:  # cannot be pickled
        return default_collate(items)

    runs, given = trainer(tmp_path), loader(shuffle=True, collate_fn=collate)
    runs.callbacks = [LambdaCallback(on_train_start=look)]
    assert runs.train_dataloader is None
    runs.fit(Evaluated(), {"a": given, "b": loader(4)}, [loader(6)])
    [(train, [validation])] = seen
    assert {name: len(each) for name, each in train.items()} == {"a": 4, "b": 2}
    assert train["a"].dataset is given.dataset
    assert len(validation) == 3
    assert runs.train_dataloader is train
    runs.callbacks = []
    assert pickle.loads(pickle.dumps(runs)).train_dataloader is None
    runs.test(Line(), loader(2))
    assert len(runs.test_dataloaders) == 1
    assert runs.train_dataloader is None
    runs.predict(Line(), CombinedLoader([loader(2)], "sequential"))
    assert [len(each) for each in runs.predict_dataloaders] == [1]
