"""Manual optimisation in one process: several optimizers, toggling, blocking, clipping, mistakes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rankwise import DDPStrategy
from rankwise.errors import ConfigurationError, InvalidArgumentError, LifecycleError, NonFiniteLossError
from rankwise.precision import MasterWeightsPrecision, MixedPrecision
from rankwise.strategies import SingleDeviceStrategy
from rankwise.trainer.module import TrainerOptimizer
from tests.helpers.raising import raises
from tests.unit.gradient_sync.helpers import fit_on_ranks, registering, step_by_hand
from tests.unit.trainer.helpers import Line, WithTwoOptimizers, fitted, loader, saved, trainer


def by_hand(layer: nn.Linear) -> Tensor:
    """Return a layer's weight after an epoch of SGD."""
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for x, y in loader():
        optimizer.zero_grad()
        nn.functional.mse_loss(layer(x), y).backward()
        optimizer.step()
    return layer.weight


def test_two_optimizers(tmp_path: Path) -> None:
    """Each optimizer steps its own layer as a loop by hand does; every step counts."""
    model, twin, train = WithTwoOptimizers(), WithTwoOptimizers(), trainer(tmp_path)
    twin.load_state_dict(model.state_dict())
    train.fit(model, loader())
    assert torch.equal(model.layer.weight, by_hand(twin.layer))
    assert torch.equal(model.other.weight, by_hand(twin.other))
    assert train.global_step == 8
    assert len(train.optimizers) == 2


def test_one_optimizer_is_not_a_list(tmp_path: Path) -> None:
    """With one optimizer `self.optimizers()` is it; all but its steps is the optimizer's own."""
    seen: list[Any] = []

    class Single(WithTwoOptimizers):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            seen.append(self.optimizers())
            step_by_hand(self, self.loss(batch))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.layer.parameters(), lr=0.1)

    train = fitted(tmp_path, Single(), max_steps=1)
    [optimizer] = seen
    assert isinstance(optimizer, TrainerOptimizer)
    assert optimizer.optimizer is train.optimizers[0]
    assert optimizer.param_groups is train.optimizers[0].param_groups
    assert train.module.optimizers() is train.optimizers[0]


def test_step_after_the_fit(tmp_path: Path) -> None:
    """An optimizer that is kept after its fit still steps, and counts the step."""
    kept: list[Any] = []

    class Keeping(WithTwoOptimizers):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            kept[:] = self.optimizers()
            super().training_step(batch, batch_idx)

    model, train = Keeping(), trainer(tmp_path, max_steps=2)
    train.fit(model, loader())
    before = model.layer.weight.detach().clone()
    kept[0].step()
    assert not torch.equal(model.layer.weight, before)
    assert train.global_step == 3
    kept[0].zero_grad()
    assert model.layer.weight.grad is None


def test_hooks(tmp_path: Path) -> None:
    """The hooks around backward passes and steps run; as in Lightning, `on_before_zero_grad` does not."""
    seen = []

    class Noting(WithTwoOptimizers):
        def on_before_zero_grad(self, optimizer: Any) -> None:
            seen.append("zero")

        def on_before_backward(self, loss: Tensor) -> None:
            seen.append("backward")

        def on_after_backward(self) -> None:
            seen.append("done")

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            seen.append("step")

    trainer(tmp_path, max_steps=2).fit(Noting(), loader())
    assert seen == ["backward", "done", "step"] * 2


@pytest.mark.parametrize("plugins", [[], [MasterWeightsPrecision("bf16-master")]])
def test_toggling(tmp_path: Path, plugins: list[Any]) -> None:
    """A toggled optimizer's parameters alone require gradients, also where it updates copies."""
    seen = []

    class Toggling(WithTwoOptimizers):
        def __init__(self) -> None:
            super().__init__()
            self.other.bias.requires_grad_(False)

        def required(self) -> list[bool]:
            return [parameter.requires_grad for parameter in self.parameters()]

        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, second = self.optimizers()
            self.toggle_optimizer(first)
            seen.append(self.required())
            self.toggle_optimizer(second)
            seen.append(self.required())
            self.untoggle_optimizer(second)
            seen.append(self.required())
            for toggled in (first.toggled(), self.toggled_optimizer(first)):
                with toggled:
                    seen.append(self.required())
            seen.append(self.required())
            first.step()
            self.other.weight.requires_grad_(False)
            self.untoggle_optimizer(first)  # which is not toggled any more
            seen.append(self.required())

    trainer(tmp_path, max_steps=1, plugins=plugins).fit(Toggling(), loader())
    first, second, both = [True, True, False, False], [False, False, True, False], [True, True, True, False]
    assert seen == [first, second, both, first, first, both, first]


