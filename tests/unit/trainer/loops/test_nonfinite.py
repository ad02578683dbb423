"""What a loss that is infinite or NaN does, with each policy and with scaled losses."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rankwise import DDPStrategy
from rankwise.errors import ConfigurationError, NonFiniteLossError
from rankwise.precision import MixedPrecision
from tests.helpers.exactness import weights
from tests.unit.gradient_sync.helpers import fit_on_ranks, registering
from tests.unit.trainer.helpers import Line, fitted, loader, trainer


class Spoilt(Line):
    """Its loss in batch 1 becomes what it is multiplied with, or added to it."""

    def __init__(self, factor: float = 1.0, addend: float = 0.0) -> None:
        super().__init__()
        self.factor, self.addend = factor, addend
        self.weights: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        return loss * self.factor + self.addend if batch_idx == 1 else loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.weights.append(self.layer.weight.detach().clone())


@pytest.mark.parametrize(
    ("factor", "addend"), [(float("nan"), 0.0), (1.0, float("inf")), (1.0, float("nan"))]
)
def test_raise(tmp_path: Path, factor: float, addend: float) -> None:
    """The error names the step and the rank, even if the gradients are finite."""
    with pytest.raises(
        NonFiniteLossError, match=r"step 1 \(epoch 0, batch 1\): on global_rank 0 of 1"
    ) as caught:
        trainer(tmp_path, on_nonfinite="raise").fit(Spoilt(factor, addend), loader())
    assert (caught.value.global_step, caught.value.global_ranks) == (1, (0,))


def test_raise_for_gradients(tmp_path: Path) -> None:
    """A finite loss whose gradient is not finite has its own message."""

    class Rooted(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss(batch) + (self.layer.weight * 0).sum().sqrt()

    with pytest.raises(NonFiniteLossError, match="though every rank's loss is finite"):
        trainer(tmp_path, on_nonfinite="raise").fit(Rooted(), loader())


def test_skip(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A skipped step changes no weight and says so; the next one trains on."""
    model, train = Spoilt(float("nan")), trainer(tmp_path, on_nonfinite="skip")
    with caplog.at_level(logging.WARNING):
        train.fit(model, loader())
    first, second, third, _ = model.weights
    assert torch.equal(first, second)
    assert not torch.equal(second, third)
    assert third.isfinite().all()
    assert train.global_step == 4
    assert caplog.text.count("This step is skipped") == 1


def test_skip_drops_the_whole_window(tmp_path: Path) -> None:
    """One bad batch of an accumulation window spoils the window, and not the next one."""
    model = Spoilt(float("nan"))
    trainer(tmp_path, on_nonfinite="skip", accumulate_grad_batches=2).fit(model, loader())
    assert torch.equal(model.weights[0], model.weights[1])
    assert not torch.equal(model.weights[1], model.weights[3])


def test_a_skipped_step_leaves_the_learning_rate(tmp_path: Path) -> None:
    """A scheduler that goes by steps does not count a step that was skipped."""

    class Scheduled(Spoilt):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    train = fitted(tmp_path, Scheduled(float("nan")), on_nonfinite="skip")
    assert train.optimizers[0].param_groups[0]["lr"] == 1.0 / 8


def test_nothing_is_judged_by_default(tmp_path: Path) -> None:
    """Without a policy a NaN trains on, as in torch."""
    model = Spoilt(float("nan"))
    trainer(tmp_path).fit(model, loader())
    assert model.layer.weight.isnan().all()


def test_healthy_steps_are_the_same_to_the_bit(tmp_path: Path) -> None:
    """Judging changes nothing in a run whose losses are finite."""
    plain, judged = (fitted(tmp_path, on_nonfinite=policy).module for policy in (None, "raise"))
    assert torch.equal(weights(plain), weights(judged))


def test_overflow_of_scaled_losses_is_no_error(tmp_path: Path) -> None:
    """With float16 a gradient may overflow although every loss is finite: the scale is lowered."""
    precision = MixedPrecision("16-mixed", init_scale=2.0**30)
    model = Line()
    trainer(tmp_path, on_nonfinite="raise", plugins=[precision], max_epochs=8).fit(model, loader())
    assert precision.state_dict()["scaler"]["scale"] < 2.0**30
    assert not torch.equal(model.layer.weight, Line().layer.weight)


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_nan_among_scaled_losses(tmp_path: Path, policy: str) -> None:
    """A NaN loss is distinguished from an overflow of the scaled gradients."""
    model = Spoilt(float("nan"))
    train = trainer(tmp_path, on_nonfinite=policy, plugins=[MixedPrecision("16-mixed", init_scale=4.0)])
    if policy == "raise":
        with pytest.raises(NonFiniteLossError):
            train.fit(model, loader())
    else:
        train.fit(model, loader())
        assert torch.equal(model.weights[0], model.weights[1])
        assert not torch.equal(model.weights[1], model.weights[2])


@pytest.mark.parametrize("arguments", [{"on_nonfinite": "skip"}, {"precision": "16-mixed"}])
def test_hooks_that_remember_gradients(tmp_path: Path, arguments: dict[str, Any]) -> None:
    """PowerSGD would carry a skipped step's gradients into all later ones: refused at once."""
    strategy = DDPStrategy(comm_hook="powersgd", start_method="fork")
    with pytest.raises(ConfigurationError, match="PowerSGD cannot be used where steps are skipped"):
        trainer(tmp_path, strategy=strategy, devices=2, **arguments).fit(Line(), loader())


def test_averaged_models_with_master_weights(tmp_path: Path) -> None:
    """Post-local SGD would average the copies after the weights were rounded from them: refused at once."""
    strategy = DDPStrategy(comm_hook="post_localsgd", model_averaging_period=2, start_method="fork")
    with pytest.raises(ConfigurationError, match="Post-local SGD cannot be used with master weights"):
        trainer(tmp_path, strategy=strategy, devices=2, precision="bf16-master").fit(Line(), loader())


def test_averaged_models_where_a_step_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Post-local SGD begins to average models when its hook leaves gradients apart; skipped steps count."""
    models = [Spoilt(float("nan")) for _ in range(2)]
    hook = "post_localsgd:start_localSGD_iter=2,post_local_gradient_allreduce=false"
    options = {"comm_hook": hook, "model_averaging_period": 4}
    first, second = fit_on_ranks(models, loader(), options, max_epochs=-1, max_steps=3, on_nonfinite="skip")
    assert torch.equal(first, second)
    assert caplog.text.count("This step is skipped") == 1


@pytest.mark.ranks_may_differ("its hook averages nothing")
def test_ranks_agree_with_a_hook_that_is_registered_later(tmp_path: Path) -> None:
    """A NaN that stays on rank 1 makes rank 0 skip its step too."""
    models = [Spoilt(1.0), Spoilt(float("nan"))]
    options: dict[str, Any] = {"max_epochs": -1, "max_steps": 3, "check_ranks_every_n_steps": 0}
    fit_on_ranks(models, loader(), None, registering("noop"), on_nonfinite="skip", **options)
    for first, second, third in (model.weights for model in models):
        assert torch.equal(first, second)
        assert not torch.equal(second, third)
