"""Hooks that replace what the Trainer does by default: their arguments, their order, and what they change."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from rankwise.callbacks import Callback
from rankwise.errors import ConfigurationError, InvalidTypeError
from rankwise.trainer.module import TrainerOptimizer
from tests.helpers.raising import raises
from tests.unit.gradient_sync.helpers import step_by_hand
from tests.unit.trainer.helpers import Line, calls_in, fitted, loader, noting, trainer


class Scheduled(Line):
    """Has a scheduler that steps with the optimizer."""

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=self.lr)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def weights_of(model: Line, tmp_path: Path, **options: Any) -> Tensor:
    """Return the weights after a fit."""
    trainer(tmp_path, **options).fit(model, loader())
    return model.layer.weight.detach()


# What Lightning 2.6 calls for this fit: c for the callback, m for the module.
LIGHTNINGS = """
c setup, m setup, m configure_model, c on_fit_start, m on_fit_start,
c on_train_start, m on_train_start,
c on_train_epoch_start, m on_train_epoch_start,
m on_before_batch_transfer, m transfer_batch_to_device, m on_after_batch_transfer,
c on_train_batch_start, m on_train_batch_start, m training_step,
c on_before_zero_grad, m on_before_zero_grad, m optimizer_zero_grad,
c on_before_backward, m on_before_backward, m backward,
c on_after_backward, m on_after_backward, c on_train_batch_end, m on_train_batch_end,
m on_before_batch_transfer, m transfer_batch_to_device, m on_after_batch_transfer,
c on_train_batch_start, m on_train_batch_start, m optimizer_step, m training_step,
c on_before_backward, m on_before_backward, m backward, c on_after_backward, m on_after_backward,
c on_before_optimizer_step, m on_before_optimizer_step, m configure_gradient_clipping, m lr_scheduler_step,
c on_train_batch_end, m on_train_batch_end,
m on_validation_model_zero_grad, m on_validation_model_eval, c on_validation_start, m on_validation_start,
c on_validation_epoch_start, m on_validation_epoch_start,
m on_before_batch_transfer, m transfer_batch_to_device, m on_after_batch_transfer,
c on_validation_batch_start, m on_validation_batch_start, m validation_step,
c on_validation_batch_end, m on_validation_batch_end,
c on_validation_epoch_end, m on_validation_epoch_end, c on_validation_end, m on_validation_end,
m on_validation_model_train, c on_train_epoch_end, m on_train_epoch_end,
c on_train_end, m on_train_end, c on_fit_end, m on_fit_end,
c teardown, m teardown
"""


def test_lightnings_order(tmp_path: Path) -> None:
    """Two batches in one window, a step, a validation: the calls are Lightning's, in its order."""
    expected, seen = calls_in(LIGHTNINGS), list[str]()
    callback = noting(Callback(), "c", expected, seen)
    model = noting(Scheduled(), "m", expected, seen)
    options = {"accumulate_grad_batches": 2, "limit_train_batches": 2, "limit_val_batches": 1}
    trainer(tmp_path, callbacks=callback, **options).fit(model, loader(), loader())
    assert seen == expected


def test_arguments(tmp_path: Path) -> None:
    """Each hook gets what Lightning gives it."""
    seen: dict[str, Any] = {}

    class Noting(Scheduled):
        def optimizer_step(
            self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
        ) -> None:
            seen["step"] = epoch, batch_idx, type(optimizer.optimizer), callable(optimizer_closure)
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
            seen["zero"] = epoch, batch_idx, type(optimizer)
            super().optimizer_zero_grad(epoch, batch_idx, optimizer)

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            seen["scheduler"] = type(scheduler), metric
            super().lr_scheduler_step(scheduler, metric)

        def configure_gradient_clipping(
            self,
            optimizer: Optimizer,
            gradient_clip_val: float | None = None,
            gradient_clip_algorithm: str | None = None,
        ) -> None:
            seen["clip"] = type(optimizer), gradient_clip_val, gradient_clip_algorithm

        def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            seen["transfer"] = device, dataloader_idx
            return super().transfer_batch_to_device(batch, device, dataloader_idx)

    weights_of(Noting(), tmp_path)
    assert seen == {
        "step": (0, 3, SGD, True),
        "zero": (0, 3, SGD),
        "scheduler": (torch.optim.lr_scheduler.StepLR, None),
        "clip": (SGD, None, None),
        "transfer": (torch.device("cpu"), 0),
    }
    weights_of(Noting(), tmp_path, gradient_clip_val=0.5)
    assert seen["clip"] == (SGD, 0.5, None)


