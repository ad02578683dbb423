"""A Trainer in every precision: training, prediction and checkpoints."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rankwise.errors import CheckpointError, ConfigurationError, InvalidTypeError
from rankwise.precision import MasterWeightsPrecision, Precision, create_precision
from rankwise.processes.returned_state import ReturnedState, StateBefore
from rankwise.strategies import SingleDeviceStrategy
from rankwise.trainer.state_transfer import capture, known_to_caller, restore
from tests.unit.trainer.helpers import Line, fitted, loader, saved, sent_back, trainer

NAMES = ["64-true", "bf16-mixed", "16-mixed", "16-true", "bf16-true", "16-master", "bf16-master"]


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_training_learns(tmp_path: Path, name: str) -> None:
    """The loss goes down, with clipping and accumulation; predictions have 32 bits or more."""
    model = Line(lr=0.3)
    train = trainer(tmp_path, precision=name, max_epochs=12, gradient_clip_val=1.0, accumulate_grad_batches=2)
    [before] = train.validate(model, loader())
    train.fit(model, loader())
    [after] = train.validate(model, loader())
    assert after["val_loss"] < before["val_loss"] / 4
    predictions = train.predict(model, loader())
    assert {prediction.dtype for prediction in predictions} <= {torch.float32, torch.float64}


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_ends_like_an_uninterrupted_one(tmp_path: Path, name: str) -> None:
    """Scale and 32-bit copies are in the checkpoint: the weights are bit-identical."""
    model, other = Line(), Line()
    whole = fitted(tmp_path, model, precision=name, max_epochs=4)
    path = saved(tmp_path, precision=name, max_epochs=2)
    resumed = fitted(tmp_path, other, precision=name, max_epochs=4, ckpt_path=path)
    assert resumed.global_step == whole.global_step
    assert torch.equal(other.layer.weight, model.layer.weight)
    assert resumed.strategy.precision.state_dict().keys() == whole.strategy.precision.state_dict().keys()


@pytest.mark.parametrize("name", ["16-mixed", "16-true", "16-master"])
def test_state_comes_back(tmp_path: Path, name: str) -> None:
    """A worker's formats, scale and copies are restored in the caller; parameters keep their identity."""
    model, mine = Line(), Line()
    there, here = fitted(tmp_path, model, precision=name), trainer(tmp_path, precision=name)

    def captured() -> ReturnedState | None:
        return capture(there.context(model), StateBefore(known_to_caller(there.context(model))))

    here._set_module(mine, "fit")
    state = sent_back(captured, mine, here.context(mine))
    weight = mine.layer.weight
    assert state is not None
    restore(here.context(mine), state)
    assert mine.layer.weight is weight
    assert weight.dtype is model.layer.weight.dtype
    assert torch.equal(weight, model.layer.weight)
    mine_state, their_state = here.strategy.precision.state_dict(), there.strategy.precision.state_dict()
    assert mine_state.get("scaler") == their_state.get("scaler")
    for mine_copies, their_copies in zip(
        mine_state.get("masters", []), their_state.get("masters", []), strict=True
    ):
        assert all(torch.equal(a, b) for a, b in zip(mine_copies, their_copies, strict=True))


@pytest.mark.parametrize("name", ["16-mixed", "16-master"])
def test_trainers_with_one_strategy_have_their_own_precision(tmp_path: Path, name: str) -> None:
    """The second trainer has the same options, but neither the first one's loss scale nor its copies."""
    strategy = SingleDeviceStrategy(precision=create_precision(name))
    first = fitted(tmp_path, strategy=strategy, accelerator="auto", devices="auto")
    before = first.strategy.precision.state_dict()
    second = trainer(tmp_path, strategy=strategy, accelerator="auto", devices="auto")
    unused = create_precision(name).state_dict()
    assert second.strategy.precision.state_dict() == unused != before
    second.fit(Line(), loader(8, 1))
    assert first.strategy.precision.state_dict()["scaler"] == before["scaler"]
    assert second.strategy.precision.state_dict()["scaler"] != before["scaler"]


def test_copies_in_a_checkpoint(tmp_path: Path) -> None:
    """A checkpoint holds 32-bit values that the module's 16-bit weights are the rounding of.

    One whose master weights do not fit is a CheckpointError.
    """
    model, plugins = Line(), [MasterWeightsPrecision("bf16-master")]
    path = saved(tmp_path, model, plugins=plugins, max_epochs=3)
    checkpoint = torch.load(path, weights_only=True)
    [[weight, _]] = checkpoint["precision"]["masters"]
    assert weight.dtype is torch.float32
    assert not torch.equal(weight, model.layer.weight.float())
    assert torch.equal(weight.bfloat16(), checkpoint["state_dict"]["layer.weight"])
    checkpoint["precision"]["masters"] = [[torch.ones(3)]]
    torch.save(checkpoint, path)
    with pytest.raises(CheckpointError, match="master weights do not fit"):
        trainer(tmp_path, plugins=plugins, max_epochs=4).fit(Line(), loader(), ckpt_path=path)


class Replacing(Precision):
    """Notes what `configure` is given, and returns what `make` makes of it."""

    def __init__(self, make: Callable[[Any, Any], Any]) -> None:
        self.make = make
        self.given: list[Any] = []

    def configure(self, module: Any, optimizers: Any) -> Any:
        self.given.append((module, list(optimizers)))
        return self.make(module, optimizers)


class Scheduled(Line):
    """Has a scheduler, which would go on with an optimizer that no longer steps."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def test_what_configure_returns_is_used(tmp_path: Path) -> None:
    """Optimizers that `configure` returns step in place of the given ones, in every fit.

    It sees module and optimizers, before a checkpoint's state is loaded, and replaces no scheduled optimizer.
    """
    other = Replacing(lambda module, optimizers: (module, [torch.optim.SGD(module.parameters(), lr=123.0)]))
    model, train = Line(), trainer(tmp_path, plugins=[other])
    before = model.layer.weight.detach().clone()
    for train.max_epochs in (1, 2):
        train.fit(model, loader())
        assert train.optimizers[0].param_groups[0]["lr"] == 123.0
    assert float((model.layer.weight.detach() - before).abs().max()) > 10
    with pytest.raises(ConfigurationError, match="a learning rate scheduler changes"):
        fitted(tmp_path, Scheduled(), plugins=[other])
    noting = Replacing(lambda module, optimizers: None)
    train = fitted(tmp_path, model, plugins=[noting])
    assert noting.given == [(model, train.optimizers)]


@pytest.mark.parametrize(
    "make",
    [
        lambda module, optimizers: module,
        lambda module, optimizers: optimizers,
        lambda module, optimizers: (module, []),
        lambda module, optimizers: (nn.Linear(1, 1), optimizers),
        lambda module, optimizers: (module, [None]),
    ],
    ids=["module", "optimizers", "fewer", "another module", "no optimizer"],
)
def test_what_configure_cannot_return(tmp_path: Path, make: Callable[[Any, Any], Any]) -> None:
    """Anything but None, or the module and as many optimizers, is refused."""
    with pytest.raises(InvalidTypeError, match=r"Precision\.configure"):
        fitted(tmp_path, plugins=[Replacing(make)])