def test_backward_options(tmp_path: Path) -> None:
    """`retain_graph` reaches torch: one graph, two backward passes."""

    class Twice(WithTwoOptimizers):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            loss = self.loss(batch)
            self.manual_backward(loss, retain_graph=True)
            once = self.layer.weight.grad
            assert once is not None
            once = once.clone()
            self.manual_backward(loss)
            torch.testing.assert_close(self.layer.weight.grad, once * 2)
            self.optimizers()[0].step()

    trainer(tmp_path, max_steps=1).fit(Twice(), loader())


def test_closures(tmp_path: Path) -> None:
    """An optimizer that needs its loss again gets a closure."""

    class Closed(WithTwoOptimizers):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = self.loss(batch)
                self.manual_backward(loss)
                return loss

            optimizer.step(closure)

        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.layer.parameters())

    model, train = Closed(), trainer(tmp_path, max_steps=2)
    [before] = train.validate(model, loader())
    train.fit(model, loader())
    [after] = train.validate(model, loader())
    assert after["val_loss"] < before["val_loss"] / 100
    with pytest.raises(ConfigurationError, match="on_nonfinite"):
        trainer(tmp_path, max_steps=2, on_nonfinite="skip").fit(Closed(), loader())


def test_schedulers_are_the_modules_business(tmp_path: Path) -> None:
    """Only the module steps the schedulers."""

    class Scheduled(WithTwoOptimizers):
        def on_train_epoch_end(self) -> None:
            first, _ = self.lr_schedulers()
            first.step()

        def configure_optimizers(self) -> Any:
            optimizers = super().configure_optimizers()
            return optimizers, [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in optimizers]

    train = fitted(tmp_path, Scheduled(), max_epochs=2)
    assert [optimizer.param_groups[0]["lr"] for optimizer in train.optimizers] == [0.025, 0.1]


@pytest.mark.parametrize(("algorithm", "value"), [("norm", 0.01), ("value", 0.01)])
def test_clipping(tmp_path: Path, algorithm: str, value: float) -> None:
    """`clip_gradients` limits true gradients, with scaled losses too."""

    class Clipping(WithTwoOptimizers):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, _ = self.optimizers()
            self.manual_backward(self.loss(batch) * 100)
            self.clip_gradients(first, value, algorithm)
            gradient = self.layer.weight.grad
            assert gradient is not None
            assert 0.001 < gradient.abs().max() <= value
            first.step()

    precision = MixedPrecision("16-mixed", init_scale=16.0)
    trainer(tmp_path, max_steps=1, plugins=[precision]).fit(Clipping(), loader())


def test_scaled_losses_of_two_optimizers(tmp_path: Path) -> None:
    """With float16, two optimizers in a step move their weights as without, up to rounding."""
    plain, scaled = WithTwoOptimizers(), WithTwoOptimizers()
    scaled.load_state_dict(plain.state_dict())
    trainer(tmp_path).fit(plain, loader())
    trainer(tmp_path, plugins=[MixedPrecision("16-mixed", init_scale=256.0)]).fit(scaled, loader())
    torch.testing.assert_close(scaled.layer.weight, plain.layer.weight, rtol=0, atol=2e-3)
    torch.testing.assert_close(scaled.other.weight, plain.other.weight, rtol=0, atol=2e-3)


def test_nonfinite_losses_are_judged_by_optimizer(tmp_path: Path) -> None:
    """A NaN in one player's loss skips its step alone, or stops."""

    class Spoilt(WithTwoOptimizers):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer, layer, factor in zip(
                self.optimizers(), (self.layer, self.other), (float("nan"), 1.0), strict=True
            ):
                optimizer.zero_grad()
                self.manual_backward(nn.functional.mse_loss(layer(batch[0]), batch[1]) * factor)
                optimizer.step()

    model = Spoilt()
    before = [parameter.clone() for parameter in model.parameters()]
    trainer(tmp_path, on_nonfinite="skip", max_steps=2).fit(model, loader())
    moved = [not torch.equal(mine, old) for mine, old in zip(model.parameters(), before, strict=True)]
    assert moved == [False, False, True, True]
    with pytest.raises(NonFiniteLossError, match="global_rank 0 of 1"):
        trainer(tmp_path, on_nonfinite="raise").fit(Spoilt(), loader())


def test_a_loss_whose_gradients_are_cleared(tmp_path: Path) -> None:
    """A later step is not refused for it: an infinite gradient of a finite loss is named as such."""

    class Cleared(WithTwoOptimizers):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, _ = self.optimizers()
            for factor in (float("nan"), 1.0):
                first.zero_grad()
                self.manual_backward(self.loss(batch) * factor)
            gradient = self.layer.weight.grad
            assert gradient is not None
            gradient.fill_(float("inf"))
            first.step()

    with pytest.raises(NonFiniteLossError, match="though every rank's loss is finite"):
        trainer(tmp_path, on_nonfinite="raise").fit(Cleared(), loader())


