"""Dynamic loss scaling: one scale for all optimizers, the same skipped steps on all ranks."""

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rankwise.errors import ConfigurationError, InvalidArgumentError, UnknownArgumentError
from rankwise.precision import MasterWeightsPrecision, MixedPrecision


def scaled(**options: Any) -> MixedPrecision:
    return MixedPrecision("16-mixed", **{"init_scale": 4.0, "growth_interval": 1, **options})


def optimizer(count: int = 1) -> torch.optim.SGD:
    return torch.optim.SGD([nn.Parameter(torch.ones(2)) for _ in range(count)], lr=1.0)


def weight(of: torch.optim.Optimizer) -> Tensor:
    first: Tensor = of.param_groups[0]["params"][0]
    return first


def step(precision: MixedPrecision, sgd: torch.optim.Optimizer, factor: float = 1.0) -> None:
    precision.backward(weight(sgd).sum() * factor)
    precision.optimizer_step(sgd)


def gradient(of: torch.optim.Optimizer) -> list[float]:
    found = weight(of).grad
    return [] if found is None else found.tolist()


def scale_of(precision: MixedPrecision) -> float:
    return float(precision.state_dict()["scaler"]["scale"])


def test_losses_are_scaled_and_gradients_unscaled() -> None:
    """Backward gives scaled gradients, and the step uses unscaled ones."""
    precision, sgd = scaled(), optimizer()
    precision.backward(weight(sgd).sum())
    assert gradient(sgd) == [4.0, 4.0]
    precision.optimizer_step(sgd)
    assert weight(sgd).tolist() == [0.0, 0.0]
    assert not precision.has_skipped_step
    assert scale_of(precision) == 8.0  # doubled after `growth_interval` good steps
    precision, sgd = scaled(), optimizer()
    precision.optimizer_step(sgd)  # without gradients the scale does not change
    assert weight(sgd).tolist() == [1.0, 1.0]
    assert precision.state_dict() == {"scaler": {}}


def test_clipping_unscales_first() -> None:
    """Clipping limits unscaled gradients; a second unscaling does nothing."""
    precision, sgd = scaled(), optimizer()
    precision.backward(weight(sgd).sum())
    precision.unscale_gradients(sgd)
    precision.unscale_gradients(sgd)
    assert precision.clip_gradients_norm(sgd, 1.0).item() == pytest.approx(2**0.5)
    precision, sgd = scaled(), optimizer()
    precision.backward((weight(sgd) * torch.tensor([3.0, -0.5])).sum())
    precision.clip_gradients_value(sgd, 1.0)
    assert gradient(sgd) == [1.0, -0.5]


def test_overflow_skips_and_lowers_the_scale() -> None:
    """An infinite gradient skips the step and halves the scale."""
    precision, sgd = scaled(), optimizer()
    step(precision, sgd, float("inf"))
    assert precision.has_skipped_step
    assert weight(sgd).tolist() == [1.0, 1.0]
    assert scale_of(precision) == 2.0


@pytest.mark.parametrize("name", ["16-mixed", "16-master"])
def test_overflow_of_an_optimizer_that_is_always_called(name: str) -> None:
    """A fused optimizer skips by itself: that is a skipped step as well."""
    plugin = MixedPrecision if name == "16-mixed" else MasterWeightsPrecision
    module, precision = nn.Linear(2, 1, bias=False), plugin(name, init_scale=4.0, growth_interval=1)
    precision.convert_module(module)
    fused = torch.optim.SGD(module.parameters(), lr=1.0, fused=True)
    precision.configure(module, [fused])
    before = module.weight.clone()
    for factor, is_skipped in ((float("inf"), True), (1.0, False), (float("nan"), True)):
        precision.backward(module.weight.sum() * factor)
        precision.optimizer_step(fused)
        assert precision.has_skipped_step is is_skipped
        assert torch.equal(module.weight, before) is is_skipped
        precision.zero_grad(fused)
        before = module.weight.clone()


def test_two_optimizers_within_a_step_share_the_scale() -> None:
    """Losses scaled before either optimizer steps are unscaled alike, clipped or not."""
    precision, first, second = scaled(), optimizer(), optimizer()
    precision.configure(nn.Module(), [first, second])
    precision.backward(weight(first).sum())
    precision.backward(weight(second).sum())
    precision.clip_gradients_norm(second, 100.0)
    precision.optimizer_step(first)
    precision.optimizer_step(second)
    assert weight(first).tolist() == weight(second).tolist() == [0.0, 0.0]


