"""Training: steps, accumulation, clipping, limits, validation, what goes on in a second fit."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from rankwise.callbacks import LambdaCallback
from rankwise.errors import ConfigurationError, InvalidTypeError, LifecycleError
from rankwise.monitoring.heartbeat import NO_FILE, own_heartbeat, write_heartbeat_to
from rankwise.trainer import TrainingModule
from rankwise.trainer.data.loader_shard import LoaderShard, TrainData
from rankwise.trainer.loops.automatic import AutomaticOptimization
from rankwise.trainer.loops.uneven_inputs import BatchSchedule
from tests.helpers.raising import raises
from tests.unit.trainer.helpers import Failing, Line, fitted, loader, samples, trainer, with_second_rank


def by_hand(batches: list[list[Any]], lr: float = 0.1) -> Tensor:
    """Return the weights after one SGD step for each group of batches, as written by hand."""
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for group in batches:
        optimizer.zero_grad()
        for batch in group:
            (nn.functional.mse_loss(model.layer(batch[0]), batch[1]) / len(group)).backward()
        optimizer.step()
    return model.layer.weight.detach()


def test_accumulation(tmp_path: Path) -> None:
    """Gradients of a window are averaged; the last, shorter window of an epoch steps too."""
    model, train = Line(), trainer(tmp_path, accumulate_grad_batches=3)
    train.fit(model, loader())
    batches = list(loader())
    assert torch.allclose(model.layer.weight, by_hand([batches[:3], batches[3:]]))
    assert train.global_step == 2


def test_accumulation_synchronises_once(tmp_path: Path) -> None:
    """Every batch of a window but the last runs with gradient synchronisation blocked."""
    train = trainer(tmp_path, accumulate_grad_batches=2)
    blocked = []
    plain = train.strategy.gradient_sync_context

    def noting(module: nn.Module, optimizers: Any, is_final_microbatch: bool) -> Any:
        blocked.append(not is_final_microbatch)
        return plain(module, optimizers, is_final_microbatch)

    train.strategy.gradient_sync_context = noting  # type: ignore[method-assign,assignment]  # to see the calls
    train.fit(Line(), loader(10))
    assert blocked == [True, False, True, False, False]


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping(tmp_path: Path, algorithm: str) -> None:
    """Clipped gradients move the weights no further than clipping allows."""
    model = Line(lr=1.0)
    before = model.layer.weight.clone()
    fitted(tmp_path, model, max_steps=1, gradient_clip_val=0.01, gradient_clip_algorithm=algorithm)
    moved = (model.layer.weight - before).abs().max().item()
    assert 0 < moved <= 0.01 + 1e-6


def test_max_steps(tmp_path: Path) -> None:
    """Training stops in the middle of an epoch, which is then not counted."""
    train = fitted(tmp_path, max_epochs=-1, max_steps=6)
    assert (train.global_step, train.current_epoch) == (6, 1)


@pytest.mark.parametrize(("limit", "expected"), [(3, 3), (0.5, 2), (1.0, 4), (1, 1), (9, 4)])
def test_limit_train_batches(tmp_path: Path, limit: float, expected: int) -> None:
    """A whole number limits batches, a fraction takes its part of them."""
    train = fitted(tmp_path, limit_train_batches=limit)
    assert (train.global_step, train.num_training_batches) == (expected, expected)


def test_limit_train_batches_of_the_next_fit(tmp_path: Path) -> None:
    """A limit that is assigned between two fits counts in the second."""
    train, model = trainer(tmp_path, max_epochs=1), Line()
    train.fit(model, loader())
    train.limit_train_batches, train.max_epochs = 1, 2
    train.fit(model, loader())
    assert (train.global_step, train.num_training_batches) == (4 + 1, 1)


@pytest.mark.parametrize("is_of_module", [False, True])
def test_no_training_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_of_module: bool) -> None:
    """No training loader is refused, and not ignored."""
    if is_of_module:
        monkeypatch.setattr(Line, "train_dataloader", lambda _: [])
    with pytest.raises(ConfigurationError, match=r"fit\(\) has 0 training loaders"):
        trainer(tmp_path).fit(Line(), None if is_of_module else [])


def test_no_batches(tmp_path: Path) -> None:
    """`limit_train_batches=0` asks for no training: that is no error, and no endless loop."""
    model, train = Line(), trainer(tmp_path, limit_train_batches=0, max_epochs=-1)
    train.fit(model, loader(), loader(2))
    assert (train.global_step, model.seen) == (0, [])


class Unsized:
    """Eight samples in four batches; their number is unknown."""

    def __iter__(self) -> Iterator[Any]:
        return iter(list(loader()))


def test_iterable_without_length(tmp_path: Path) -> None:
    """A loader that does not know its length is read to its end, in every epoch."""
    train = fitted(tmp_path, None, Unsized(), max_epochs=2, accumulate_grad_batches=3)
    assert (train.global_step, train.current_epoch) == (4, 2)


def test_fast_dev_run(tmp_path: Path) -> None:
    """One batch of each loader, nothing written, no sanity check."""
    model = Line()
    options = {"logger": True, "enable_checkpointing": True, "num_sanity_val_steps": 2}
    fitted(tmp_path, model, loader(), loader(), fast_dev_run=True, max_epochs=9, **options)
    assert model.seen == ["train 0", "validate 0"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "tttt vv tttt vv"),
        ({"val_check_interval": 0.5}, "tt vv tt vv tt vv tt vv"),
        ({"val_check_interval": 3}, "ttt vv tttt vv t"),
        ({"val_check_interval": 1, "accumulate_grad_batches": 2}, "tt vv tt vv tt vv tt vv"),
        ({"val_check_interval": 2, "accumulate_grad_batches": 3}, "ttt vv t vv ttt vv t vv"),
        ({"check_val_every_n_epoch": 2}, "tttttttt vv"),
        ({"limit_val_batches": 0}, "tttttttt"),
        ({"limit_val_batches": 1}, "tttt v tttt v"),
    ],
)
def test_when_to_validate(tmp_path: Path, options: dict[str, Any], expected: str) -> None:
    """Validation runs after the batches and epochs that were asked for, and where a window has ended."""
    model = Line()
    trainer(tmp_path, max_epochs=2, **options).fit(model, loader(), loader(4))
    assert "".join(step[0] for step in model.seen) == expected.replace(" ", "")


@pytest.mark.parametrize("epochs", [1, -1])
def test_an_interval_beyond_the_epoch(tmp_path: Path, epochs: int) -> None:
    """A `val_check_interval` that never comes is an error before the first step, which says how to go on."""
    model, train = Line(), trainer(tmp_path, val_check_interval=5, max_epochs=epochs, max_steps=20)
    with pytest.raises(ConfigurationError, match="val_check_interval=5 does not fit an epoch of 4 batches"):
        train.fit(model, loader(), loader(2))
    assert model.seen == []
    train.limit_val_batches = 0
    train.max_epochs = 1
    train.fit(model, loader(), loader(2))
    assert model.seen == [f"train {number}" for number in range(4)]


@pytest.mark.parametrize(
    ("options", "data", "words"),
    [
        (
            {"val_check_interval": 3, "limit_train_batches": 2},
            loader(),
            "=3 does not fit an epoch of 2 batches",
        ),
        ({"val_check_interval": 0.5}, Unsized(), "=0.5 .* an unknown number of batches"),
    ],
)
def test_intervals_that_do_not_fit(tmp_path: Path, options: dict[str, Any], data: Any, words: str) -> None:
    """The limit leaves fewer batches; a fraction of an unknown length is not the end of the epoch."""
    with pytest.raises(ConfigurationError, match=f"val_check_interval{words}"):
        trainer(tmp_path, **options).fit(Line(), data, loader(2))


def test_an_unknown_epoch_without_validation(tmp_path: Path) -> None:
    """If an epoch of unknown length has ended before the interval, a warning says so."""
    model = Line()
    with pytest.warns(UserWarning, match="without validation: it had 4 batches, and val_check_interval=5"):
        trainer(tmp_path, val_check_interval=5).fit(model, Unsized(), loader(2))
    for interval in (4, timedelta(0)):
        trainer(tmp_path, val_check_interval=interval).fit(model, Unsized(), loader(2))
        assert model.seen[-1] == "validate 0"


def test_an_interval_of_epochs_beyond_the_last(tmp_path: Path) -> None:
    """A warning says that no epoch will be validated; a run of a later fit may reach the interval."""
    model, train = Line(), trainer(tmp_path, check_val_every_n_epoch=3, max_epochs=2)
    with pytest.warns(UserWarning, match="never runs: check_val_every_n_epoch=3 is more than max_epochs=2"):
        train.fit(model, loader(), loader(2))
    train.max_epochs = 3
    train.fit(model, loader(), loader(2))
    assert model.seen[-1] == "validate 0"
    trainer(tmp_path, check_val_every_n_epoch=3, max_epochs=-1, max_steps=4).fit(model, loader(), loader(2))
    trainer(tmp_path, check_val_every_n_epoch=3, limit_val_batches=0).fit(model, loader(), loader(2))


def test_validation_data_without_a_step(tmp_path: Path) -> None:
    """Validation data that no step would read are refused."""

    class WithoutStep(Line):
        validation_step: Any = TrainingModule.validation_step

    with pytest.raises(ConfigurationError, match=r"WithoutStep does not define validation_step\(\)"):
        trainer(tmp_path).fit(WithoutStep(), loader(), loader(2))
    trainer(tmp_path).fit(WithoutStep(), loader(), [])


class WithLoaders(Line):
    """Has loaders of its own."""

    def train_dataloader(self) -> Any:
        return loader()

    def val_dataloader(self) -> Any:
        return loader(2)


@pytest.mark.parametrize("of", ["object", "class", "hook", "argument"])
def test_a_hook_that_is_switched_off(tmp_path: Path, of: str) -> None:
    """Without validation loaders there is no validation: the method is or returns None, or [] is given."""
    model: Any = WithLoaders()
    if of == "object":
        model.val_dataloader = None
    elif of == "class":
        model = type("Without", (WithLoaders,), {"val_dataloader": None})()
    elif of == "hook":
        model.val_dataloader = lambda: None
    trainer(tmp_path, limit_train_batches=1).fit(model, val_dataloaders=[] if of == "argument" else None)
    assert model.seen == ["train 0"]


def test_training_hooks_of_the_object(tmp_path: Path) -> None:
    """A method may be set on the object; None in its place is none, as is a method that nobody defines."""
    raises(ConfigurationError, r"Line does not define train_dataloader\(\)", trainer(tmp_path).fit, Line())
    with pytest.raises(ConfigurationError, match=r"TrainingModule does not define test_step"):
        trainer(tmp_path).test(TrainingModule(), loader())
    model: Any = Line()
    model.train_dataloader = loader
    trainer(tmp_path, limit_train_batches=1).fit(model)
    assert model.seen == ["train 0"]
    model.train_dataloader = None
    raises(ConfigurationError, r"Line does not define train_dataloader\(\)", trainer(tmp_path).fit, model)
    model.training_step = None
    with pytest.raises(ConfigurationError, match=r"Line does not define training_step\(\)"):
        trainer(tmp_path).fit(model, loader())


def test_a_loader_in_place_of_a_hook(tmp_path: Path) -> None:
    """A loader where a method belongs is refused before anything starts, in words."""
    model: Any = Line()
    model.val_dataloader = loader()
    with pytest.raises(InvalidTypeError, match=r"Line\.val_dataloader=.*expected a method that returns"):
        trainer(tmp_path).fit(model, loader())


def test_modes_are_put_back(tmp_path: Path) -> None:
    """Validation runs in evaluation mode without gradients; training goes on in the modes there were."""

    class Watching(Line):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.seen.append(f"{self.training} {torch.is_grad_enabled()}")

        def on_train_start(self) -> None:
            self.layer.eval()

        def on_train_end(self) -> None:
            self.seen.append(f"{self.training} {self.layer.training}")

    model = Watching()
    trainer(tmp_path, limit_train_batches=0.25).fit(model, loader(), loader(2))
    assert model.seen == ["train 0", "False False", "True False"]


def test_modes_stay_as_given(tmp_path: Path) -> None:
    """A fit leaves a layer in evaluation mode there, so that its statistics stay, and warns of it."""
    model = Line()
    model.norm = torch.nn.BatchNorm1d(2).eval()
    with pytest.warns(UserWarning, match=r"modules in evaluation mode, .* \(1\): norm\."):
        trainer(tmp_path, limit_train_batches=1).fit(model, loader())
    assert (model.training, model.norm.training) == (True, False)


@pytest.mark.parametrize("epochs", [1, 2])
def test_data_without_a_batch(tmp_path: Path, epochs: int) -> None:
    """A generator that is used up in the first epoch is an error in the second one, not an endless fit."""
    train = trainer(tmp_path, max_epochs=2)
    batches = iter(list(loader())) if epochs == 2 else iter([])
    raises(ConfigurationError, "The training loader has no batch for this epoch", train.fit, Line(), batches)
    assert train.current_epoch == epochs - 1


def test_less_than_one_batch(tmp_path: Path) -> None:
    """A limit that leaves less than one batch is an error and not an empty fit."""
    with pytest.raises(ConfigurationError, match=r"no batch for this epoch.*\n.*limit_train_batches="):
        trainer(tmp_path, limit_train_batches=0.1).fit(Line(), loader())


@pytest.mark.parametrize("limit", [1.0, 3])
def test_an_empty_loader(tmp_path: Path, limit: float) -> None:
    """A loader of no batches trains nothing, with a warning."""
    train = trainer(tmp_path, limit_train_batches=limit, max_epochs=2)
    with pytest.warns(UserWarning, match="The training loader is empty: its length is 0"):
        train.fit(Line(), loader(0))
    assert (train.global_step, train.current_epoch) == (0, 0)


def test_an_empty_loader_of_a_fits_validation(tmp_path: Path) -> None:
    """The fit trains without validation."""
    train = trainer(tmp_path, max_epochs=1)
    with pytest.warns(UserWarning, match="The validation loader is empty: its length is 0"):
        train.fit(Line(), loader(), loader(0))
    assert train.global_step > 0


def test_exception(tmp_path: Path) -> None:
    """An exception reaches the callbacks and the caller, and teardown hooks run."""
    seen: list[str] = []
    callback = LambdaCallback(
        on_exception=lambda *arguments: seen.append(str(arguments[-1])),
        teardown=lambda *arguments: seen.append(arguments[-1]),
    )

    raises(ValueError, "broken", trainer(tmp_path, callbacks=callback).fit, Failing(), loader())
    assert seen == ["broken", "fit"]


@pytest.mark.parametrize("first", [0, 1])
def test_what_steps_return(tmp_path: Path, first: int) -> None:
    """Training is a loop by hand. A step may return more than the loss, or None, to skip the batch."""

    class Generous(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            if first == 0:
                return {"loss": loss, "batch": batch}
            return loss if batch_idx % 2 else None

    model, batches = Generous(), [[batch] for batch in list(loader())[first :: first + 1]]
    trainer(tmp_path, max_epochs=2).fit(model, loader())
    assert torch.equal(model.layer.weight, by_hand(batches * 2))


def test_none_with_other_ranks(tmp_path: Path) -> None:
    """With several ranks a skipped batch would make the others wait, so it is an error."""
    train = trainer(tmp_path)
    train.strategy = with_second_rank(lambda mine: mine)
    model, share = Line(), TrainData([LoaderShard([], 0)], 0, 1.0, train.strategy)
    schedule = BatchSchedule(train.strategy, model, share, "error")
    optimization = AutomaticOptimization(train.enter_stage(train.strategy, model, "fit"), schedule)
    raises(ConfigurationError, "returned None", optimization._loss_of, None, 3)


def test_second_fit_goes_on(tmp_path: Path) -> None:
    """The same module again goes on with its optimizer and its counters; another one begins anew."""
    model, train = Line(), trainer(tmp_path)
    train.fit(model, loader())
    [optimizer] = train.optimizers
    train.max_epochs = 2
    train.fit(model, loader())
    assert (train.current_epoch, train.global_step) == (2, 8)
    assert train.optimizers == [optimizer]
    train.fit(Line(), loader())
    assert (train.current_epoch, train.global_step) == (2, 8)
    assert train.optimizers != [optimizer]


def test_nothing_left_to_train(tmp_path: Path) -> None:
    """A fit whose limit is reached returns at once and says what to raise."""
    model, train = Line(), trainer(tmp_path)
    train.fit(model, loader())
    with pytest.warns(UserWarning, match=r"epoch 1 of max_epochs=1.*raise trainer\.max_epochs"):
        train.fit(model, loader())
    assert train.global_step == 4


def test_should_stop(tmp_path: Path) -> None:
    """should_stop ends training after the batch, and the next fit begins without it."""

    class Tired(Line):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.trainer.should_stop = batch_idx == 1

    train = fitted(tmp_path, Tired(), max_epochs=5)
    assert (train.global_step, train.current_epoch) == (2, 0)


def test_samplers_are_told_the_epoch(tmp_path: Path) -> None:
    """A sampler of the user's own that shuffles by epoch gets its number."""
    sampler: DistributedSampler[Any] = DistributedSampler(samples(), 1, 0)
    trainer(tmp_path, max_epochs=3).fit(Line(), DataLoader(samples(), sampler=sampler))
    assert sampler.epoch == 2


