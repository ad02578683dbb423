"""How many inputs each test of this folder draws: 300, and in the series `soak` a hundred thousand."""

import os
import random

import pytest

from tests.fuzz.inputs import Fuzzing

SEED = "RANKWISE_TEST_FUZZ_SEED"
"""The environment variable with the seed of the series `soak`; a random one by default."""


FEW = 300
LONG = pytest.param(100_000, id="100000", marks=[pytest.mark.soak, pytest.mark.timeout(7200)])


@pytest.fixture(params=[pytest.param(FEW, id=str(FEW)), LONG])
def fuzzing(request: pytest.FixtureRequest) -> Fuzzing:
    """Return the number of inputs, and their seed, which is always the same in the default series."""
    seed = 0 if request.param == FEW else int(os.environ.get(SEED) or random.randrange(1 << 32))
    print(f"seed {seed}")
    return Fuzzing(request.param, seed)