def test_callbacks_get_them_too(tmp_path: Path) -> None:
    """The hooks around backward and the step, with the trainer and the module first."""
    seen: list[tuple[Any, Any]] = []

    class Noting(Callback):
        def on_before_zero_grad(self, trainer: Any, module: Any, optimizer: Any) -> None:
            seen.append((module, type(optimizer)))

        def on_before_backward(self, trainer: Any, module: Any, loss: Tensor) -> None:
            seen.append((trainer, loss.requires_grad))

        def on_after_backward(self, trainer: Any, module: Any) -> None:
            seen.append((module, module.layer.weight.grad is not None))

        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            seen.append((trainer, type(optimizer)))

    model, train = Line(), trainer(tmp_path, callbacks=Noting(), limit_train_batches=1)
    train.fit(model, loader())
    assert seen == [(model, SGD), (train, True), (model, True), (train, SGD)]


# ------------------------------------------------------------------ steps


class Stepping(Line):
    """Its `optimizer_step` is `how`, with an optimizer of this kind."""

    def __init__(
        self, how: Callable[[int, TrainerOptimizer, Callable[[], Any]], None], kind: type[SGD] = SGD
    ) -> None:
        super().__init__()
        self.how, self.kind = how, kind

    def configure_optimizers(self) -> Any:
        return self.kind(self.parameters(), lr=0.1)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: TrainerOptimizer, optimizer_closure: Any = None
    ) -> None:
        self.how(batch_idx, optimizer, optimizer_closure)


def closure_first(batch_idx: int, optimizer: TrainerOptimizer, closure: Callable[[], Any]) -> None:
    assert closure() > 0
    optimizer.step()


WAYS = {
    "positional": lambda _, optimizer, closure: optimizer.step(closure),
    "keyword": lambda _, optimizer, closure: optimizer.step(closure=closure),
    "closure first": closure_first,
}
OPTIONS: list[dict[str, Any]] = [
    *({}, {"accumulate_grad_batches": 3}, {"gradient_clip_val": 0.1}, {"on_nonfinite": "skip"}),
    *({"precision": "bf16-mixed"}, {"precision": "bf16-master"}),
]


@pytest.mark.full
@pytest.mark.parametrize("how", WAYS.values(), ids=list(WAYS))
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_step_with_a_closure(tmp_path: Path, how: Any, options: dict[str, Any]) -> None:
    """The weights are those without the hook, bit by bit, also in another precision."""
    assert torch.equal(
        weights_of(Stepping(how), tmp_path, **options), weights_of(Line(), tmp_path, **options)
    )


def test_a_warm_up(tmp_path: Path) -> None:
    """A learning rate that the hook sets is the step's; every step counts."""

    def warm_up(batch_idx: int, optimizer: TrainerOptimizer, closure: Any) -> None:
        optimizer.param_groups[0]["lr"] = 0.0 if batch_idx else 0.1
        optimizer.step(closure=closure)

    model, train = Stepping(warm_up), trainer(tmp_path)
    train.fit(model, loader())
    assert train.global_step == 4
    assert torch.equal(model.layer.weight, weights_of(Line(), tmp_path, limit_train_batches=1))


