"""The default precision, and precisions by name."""

import pytest
import torch
from torch import nn

from rankwise.errors import UnknownNameError
from rankwise.precision import Precision, create_precision


def optimizer_with_gradients(*gradients: float) -> torch.optim.SGD:
    parameters = [nn.Parameter(torch.zeros(1)) for _ in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = torch.tensor([gradient])
    return torch.optim.SGD(parameters, lr=1.0)


def gradients_of(optimizer: torch.optim.Optimizer) -> list[float]:
    return [parameter.grad.item() for group in optimizer.param_groups for parameter in group["params"]]


@pytest.mark.parametrize(
    ("given", "name"),
    [
        *((32, "32-true"), ("32-TRUE", "32-true"), (64, "64-true"), (16, "16-mixed"), ("bf16", "bf16-mixed")),
        *(("BF16-mixed", "bf16-mixed"), ("64-true", "64-true"), ("16-mixed", "16-mixed")),
        *((name, name) for name in ("16-true", "bf16-true", "16-master", "bf16-master")),
    ],
)
def test_names(given: str | int, name: str) -> None:
    """Every name works, in any case, and Lightning's short ones too."""
    assert create_precision(given).name == name


@pytest.mark.parametrize(("given", "nearest"), [("32-tru", "32-true"), ("bf16_mixed", "bf16-mixed")])
def test_unknown_name(given: str, nearest: str) -> None:
    """An unknown precision is an error that suggests the nearest one."""
    with pytest.raises(UnknownNameError, match=f"Did you mean '{nearest}'"):
        create_precision(given)


def test_infinity_norm() -> None:
    """All gradients together get the requested norm, any p-norm; the old one is returned."""
    optimizer = optimizer_with_gradients(3.0, 4.0)
    assert Precision().clip_gradients_norm(optimizer, 1.0).item() == pytest.approx(5.0)
    assert gradients_of(optimizer) == pytest.approx([0.6, 0.8], rel=1e-4)
    optimizer = optimizer_with_gradients(3.0, -4.0)
    Precision().clip_gradients_norm(optimizer, 2.0, norm_type=float("inf"))
    assert gradients_of(optimizer) == pytest.approx([1.5, -2.0], rel=1e-4)


def test_values_are_clamped() -> None:
    """Each gradient is clamped by itself; without gradients clipping does nothing."""
    optimizer = optimizer_with_gradients(3.0, -0.5)
    Precision().clip_gradients_value(optimizer, 1.0)
    assert gradients_of(optimizer) == [1.0, -0.5]
    optimizer.zero_grad()
    for clip in (Precision().clip_gradients_norm, Precision().clip_gradients_value):
        clip(optimizer, 1.0)
    assert [each.grad for each in optimizer.param_groups[0]["params"]] == [None, None]


def test_closures() -> None:
    """The optimizer gets the closure; modules and batches are not converted, and there is no state."""
    optimizer = optimizer_with_gradients(1.0)
    assert Precision().optimizer_step(optimizer, lambda: 7.0) == 7.0
    precision, module, batch = Precision(), nn.Linear(1, 1).double(), object()
    assert precision.convert_module(module) is module
    assert precision.convert_input(batch) is batch
    assert precision.state_dict() == {}
