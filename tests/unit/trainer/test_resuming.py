"""A run that is interrupted and resumed ends with the state of an uninterrupted one."""

import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from rankwise.callbacks import Callback, EarlyStopping, ModelCheckpoint
from rankwise.errors import ConfigurationError
from rankwise.seed import seed_everything
from rankwise.trainer import Trainer, TrainingModule
from tests.unit.trainer.helpers import Line, Stream, fitted, samples, trainer
from tests.unit.trainer.helpers import loader as simple_loader

SAMPLES = 22


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Samples with noise from the process that loads them; the first feature is the sample's number."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([float(index), 1.0]) / SAMPLES + 0.1 * torch.randn(2), torch.ones(1)


class Net(TrainingModule):
    """Has dropout, batch norm, a plateau scheduler, and metrics by step and by epoch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.drawn: list[float] = []
        self.net = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("worst", loss, on_step=False, on_epoch=True, reduce_fx="max")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def on_train_end(self) -> None:
        self.drawn = torch.rand(3).tolist()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": plateau, "monitor": "val_loss"}


class EndAt(Callback):
    """Raises in the n-th call of its hooks."""

    def __init__(self, moment: float) -> None:
        self.left = moment

    def tick(self, *_: Any, **__: Any) -> None:
        self.left -= 1
        if self.left < 0:
            raise InterruptedError

    on_train_epoch_start = on_train_batch_start = on_train_batch_end = tick
    on_validation_start = on_validation_end = on_train_epoch_end = tick


def run(
    folder: Path,
    loader: Any,
    seed: int,
    end_at: float = math.inf,
    every: int | None = 1,
    net: Net | None = None,
    **options: Any,
) -> tuple[Trainer, Net]:
    """Train for three epochs, from the last checkpoint if there is one."""
    seed_everything(seed)
    saving = ModelCheckpoint(folder, save_last=True, save_top_k=0, every_n_train_steps=every)
    callbacks = [EarlyStopping("val_loss", patience=99), EndAt(end_at), saving]
    options = {
        "val_check_interval": 2,
        "max_epochs": 3,
        "callbacks": callbacks,
        "ckpt_path": "last",
        **options,
    }
    net = net or Net()
    return fitted(folder, net, loader, DataLoader(Noisy(), batch_size=8), **options), net


def everything(train: Trainer, net: Net) -> dict[str, Any]:
    """Return all state that must be the same, in a comparable form."""
    return {
        "weights": {name: value.tolist() for name, value in net.state_dict().items()},
        "optimizer": repr(train.optimizers[0].state_dict()),
        "rate": train.optimizers[0].param_groups[0]["lr"],
        "metrics": {name: float(value) for name, value in train.callback_metrics.items()},
        "progress": train.progress,
        "random": net.drawn,
        "stopping": train.early_stopping_callback and train.early_stopping_callback.state_dict(),
    }


def loader() -> DataLoader[Any]:
    """Return a shuffled loader over noisy samples."""
    return DataLoader(Noisy(), batch_size=4, shuffle=True)


def undisturbed(folder: Path, loader: Any, **options: Any) -> dict[str, Any]:
    """Run to the end, with no checkpoint of a single step: saving takes longer than training here."""
    return everything(*run(folder / "whole", loader, 7, **{"every": 1000, **options}))


def interrupted(folder: Path, make_loader: Any, moments: tuple[int, ...], **options: Any) -> dict[str, Any]:
    """Run until the first hook, resume until the next one, and so on to the end; seeds differ."""
    for number, moment in enumerate(moments):
        with pytest.raises(InterruptedError):
            run(folder / "parts", make_loader(), 7 + number, moment, **options)
    return everything(*run(folder / "parts", make_loader(), 99, **options))


@pytest.mark.parametrize(
    ("moments", "options"),
    [
        ((4, 7), {}),  # within an epoch, before its first validation, and after it
        ((18, 0, 3), {}),  # between the last step of an epoch and its validation; at once; within the next
        ((19, 1, 25), {}),  # in the validation at the end of an epoch; at the end of an epoch
        ((6, 6), {"accumulate_grad_batches": 2, "val_check_interval": 1.0}),
        ((8,), {"max_steps": 10}),
        ((9,), {"use_distributed_sampler": False}),  # the loader's own order is kept too
    ],
)
def test_ends_the_same(moments: tuple[int, ...], options: dict[str, Any], tmp_path: Path) -> None:
    """Weights, optimizer, rate, metrics, progress, callbacks and random numbers are the same."""
    assert interrupted(tmp_path, loader, moments, **options) == undisturbed(tmp_path, loader(), **options)


@pytest.mark.full
@pytest.mark.parametrize("moment", [9, 12])
def test_checkpoints_of_validations_within_windows(moment: int, tmp_path: Path) -> None:
    """Checkpoints of validations, some of which are due within an accumulation window."""
    options = {"every": None, "accumulate_grad_batches": 4, "val_check_interval": 2}
    assert interrupted(tmp_path, loader, (moment,), **options) == undisturbed(tmp_path, loader(), **options)


@pytest.mark.soak
@pytest.mark.parametrize("moment", range(60))
def test_ends_the_same_wherever_it_was_cut(moment: int, tmp_path: Path) -> None:
    """The same, for every hook of a run."""
    assert interrupted(tmp_path, loader, (moment,)) == undisturbed(tmp_path, loader())


@pytest.mark.full
@pytest.mark.parametrize(
    "make_loader",
    [
        lambda: DataLoader(Stream(samples(SAMPLES)), batch_size=4),
        lambda: DataLoader(Noisy(), batch_sampler=BatchSampler(RandomSampler(range(SAMPLES)), 4, True)),
        lambda: DataLoader(Noisy(), batch_sampler=Dealt()),
    ],
)
def test_other_loaders(make_loader: Any, tmp_path: Path) -> None:
    """Iterable data are read again; batch samplers start later."""
    assert interrupted(tmp_path, make_loader, (9,)) == undisturbed(tmp_path, make_loader())


class Dealt:
    """A batch sampler of the user's own, of 5 batches."""

    def __init__(self, length: int = 5) -> None:
        self.length = length

    def __iter__(self) -> Any:
        order = torch.randperm(SAMPLES).tolist()
        return (order[at : at + 4] for at in range(0, SAMPLES - 2, 4))

    def __len__(self) -> int:
        return self.length