def test_a_step_that_the_hook_leaves_out(tmp_path: Path) -> None:
    """The closure alone changes no weight."""

    def every_other(batch_idx: int, optimizer: TrainerOptimizer, closure: Any) -> None:
        if batch_idx % 2:
            optimizer.step(closure=closure)
        else:
            closure()

    class Choosy(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch) if batch_idx % 2 else None

    assert torch.equal(weights_of(Stepping(every_other), tmp_path), weights_of(Choosy(), tmp_path))


def test_a_step_without_the_closure(tmp_path: Path) -> None:
    """Nothing would have been computed."""
    model = Stepping(lambda _, optimizer, closure: optimizer.step())
    with pytest.raises(ConfigurationError, match=r"Stepping\.optimizer_step\(\) has not called its closure"):
        trainer(tmp_path).fit(model, loader())


class TwoPasses(SGD):
    """Computes the gradients twice, as sharpness-aware minimisation does."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        closure()
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(parameter.grad, alpha=-0.05)
        closure()
        super().step()


def test_an_optimizer_that_calls_the_closure_twice(tmp_path: Path) -> None:
    """An optimizer that is not torch's gets the closure; values are logged once per batch."""

    class Twice(Line):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            for sign in (0.05, -0.1):
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))
                for parameter in self.parameters():
                    parameter.data.add_(parameter.grad, alpha=sign)  # type: ignore[arg-type]  # it has one

    model, by_hand = Stepping(WAYS["keyword"], TwoPasses), Twice()
    by_hand.automatic_optimization = False
    train = fitted(tmp_path, model, limit_train_batches=1)
    assert torch.allclose(model.layer.weight, weights_of(by_hand, tmp_path, limit_train_batches=1))
    assert train.callback_metrics["loss"] == Line().loss(next(iter(loader())))


def test_a_window_is_computed_once(tmp_path: Path) -> None:
    """With accumulation an optimizer that is not torch's steps after the closure, with the whole gradient."""

    class Noting(SGD):
        got: ClassVar[list[Any]] = []

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.got.append(closure)
            super().step()

    weights = weights_of(Stepping(WAYS["keyword"], Noting), tmp_path, accumulate_grad_batches=2)
    assert Noting.got == [None, None]
    assert torch.equal(weights, weights_of(Line(), tmp_path, accumulate_grad_batches=2))


# ------------------------------------------------------------------ gradients and schedulers


def test_gradients_that_are_not_cleared(tmp_path: Path) -> None:
    """`optimizer_zero_grad` decides."""

    class Keeping(Line):
        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
            pass

    model, expected = Keeping(), Line()
    trainer(tmp_path, limit_train_batches=2).fit(model, loader())
    optimizer = SGD(expected.parameters(), lr=0.1)
    for batch in list(loader())[:2]:
        expected.loss(batch).backward()
        optimizer.step()
    assert torch.equal(model.layer.weight, expected.layer.weight)


@pytest.mark.parametrize("is_automatic", [True, False])
def test_backward(tmp_path: Path, is_automatic: bool) -> None:
    """The module's `backward` computes the gradients, also of `manual_backward`."""

    class Doubling(Line):
        def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            super().backward(2 * loss, *args, **kwargs)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.automatic_optimization:
                return self.loss(batch)
            step_by_hand(self, self.loss(batch), retain_graph=True)
            return None

    model = Doubling()
    model.automatic_optimization = is_automatic
    assert torch.equal(weights_of(model, tmp_path), weights_of(Line(lr=0.2), tmp_path))


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping(tmp_path: Path, algorithm: str) -> None:
    """The hook clips with its own arguments, or with the Trainer's."""

    class Clipping(Line):
        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
        ) -> None:
            self.clip_gradients(optimizer, gradient_clip_val or 0.01, algorithm)

    class Plain(Line):
        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
        ) -> None:
            super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)

    options = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": algorithm}
    expected = weights_of(Line(), tmp_path, **options)
    assert torch.equal(weights_of(Clipping(), tmp_path), expected)
    assert torch.equal(weights_of(Plain(), tmp_path, **options), expected)
    assert torch.equal(weights_of(Plain(), tmp_path), weights_of(Line(), tmp_path))


