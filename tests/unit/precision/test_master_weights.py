"""Master weights: which tensors are 16-bit and 32-bit, and that small updates are not lost."""

import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from rankwise.errors import ConfigurationError, UnknownArgumentError, UnknownNameError
from rankwise.precision import HalfPrecision, MasterWeightsPrecision, Precision
from tests.helpers.raising import raises
from tests.helpers.threaded import run_ranks

NAMES = pytest.mark.parametrize("name", ["16-master", "bf16-master"])


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def ready(name: str = "16-master", lr: float = 0.1, **scaler: Any) -> tuple[Any, Any, Any]:
    """Return a precision, a converted module and its configured optimizer."""
    precision = MasterWeightsPrecision(name, **scaler)
    module = model()
    precision.convert_module(module)
    optimizer = torch.optim.Adam(module.parameters(), lr=lr)
    precision.configure(module, [optimizer])
    return precision, module, optimizer


def step(
    precision: Precision, module: nn.Module, optimizer: torch.optim.Optimizer, factor: float = 1
) -> None:
    x = precision.convert_input(torch.ones(4, 3) * torch.arange(4)[:, None] / 4)
    precision.zero_grad(optimizer)
    with precision.forward_context():
        loss = module(x).square().mean() * factor
    precision.backward(loss)
    precision.optimizer_step(optimizer)


@NAMES
def test_formats(name: str) -> None:
    """Weights are 16-bit; batch normalisation and the optimizer's parameters are 32-bit, and rounded."""
    precision, module, optimizer = ready(name)
    assert {parameter.dtype for parameter in module[0].parameters()} == {precision.dtype}
    own = nn.Module()
    own.register_buffer("scale", torch.ones(1))
    own.register_buffer("count", torch.ones(1, dtype=torch.float64))
    dtypes = [buffer.dtype for buffer in precision.convert_module(own).buffers()]
    assert dtypes == [precision.dtype, torch.float64]
    assert {parameter.dtype for parameter in module[1].parameters()} == {torch.float32}
    assert module[1].running_mean.dtype is torch.float32
    assert {parameter.dtype for parameter in precision.main_parameters(optimizer)} == {torch.float32}
    assert len(precision.main_parameters(optimizer)) == 6
    before = module[0].weight.float()
    step(precision, module, optimizer)
    master = precision.main_parameters(optimizer)[0]
    assert not torch.equal(master, before)
    assert torch.equal(module[0].weight, master.to(precision.dtype))
    assert module[0].weight.grad is None
    assert {value.dtype for state in optimizer.state.values() for value in state.values()} == {torch.float32}


def test_small_updates_are_not_lost() -> None:
    """64 updates too small for 16 bits add up in the copies; without copies the weight never moves."""
    moved = {}
    for precision in (HalfPrecision("bf16-true"), MasterWeightsPrecision("bf16-master")):
        layer = nn.Linear(1, 1, bias=False)
        nn.init.ones_(layer.weight)
        precision.convert_module(layer)
        sgd = torch.optim.SGD(layer.parameters(), lr=2.0**-10)
        precision.configure(layer, [sgd])
        for _ in range(64):
            precision.zero_grad(sgd)
            precision.backward(layer.weight.sum())
            precision.optimizer_step(sgd)
        moved[type(precision)] = 1 - layer.weight.item()
    assert moved == {HalfPrecision: 0.0, MasterWeightsPrecision: 2.0**-4}


def test_overflow_skips() -> None:
    """A step whose gradients overflow changes neither copies nor weights, and lowers the scale."""
    precision, module, optimizer = ready(init_scale=2.0**10)
    before = [parameter.clone() for parameter in module.parameters()]
    step(precision, module, optimizer, factor=float("inf"))
    assert precision.has_skipped_step
    assert all(torch.equal(mine, old) for mine, old in zip(module.parameters(), before, strict=True))
    assert precision.state_dict()["scaler"]["scale"] == 2.0**9


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_clipping_is_on_master_weights(norm_type: float) -> None:
    """Clipping limits any norm of the unscaled gradients, batch normalisation's included."""
    precision, module, optimizer = ready(init_scale=16.0)
    x = torch.ones(4, 3, dtype=torch.float16) * torch.arange(4)[:, None]
    precision.backward(module(x).sum() * 10)
    before = precision.clip_gradients_norm(optimizer, 0.5, norm_type)
    gradients = [parameter.grad for parameter in precision.main_parameters(optimizer)]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    assert before.item() > 10
    assert {gradient.dtype for gradient in gradients} == {torch.float32}
    assert flat.norm(norm_type).item() == pytest.approx(0.5, rel=1e-3)


def test_clipping_by_value_is_on_master_weights() -> None:
    """Unscaled gradients of the copies are clamped."""
    precision, module, optimizer = ready()
    precision.backward(module(torch.ones(4, 3, dtype=torch.float16)).sum())
    precision.clip_gradients_value(optimizer, 0.25)
    bias = precision.main_parameters(optimizer)[-1]
    assert (bias.grad.item(), module[2].bias.grad) == (0.25, None)