@pytest.mark.parametrize("returned", [None, []])
def test_nothing_to_optimise(tmp_path: Path, returned: Any) -> None:
    """Without an optimizer the steps run, and nothing changes; a warning says so."""

    class Fixed(Line):
        def configure_optimizers(self) -> Any:
            return returned

    model, train = Fixed(), trainer(tmp_path)
    with pytest.warns(UserWarning, match=r"Fixed.configure_optimizers\(\) returned no optimizer"):
        train.fit(model, loader())
    assert train.global_step == 4
    assert torch.equal(model.layer.weight, Line().layer.weight)


def test_facts_of_the_module(tmp_path: Path) -> None:
    """A module knows its trainer's facts; before there is a trainer it says so."""
    model = Line()
    raises(LifecycleError, r"Trainer\(\.\.\.\)\.fit", model.log, "loss", 1.0)
    trainer(tmp_path).fit(model, loader())
    assert (model.global_rank, model.local_rank, model.current_epoch, model.global_step) == (0, 0, 1, 4)
    assert isinstance(model.optimizers(), torch.optim.SGD)
    assert (model.lr_schedulers(), model.logger, model.device.type) == ([], None, "cpu")


def test_phases(tmp_path: Path) -> None:
    """The heartbeat has the phase of each step; only a backward pass waits for other ranks."""
    seen: list[tuple[int, str, bool]] = []

    def note(*_: object) -> None:
        heartbeat = own_heartbeat()
        assert heartbeat is not None
        seen.append((heartbeat.step, heartbeat.phase, heartbeat.waits))

    class Noting(Line):
        def on_fit_start(self) -> None:
            write_heartbeat_to(NO_FILE)  # until the job ends

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            note()
            loss = self.loss(batch)
            loss.register_hook(note)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            optimizer.register_step_pre_hook(note)
            return optimizer

    class Batches:
        def __iter__(self) -> Iterator[Any]:
            for batch in loader():
                note()
                yield batch

    trainer(tmp_path, max_steps=2).fit(Noting(), Batches())
    phases = ("data loading", "forward", "backward", "optimizer")
    expected = [(step, phase, phase == "backward") for step in range(2) for phase in phases]
    assert list(dict.fromkeys(seen)) == expected
