"""Seeding everything."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from rankwise import seed_everything
from rankwise.errors import InvalidArgumentError, InvalidTypeError
from rankwise.seed import isolated_random_state


def draws() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(np.random.rand())


def test_everything_is_seeded() -> None:
    """The same seed gives the same numbers of Python, NumPy and torch; another gives others."""
    with isolated_random_state(0):
        assert seed_everything(3, workers=True) == 3
        first = draws()
        seed_everything(3)
        assert draws() == first
        seed_everything(4)
        assert all(other != one for other, one in zip(draws(), first, strict=True))


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_out_of_range(seed: int) -> None:
    """A seed is one that NumPy takes too."""
    with pytest.raises(InvalidArgumentError, match="seed="):
        seed_everything(seed)


@pytest.mark.parametrize("seed", ["3", 1.5, True])
def test_no_number(seed: Any) -> None:
    """A seed is a whole number."""
    with pytest.raises(InvalidTypeError, match="a whole number"):
        seed_everything(seed)


def test_workers_always_follow() -> None:
    """That workers should not follow the seed is refused, not passed over."""
    with pytest.raises(InvalidArgumentError, match="workers=False"):
        seed_everything(1, workers=False)