def test_configured_again() -> None:
    """A second fit with the same optimizer keeps its copies; gradients that were cleared stay so."""
    precision, module, optimizer = ready()
    step(precision, module, optimizer)
    masters = precision.main_parameters(optimizer)
    precision.convert_module(module)
    precision.configure(module, [optimizer])
    assert all(a is b for a, b in zip(masters, precision.main_parameters(optimizer), strict=True))
    step(precision, module, optimizer)
    assert torch.equal(module[0].weight, masters[0].half())
    precision.backward(module(torch.ones(4, 3, dtype=torch.float16)).sum())
    precision.zero_grad(optimizer)
    precision.unscale_gradients(optimizer)
    assert {parameter.grad for parameter in precision.main_parameters(optimizer)} == {None}


def test_optimizer_state_moves_to_the_copies() -> None:
    """The state of an optimizer that has stepped is kept, in 32 bits; a parameter of two has one copy."""
    layer = nn.Linear(1, 1, bias=False).bfloat16()
    optimizer = torch.optim.Adam(layer.parameters())
    layer.weight.sum().backward()
    optimizer.step()
    precision = MasterWeightsPrecision("bf16-master")
    precision.configure(layer, [optimizer])
    [(parameter, state)] = optimizer.state.items()
    assert parameter is precision.main_parameters(optimizer)[0]
    assert state["exp_avg"].dtype is torch.float32
    optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(layer.parameters(), lr=1.0) for _ in range(2)]
    precision = MasterWeightsPrecision("bf16-master")
    precision.configure(layer, optimizers)
    assert precision.main_parameters(optimizers[0])[0] is precision.main_parameters(optimizers[1])[0]


@pytest.mark.parametrize("way", ["state_dict before", "state_dict after", "pickle"])
def test_copies_are_restored(way: str) -> None:
    """After a checkpoint or pickling, training continues from the 32-bit values."""
    precision, module, optimizer = ready()
    step(precision, module, optimizer)
    other = pickle.loads(pickle.dumps(precision)) if way == "pickle" else MasterWeightsPrecision("16-master")
    rounded = other.convert_module(model())
    rounded.load_state_dict(module.state_dict())
    adam = torch.optim.Adam(rounded.parameters())
    if way == "state_dict before":
        other.load_state_dict(precision.state_dict())
    other.configure(rounded, [adam])
    if way == "state_dict after":
        other.load_state_dict(precision.state_dict())
    pairs = zip(precision.main_parameters(optimizer), other.main_parameters(adam), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)
    assert other.state_dict()["scaler"] == precision.state_dict()["scaler"]


def test_closures_are_refused() -> None:
    """One would use weights not rounded yet. Other names, scaler options and shapes are errors, too."""
    precision, _, optimizer = ready("bf16-master")
    with pytest.raises(ConfigurationError, match="closure, which would use old weights"):
        precision.optimizer_step(optimizer, lambda: 0.0)
    raises(UnknownNameError, "Did you mean 'bf16-master'", MasterWeightsPrecision, "bf16-masters")
    raises(UnknownArgumentError, "scales nothing", MasterWeightsPrecision, "bf16-master", init_scale=2.0)
    with pytest.raises(ValueError, match="1 master weights do not fit 4 parameters"):
        precision.load_state_dict({"masters": [[torch.ones(1)]]})


def test_sharded_optimizers_are_refused() -> None:
    """An optimizer that splits its parameters over the ranks would split the copies."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of what it imports
        from torch.distributed.optim import ZeroRedundancyOptimizer

    def configure(rank: int) -> None:
        module = model()
        optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, lr=0.1)
        MasterWeightsPrecision("bf16-master").configure(module, [optimizer])

    raises(ConfigurationError, "does not work with ZeroRedundancyOptimizer", run_ranks, 1, configure)


def test_gradients_that_wait_for_a_step() -> None:
    """Gradients that wait while the scale changes, clipped or not, are unscaled by the new scale."""
    precision = MasterWeightsPrecision("16-master", init_scale=4.0, growth_interval=1)
    layers = [nn.Linear(1, 1, bias=False) for _ in range(3)]
    precision.convert_module(nn.ModuleList(layers))
    for layer in layers:
        nn.init.ones_(layer.weight)
    stepping, waiting, clipped = (torch.optim.SGD(layer.parameters(), lr=1.0) for layer in layers)
    precision.configure(nn.ModuleList(layers), [stepping, waiting, clipped])
    for _ in range(2):
        for layer in layers:
            precision.backward(layer.weight.sum())
        precision.clip_gradients_norm(clipped, 100.0)
        precision.optimizer_step(stepping)  # the scale is doubled
        precision.zero_grad(stepping)
    for sgd in (waiting, clipped):
        precision.optimizer_step(sgd)
    assert [layer.weight.item() for layer in layers] == [-1.0, -1.0, -1.0]