def test_schedulers_that_monitor(tmp_path: Path) -> None:
    """`lr_scheduler_step` gets the metric."""
    seen = []

    class Plateau(Line):
        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), lr=self.lr)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "val_loss"}

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            seen.append(metric)
            super().lr_scheduler_step(scheduler, metric)

    train = fitted(tmp_path, Plateau(), loader(), loader(2))
    assert seen == [train.callback_metrics["val_loss"].item()]


class Halving:
    """A scheduler that is not torch's, and steps with a number."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.steps = optimizer, list[int]()

    def step(self, number: int) -> None:
        self.steps.append(number)
        self.optimizer.param_groups[0]["lr"] /= 2

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = state_dict["steps"]


class WithHalving(Line):
    """Returns such a scheduler."""

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=1.0)
        return [optimizer], [Halving(optimizer)]


def test_schedulers_of_ones_own(tmp_path: Path) -> None:
    """The module steps them; checkpoints have their state. Without the hook they are refused."""

    class Stepped(WithHalving):
        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            scheduler.step(self.current_epoch)

    model, train = Stepped(), trainer(tmp_path, max_epochs=2)
    train.fit(model, loader())
    assert train.optimizers[0].param_groups[0]["lr"] == 0.25
    train.save_checkpoint(tmp_path / "own.ckpt")
    longer = trainer(tmp_path, max_epochs=3)
    longer.fit(Stepped(), loader(), ckpt_path=tmp_path / "own.ckpt")
    assert longer.lr_scheduler_configs[0].scheduler.steps == [0, 1, 2]
    raises(InvalidTypeError, "lr_scheduler_step", trainer(tmp_path).fit, WithHalving(), loader())


# ------------------------------------------------------------------ batches and modes


def test_transfer(tmp_path: Path) -> None:
    """Each hook may change the batch, in every stage, with the number of the loader."""
    seen: list[Any] = []

    class Moving(Line):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return {"x": batch[0], "y": batch[1], "loader": dataloader_idx}

        def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            moved = super().transfer_batch_to_device(batch, device, dataloader_idx)
            return {**moved, "device": device}

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            seen.append((batch["x"].dtype, batch["loader"], dataloader_idx, batch["device"].type))
            return [batch["x"], batch["y"]]

    class Several(Moving):
        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("loss", self.loss(batch))

    weights = weights_of(Moving(), tmp_path, precision="64-true")
    assert torch.equal(weights, weights_of(Line(), tmp_path, precision="64-true"))
    assert seen == [(torch.double, 0, 0, "cpu")] * 4
    seen.clear()
    trainer(tmp_path).test(Several(), [loader(2), loader(2)])
    assert seen == [(torch.float, 0, 0, "cpu"), (torch.float, 1, 1, "cpu")]


def test_transfer_without_a_trainer() -> None:
    """The default moves the tensors of any nested batch."""
    moved = Line().transfer_batch_to_device({"x": [torch.ones(2)], "name": "a"}, torch.device("meta"), 0)
    assert moved["x"][0].is_meta
    assert moved["name"] == "a"


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_modes(tmp_path: Path, stage: str) -> None:
    """The hooks set the modes before and after; without them each submodule gets its mode back."""
    name = {"validate": "validation"}.get(stage, stage)
    modes: list[bool] = []

    class Trained(Line):
        def note(self, *_: Any) -> Any:
            modes.append(self.layer.training)
            return torch.zeros(())

        validation_step = test_step = predict_step = note  # type: ignore[assignment]  # any arguments

    kept = type("Kept", (Trained,), {f"on_{name}_model_eval": lambda self: self.train()})()
    kept.layer.eval()
    getattr(trainer(tmp_path), stage)(kept, loader(2))
    assert (modes, kept.layer.training) == ([True], False)
    if stage != "predict":
        model = type("Left", (Trained,), {f"on_{name}_model_train": lambda self: None})()
        getattr(trainer(tmp_path), stage)(model, loader(2))
        assert (modes[1:], model.layer.training) == ([False], False)


def test_modes_after_an_exception(tmp_path: Path) -> None:
    """Each submodule gets its mode back, whatever `on_validation_model_train` would do."""

    class Failing(Line):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            raise ValueError("broken")

        def on_validation_model_train(self) -> None:
            raise AssertionError

    model = Failing()
    raises(ValueError, "broken", trainer(tmp_path).validate, model, loader(2))
    assert model.layer.training


def test_configure_model(tmp_path: Path) -> None:
    """It runs in every stage after `setup`, before optimizers are created and weights are loaded."""

    class Late(Line):
        def setup(self, stage: str) -> None:
            self.seen.append(f"setup {stage}")

        def configure_model(self) -> None:
            self.seen.append("configure")
            if "late" not in dict(self.named_children()):
                self.late = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.late(super().training_step(batch, batch_idx).reshape(1)).sum()

    model, train = Late(), trainer(tmp_path)
    train.fit(model, loader(2))
    train.save_checkpoint(tmp_path / "late.ckpt")
    train.test(model, loader(2))
    assert model.seen == ["setup fit", "configure", "train 0", "setup test", "configure"]
    other = Late()
    trainer(tmp_path).test(other, loader(2), ckpt_path=tmp_path / "late.ckpt")
    assert torch.equal(other.late.weight, model.late.weight)


# ------------------------------------------------------------------ the end of an epoch


class Ending(Scheduled):
    """Ends each epoch before batch `at`."""

    def __init__(self, at: int, value: object = -1) -> None:
        super().__init__()
        self.at, self.value, self.ends = at, value, list[str]()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return self.value if batch_idx == self.at else None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ends.append(str(batch_idx))

    def on_train_epoch_end(self) -> None:
        self.ends.append("epoch")


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # no step before it
@pytest.mark.parametrize("at", [0, 2])
def test_an_epoch_that_a_hook_ends(tmp_path: Path, at: int) -> None:
    """-1 ends it before the batch, without validation; the next epoch begins at its first batch."""
    model, train = Ending(at), trainer(tmp_path, max_epochs=2)
    train.fit(model, loader(), loader())
    assert model.ends == [*map(str, range(at)), "epoch"] * 2
    assert model.seen == [f"train {number}" for number in range(at)] * 2
    assert (train.current_epoch, train.global_step) == (2, 2 * at)


@pytest.mark.parametrize("value", [None, 1, torch.ones(2), False])
def test_values_that_end_nothing(tmp_path: Path, value: object) -> None:
    """Any other value has no meaning."""
    model = Ending(2, value)
    trainer(tmp_path).fit(model, loader())
    assert model.ends == ["0", "1", "2", "3", "epoch"]


def test_an_unfinished_window_is_forgotten(tmp_path: Path) -> None:
    """Its gradients are in no step, as in Lightning."""

    class Short(Line):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
            return -1 if batch_idx == 3 else None

    model, expected = Short(), Line()
    train = fitted(tmp_path, model, max_epochs=2, accumulate_grad_batches=2)
    trainer(tmp_path, max_epochs=2, accumulate_grad_batches=2, limit_train_batches=2).fit(expected, loader())
    assert train.global_step == 2
    assert torch.equal(model.layer.weight, expected.layer.weight)


def test_schedulers_of_an_epoch_that_a_hook_ends(tmp_path: Path) -> None:
    """Those with the interval "epoch" step at its end."""

    class Epochs(Ending):
        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), lr=1.0)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    train = fitted(tmp_path, Epochs(2), max_epochs=2)
    assert train.optimizers[0].param_groups[0]["lr"] == 0.25
