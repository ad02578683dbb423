"""Autocast: which operations run in 16 bits, and which results are 32-bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rankwise.errors import UnknownNameError
from rankwise.precision import MixedPrecision

DTYPES = [("16-mixed", torch.float16), ("bf16-mixed", torch.bfloat16)]


@pytest.mark.parametrize(("name", "dtype"), DTYPES)
def test_forward_runs_in_16_bits(name: str, dtype: torch.dtype) -> None:
    """Matrix products are 16-bit, parameters and gradients 32-bit."""
    precision, layer = MixedPrecision(name), nn.Linear(3, 2)
    with precision.forward_context():
        output = layer(torch.randn(4, 3))
    precision.backward(output.float().sum())
    assert output.dtype is dtype
    assert layer.weight.grad is not None
    assert {layer.weight.dtype, layer.weight.grad.dtype} == {torch.float32}


@pytest.mark.parametrize(("name", "scales"), [("16-mixed", True), ("bf16-mixed", False)])
def test_only_float16_is_scaled(name: str, scales: bool) -> None:
    """bfloat16 has the range of 32 bits, and no scaler."""
    precision = MixedPrecision(name)
    assert precision.scales_loss is scales
    assert ("scaler" in precision.state_dict()) is scales


def test_outputs_are_widened() -> None:
    """16-bit predictions are converted to 32 bits; other outputs do not change."""
    output = {"a": torch.ones(1, dtype=torch.bfloat16), "b": torch.ones(1, dtype=torch.long), "c": 1}
    converted = MixedPrecision("bf16-mixed").convert_output(output)
    assert (converted["a"].dtype, converted["b"].dtype, converted["c"]) == (torch.float32, torch.long, 1)


def test_a_step_within_autocast_is_seen() -> None:
    """In manual optimisation the forward pass after a step uses the new weights, not autocast's copy."""
    precision, layer, x = MixedPrecision("bf16-mixed"), nn.Linear(2, 1, bias=False), torch.ones(1, 2)
    sgd = torch.optim.SGD(layer.parameters(), lr=1.0)
    with precision.forward_context():
        before = layer(x)
        precision.backward(before.sum())
        precision.optimizer_step(sgd)
        after = layer(x)
    assert after.item() == pytest.approx(before.item() - 2.0, abs=0.05)


def test_other_names() -> None:
    """Names are checked, with a suggestion."""
    with pytest.raises(UnknownNameError, match="Did you mean 'bf16-mixed'"):
        MixedPrecision("bf16_mixed")
