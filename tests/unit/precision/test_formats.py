"""Autocast, and true formats: which parameters, operations and results have which dtype."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from rankwise.errors import UnknownNameError
from rankwise.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision, create_precision

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
    """16-bit predictions are converted to 32 bits; other outputs do not change, those of double neither."""
    output = {"a": torch.ones(1, dtype=torch.bfloat16), "b": torch.ones(1, dtype=torch.long), "c": 1}
    converted = MixedPrecision("bf16-mixed").convert_output(output)
    assert (converted["a"].dtype, converted["b"].dtype, converted["c"]) == (torch.float32, torch.long, 1)
    for name, dtype in (("16-true", torch.float32), ("64-true", torch.float64)):
        precision = create_precision(name)
        output = precision.convert_input({"y": torch.ones(1)})
        assert precision.convert_output(output)["y"].dtype is dtype


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
    with pytest.raises(UnknownNameError):
        HalfPrecision("16")


FORMATS = [
    (HalfPrecision("16-true"), torch.float16),
    (HalfPrecision("bf16-true"), torch.bfloat16),
    (DoublePrecision(), torch.float64),
]


@pytest.mark.parametrize(("precision", "dtype"), FORMATS)
def test_everything_has_the_format(precision: Precision, dtype: torch.dtype) -> None:
    """Parameters, buffers, inputs and outputs have the dtype; integers stay."""
    module = precision.convert_module(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    batch = precision.convert_input((torch.ones(3, 2), torch.ones(3, dtype=torch.long), "label"))
    with precision.forward_context():
        output = module(batch[0]) + torch.ones(1)
    assert {parameter.dtype for parameter in module.parameters()} == {dtype}
    assert {buffer.dtype for buffer in module.buffers()} == {dtype, torch.long}
    assert (batch[0].dtype, batch[1].dtype, batch[2]) == (dtype, torch.long, "label")
    assert output.dtype is dtype
    assert torch.get_default_dtype() is torch.float32


def test_parameters_keep_their_identity() -> None:
    """An optimizer made before the conversion works; torch's default dtype is restored after an error."""
    module = nn.Linear(2, 2)
    before = module.weight
    assert HalfPrecision().convert_module(module).weight is before
    with pytest.raises(RuntimeError), HalfPrecision().forward_context():
        raise RuntimeError
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_the_norm_of_large_gradients(norm_type: float) -> None:
    """A norm that float16 cannot hold clips gradients to the limit, not to 0; without gradients it is 0."""
    precision = create_precision("16-true")
    layer: Any = precision.convert_module(nn.Linear(200, 200, bias=False))
    unused = nn.Parameter(torch.ones(1).half())
    optimizer = torch.optim.SGD([layer.weight, unused], lr=1.0)
    layer.weight.grad = torch.full_like(layer.weight, 600.0)
    expected = torch.linalg.vector_norm(layer.weight.grad.float(), norm_type)
    norm = precision.clip_gradients_norm(optimizer, 512.0, norm_type)
    torch.testing.assert_close(norm, expected)
    clipped = torch.linalg.vector_norm(layer.weight.grad.float(), norm_type)
    assert float(clipped) == pytest.approx(512.0, rel=1e-2)
    optimizer.zero_grad()
    assert float(precision.clip_gradients_norm(optimizer, 1.0)) == 0


@pytest.mark.parametrize("name", ["32-true", "16-true", "bf16-true", "16-mixed", "16-master", "bf16-master"])
def test_clipping_sparse_gradients(name: str) -> None:
    """The norm counts each row once; rows that a batch uses twice are added first."""
    precision, layer = create_precision(name), nn.Embedding(4, 1, sparse=True)
    precision.convert_module(layer)
    sgd = torch.optim.SGD(layer.parameters(), lr=1.0)
    precision.configure(layer, [sgd])
    with torch.no_grad():
        layer.weight.zero_()
    for limit in (precision.clip_gradients_norm, precision.clip_gradients_value):
        precision.zero_grad(sgd)
        precision.backward(layer(torch.tensor([1, 1, 2, 2, 2])).sum() / 2)
        norm = limit(sgd, 1.0)
        assert norm is None or float(norm) == pytest.approx(3.25**0.5, rel=1e-2)
    [gradient] = [parameter.grad for parameter in precision.main_parameters(sgd)]
    assert gradient is not None
    assert gradient.to_dense().flatten().tolist() == [0.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("name", "meant"),
    [("fp16", "16-mixed"), ("float32", "32-true"), ("FP64", "64-true"), ("bfloat16", "bf16-mixed")],
)
def test_names_of_other_libraries(name: str, meant: str) -> None:
    """A name of another library is refused with the name that it has here, not with one that looks alike."""
    with pytest.raises(UnknownNameError) as caught:
        create_precision(name)
    text = str(caught.value)
    assert f'Fix: precision="{meant}"' in text
    assert "Did you mean" not in text
    assert text.index("Fix:") < text.index("known are")
