"""Mix seeds, isolate a block's random numbers, and save and restore the state of random generators."""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["get_random_state", "isolated_random_state", "mixed_seed", "seed_process", "set_random_state"]


def mixed_seed(*numbers: int) -> int:
    """Return a seed from 0 to 2**63 - 1 that depends on all `numbers`."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def seed_process(seed: int) -> None:
    """Seed Python, NumPy (if loaded) and torch's CPU generator."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


@contextlib.contextmanager
def isolated_random_state(seed: int, *generators: torch.Generator) -> Iterator[None]:
    """Seed Python, NumPy (if loaded), torch's CPU generator and `generators`; restore all after it."""
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


def get_random_state(device: torch.device) -> dict[str, Any]:
    """Return the state of Python's, NumPy's (if loaded), torch's and the device's generator.

    It consists of plain types and CPU tensors, so that `torch.load(weights_only=True)` loads it.
    """
    state: dict[str, Any] = {"torch": torch.default_generator.get_state(), "python": random.getstate()}
    if numpy := sys.modules.get("numpy"):
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = (kind, keys.tolist(), *rest)
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore what `get_random_state` returned; NumPy's state only if NumPy is loaded."""
    torch.default_generator.set_state(state["torch"])
    random.setstate(state["python"])
    if "numpy" in state and (numpy := sys.modules.get("numpy")):
        numpy.random.set_state(state["numpy"])
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
