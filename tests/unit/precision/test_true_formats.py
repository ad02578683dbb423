"""Parameters, buffers, inputs and new tensors in one dtype."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rankwise.errors import UnknownNameError
from rankwise.precision import DoublePrecision, HalfPrecision, Precision, create_precision

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
    """An optimizer made before the conversion still updates the module."""
    module = nn.Linear(2, 2)
    before = module.weight
    assert HalfPrecision().convert_module(module).weight is before


@pytest.mark.parametrize(("name", "dtype"), [("16-true", torch.float32), ("64-true", torch.float64)])
def test_outputs(name: str, dtype: torch.dtype) -> None:
    """Predictions of half precision are converted to 32 bits; those of double are not rounded."""
    precision = create_precision(name)
    output = precision.convert_input({"y": torch.ones(1)})
    assert precision.convert_output(output)["y"].dtype is dtype


def test_default_dtype_is_restored_after_an_error() -> None:
    """Torch's default dtype is restored after a step that raises."""
    with pytest.raises(RuntimeError), HalfPrecision().forward_context():
        raise RuntimeError
    assert torch.get_default_dtype() is torch.float32


def test_other_names() -> None:
    """Names are checked."""
    with pytest.raises(UnknownNameError):
        HalfPrecision("16")
