"""Draw the same random numbers on every rank, and leave everybody else's random numbers alone."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator

import torch

__all__ = ["isolated_random_state"]


@contextlib.contextmanager
def isolated_random_state(seed: int, *generators: torch.Generator) -> Iterator[None]:
    """Seed Python, NumPy (where loaded), torch's CPU generator and `generators`; put all back after."""
    with contextlib.ExitStack() as stack:
        for generator in (torch.default_generator, *generators):
            stack.callback(generator.set_state, generator.get_state())
            generator.manual_seed(seed)
        stack.callback(random.setstate, random.getstate())
        random.seed(seed)
        if numpy := sys.modules.get("numpy"):
            stack.callback(numpy.random.set_state, numpy.random.get_state())
            numpy.random.seed(seed % 2**32)
        yield