def test_the_users_generator(tmp_path: Path) -> None:
    """The order of the first run is kept, even if the resumed one seeds its generator differently."""
    seeds = iter([5, 8, 9])

    def make_loader(seed: int = 5) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(seed)
        return DataLoader(Noisy(), batch_size=4, shuffle=True, generator=generator)

    whole = undisturbed(tmp_path, make_loader())
    assert interrupted(tmp_path, lambda: make_loader(next(seeds)), (9, 7)) == whole
    assert undisturbed(tmp_path / "other", make_loader(6)) != whole


def test_length_that_is_wrong(tmp_path: Path) -> None:
    """A loader that ends before its length says so is an error, not an epoch without an end."""
    with pytest.raises(ConfigurationError, match="has a length of 7 batches, but it ended after 5"):
        run(tmp_path, DataLoader(Noisy(), batch_sampler=Dealt(7)), 7)


class Signalled(Net):
    """Draws random numbers in its validation, and gets a SIGTERM in the third batch of one."""

    validations = 0
    left_at = -1
    batches = 0

    def on_validation_start(self) -> None:
        self.validations += 1

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        torch.rand(1)
        self.batches += 1
        if self.validations == self.left_at and batch_idx == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        super().validation_step(batch, batch_idx)


@pytest.mark.full
@pytest.mark.parametrize("left_at", [1, 4])
def test_a_validation_that_a_signal_cuts_is_begun_again(left_at: int, tmp_path: Path) -> None:
    """It stops at its next batch; the resumed run repeats it, and ends like an uninterrupted one."""
    whole = everything(*run(tmp_path / "whole", loader(), 7, net=Signalled()))
    net = Signalled()
    net.left_at = left_at
    with pytest.raises(SystemExit) as caught:
        run(tmp_path / "parts", loader(), 7, net=net)
    assert caught.value.code == 143
    assert net.batches == (left_at - 1) * math.ceil(SAMPLES / 8) + 3
    assert everything(*run(tmp_path / "parts", loader(), 8, net=Signalled())) == whole


class Rates(Line):
    """A scheduler follows a metric that grows; notes each step of it."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", float(self.current_epoch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-3)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": plateau, "monitor": "val_loss"}

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.seen.append(f"rate {float(metric)}")
        super().lr_scheduler_step(scheduler, metric)


def test_a_scheduler_that_follows_a_metric(tmp_path: Path) -> None:
    """It steps after the checkpoints of its epoch; a run that resumes from one steps it first, once.

    A checkpoint without the metric is refused.
    """
    saving = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    whole = Rates()
    train = fitted(tmp_path, whole, simple_loader(), simple_loader(), max_epochs=3, callbacks=saving)
    path = tmp_path / "epoch=1.ckpt"
    resumed = Rates()
    again = fitted(tmp_path, resumed, simple_loader(), simple_loader(), max_epochs=3, ckpt_path=path)
    rates = [each for each in resumed.seen if each.startswith("rate")]
    assert rates == ["rate 1.0", "rate 2.0"]
    assert again.optimizers[0].param_groups[0]["lr"] == train.optimizers[0].param_groups[0]["lr"] == 1e-3 / 4
    assert torch.equal(resumed.layer.weight, whole.layer.weight)
    saved = torch.load(path)
    for rank in saved["ranks"]:
        rank["metrics"] = {name: {} for name in rank["metrics"]}
    torch.save(saved, path)
    with pytest.raises(ConfigurationError, match="monitors 'val_loss', which was not logged"):
        trainer(tmp_path, max_epochs=3).fit(Rates(), simple_loader(), simple_loader(), ckpt_path=path)


class LateValidation(Line):
    """Draws random numbers in training, and when it makes the loader of validation."""

    count = 2

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step([batch[0] + torch.rand(()), batch[1]], batch_idx)

    def val_dataloader(self) -> Any:
        self.seen.append(f"loader {torch.rand(()):.6f}")
        return simple_loader(self.count)


def test_loaders_of_a_later_validation(tmp_path: Path) -> None:
    """They are made when it begins, with random numbers that do not change those of training."""
    ends, loaders = [], []
    for limit in (None, 0):
        torch.manual_seed(1)
        model, options = LateValidation(), {"check_val_every_n_epoch": 2, "limit_val_batches": limit}
        trainer(tmp_path, max_epochs=2, **options).fit(model, simple_loader(2))
        ends.append(model.layer.weight.tolist())
        loaders.append([each.split()[0] for each in model.seen])
    assert loaders == [["train", "train", "loader", "validate"], ["train", "train"]]
    assert ends[0] == ends[1]


def test_a_later_validation_without_a_batch(tmp_path: Path) -> None:
    """It does not run; nor do later ones."""
    model, train = LateValidation(), trainer(tmp_path, max_epochs=4, check_val_every_n_epoch=2)
    model.count = 0
    with pytest.warns(UserWarning, match="The validation loader is empty"):
        train.fit(model, simple_loader(2))
    seen = [each.split(" 0.")[0] for each in model.seen]  # without the number that is drawn
    assert seen == ["train 0", "train 0", "loader", "train 0", "train 0"]
    assert not train.has_validation