def test_checkpoints_keep_both_optimizers(tmp_path: Path) -> None:
    """A run that is resumed ends like one that was not."""

    class Adams(WithTwoOptimizers):
        def configure_optimizers(self) -> Any:
            return [torch.optim.Adam(layer.parameters()) for layer in (self.layer, self.other)]

    torch.manual_seed(0)
    whole, first, rest = Adams(), Adams(), Adams()
    first.load_state_dict(whole.state_dict())
    trainer(tmp_path, max_epochs=2).fit(whole, loader())
    path = saved(tmp_path, first, max_epochs=1)
    trainer(tmp_path, max_epochs=2).fit(rest, loader(), ckpt_path=path)
    assert torch.equal(rest.other.weight, whole.other.weight)


@pytest.mark.parametrize(("name", "value"), [("accumulate_grad_batches", 2), ("gradient_clip_val", 1.0)])
def test_arguments_that_have_no_effect(tmp_path: Path, name: str, value: float) -> None:
    """What manual optimisation leaves to the module is refused, before anything starts."""
    with pytest.raises(ConfigurationError, match=f"{name} has no effect"):
        trainer(tmp_path, **{name: value}).fit(WithTwoOptimizers(), loader())


@pytest.mark.parametrize(
    "arguments",
    [
        {"comm_hook": "powersgd"},
        {"comm_hook": "post_localsgd", "model_averaging_period": 2},
        {"comm_hook": "bf16_compress", "gradient_weighting": "logged"},
    ],
)
def test_hooks_that_cannot_be_used(tmp_path: Path, arguments: dict[str, Any]) -> None:
    """Hooks that keep gradients, or would have to average weights, are refused before anything starts."""
    strategy = DDPStrategy(start_method="fork", **arguments)
    with pytest.raises(ConfigurationError, match="optimises manually"):
        trainer(tmp_path, strategy=strategy, devices=2).fit(WithTwoOptimizers(), loader())


class Weighted(WithTwoOptimizers):
    """Each rank's backward passes have another weight."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, _ = self.optimizers()
        first.zero_grad()
        self.manual_backward(self.loss(batch), weight=1 + self.global_rank)
        first.step()


@pytest.mark.parametrize("name", ["fp16_compress", "powersgd"])
def test_hooks_of_the_wrapper_with_logged_weights(name: str) -> None:
    """A hook does not average weights, so it is left out; one that keeps gradients is refused."""

    def fit(hook: str) -> list[Tensor]:
        options = {"gradient_weighting": "logged"}
        return fit_on_ranks([Weighted(), Weighted()], loader(), options, registering(hook))

    if name == "powersgd":
        raises(ConfigurationError, "PowerSGDMemory cannot be used in manual optimisation", fit, name)
        return
    first, second = fit(name)
    assert torch.equal(first, second)
    assert torch.equal(first, fit("allreduce")[0])


def test_calls_outside_of_it(tmp_path: Path) -> None:
    """Its methods say what they need, in automatic optimisation and outside of a fit."""

    class Confused(Line):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(self.loss(batch))

    model, train = Confused(), trainer(tmp_path)
    raises(LifecycleError, "automatic_optimization = False", train.fit, model, loader())
    raises(LifecycleError, None, model.no_backward_sync)


def test_another_clipping_algorithm(tmp_path: Path) -> None:
    """A misspelt algorithm is an error."""

    class Clipping(WithTwoOptimizers):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.clip_gradients(self.optimizers()[0], 1.0, "l2")

    raises(InvalidArgumentError, "gradient_clip_algorithm", trainer(tmp_path).fit, Clipping(), loader())


@pytest.mark.parametrize("weighting", ["samples", "logged"])
def test_log_weight_is_refused(tmp_path: Path, weighting: str) -> None:
    """Backward passes have weights here, not steps: a logged one would be ignored."""

    class Logging(WithTwoOptimizers):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, _ = self.optimizers()
            first.zero_grad()
            self.manual_backward(self.loss(batch), weight=2 if weighting == "logged" else None)
            self.log_weight(2)

    strategy = SingleDeviceStrategy(gradient_weighting=weighting, accelerator="cpu")
    train = trainer(tmp_path, strategy=strategy)
    if weighting == "logged":
        with pytest.raises(ConfigurationError, match=r"logged a weight.*optimises manually") as caught:
            train.fit(Logging(), loader())
        assert "self.manual_backward(loss, weight=n)" in caught.value.fix()
    else:
        train.fit(Logging(), loader())  # one batch alone: a weight changes nothing