def test_gradients_that_wait() -> None:
    """While another optimizer steps: the new scale unscales them, and not twice if they are clipped."""
    precision, stepping, waiting = scaled(), optimizer(), optimizer()
    precision.configure(nn.Module(), [stepping, waiting])
    precision.backward(weight(waiting).sum())
    for _ in range(3):  # the scale goes from 4 to 32
        precision.zero_grad(stepping)
        step(precision, stepping)
    step(precision, waiting)
    assert weight(waiting).tolist() == [-1.0, -1.0]
    precision, stepping, waiting = scaled(), optimizer(), optimizer()
    precision.configure(nn.Module(), [stepping, waiting])
    precision.backward(weight(waiting).sum())
    precision.unscale_gradients(waiting)
    step(precision, stepping)
    precision.backward(weight(stepping).sum())
    precision.optimizer_step(waiting)
    assert weight(waiting).tolist() == [0.0, 0.0]


def test_gradients_are_added_after_clipping() -> None:
    """They may be clipped in each of several passes before a step; a second step in a batch is unscaled."""
    precision, sgd = scaled(), optimizer()
    precision.configure(nn.Module(), [sgd])
    for _ in range(3):
        precision.backward(weight(sgd).sum())
        assert precision.clip_gradients_norm(sgd, 100.0).item() < 5
    precision.optimizer_step(sgd)
    assert weight(sgd).tolist() == [-2.0, -2.0]
    assert scale_of(precision) == 8.0  # one good step
    precision, sgd = scaled(), optimizer()
    for _ in range(2):
        precision.zero_grad(sgd)
        step(precision, sgd)
    assert weight(sgd).tolist() == [-1.0, -1.0]


@pytest.mark.parametrize("another_steps", [False, True])
def test_clipping_does_not_hide_an_overflow(another_steps: bool) -> None:
    """A step is skipped if a gradient was infinite before it was clipped, long before the step."""
    precision, sgd, other = scaled(), optimizer(), optimizer()
    precision.configure(nn.Module(), [sgd, other])
    precision.backward(weight(sgd).sum() * float("inf"))
    precision.clip_gradients_value(sgd, 1.0)
    if another_steps:
        step(precision, other)
    step(precision, sgd)
    assert precision.has_skipped_step
    assert weight(sgd).tolist() == [1.0, 1.0]


def test_closures_are_refused() -> None:
    """Their loss would not be scaled; invalid options are errors in the constructor."""
    with pytest.raises(ConfigurationError, match="closure, whose loss is not scaled"):
        scaled().optimizer_step(optimizer(), lambda: 0.0)
    wrong = [("init_scale", 0), ("growth_factor", 1.0), ("backoff_factor", 1.5), ("growth_interval", 2.5)]
    for option, value in [*wrong, ("init_scale", "big")]:
        with pytest.raises(InvalidArgumentError):
            MixedPrecision("16-mixed", **{option: value})
    for name, option in (("16-mixed", "initial_scale"), ("bf16-mixed", "init_scale")):
        with pytest.raises(UnknownArgumentError):
            MixedPrecision(name, **{option: 2.0})


def test_a_rank_skips_because_another_does() -> None:
    """If gradients differ between ranks, one rank's overflow makes all skip."""
    precision, sgd, asked = scaled(), optimizer(), []

    def agree(is_bad: bool) -> bool:
        asked.append(is_bad)
        return True

    precision.agree = agree
    step(precision, sgd)
    assert asked == [False]
    assert precision.has_skipped_step
    assert weight(sgd).tolist() == [1.0, 1.0]


def test_state_is_saved_and_loaded() -> None:
    """The scale and the steps since its last change are restored, from a pickle without optimizers."""
    precision, sgd = scaled(growth_interval=5), optimizer()
    step(precision, sgd)
    state = precision.state_dict()
    assert (state["scaler"]["scale"], state["scaler"]["_growth_tracker"]) == (4.0, 1)
    other = scaled(init_scale=64.0)
    other.load_state_dict(state)
    assert other.state_dict() == state
    other.backward(weight(optimizer()).sum())
    assert other.state_dict() == state
    precision.configure(nn.Module(), [sgd])
    precision.agree = lambda is_bad: is_bad
    travelled = pickle.loads(pickle.dumps(precision))
    assert travelled.state_dict() == precision.state_dict()
    assert travelled.agree is None
