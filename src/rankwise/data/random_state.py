"""Random numbers: one seed made of several facts, a state that is put back, a state that travels."""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["get_random_state", "isolated_random_state", "mixed_seed", "seed_process", "set_random_state"]


def mixed_seed(*facts: int) -> int:
    """Return a seed, from 0 to 2**63 - 1, that differs wherever one of the facts does."""
    digest = hashlib.blake2b(repr(facts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def seed_process(seed: int) -> None:
    """Seed Python, NumPy (where loaded) and torch's CPU generator."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


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


def get_random_state(device: torch.device) -> dict[str, Any]:
    """Return the state of Python's, NumPy's (where loaded), torch's and the device's generator.

    Plain types and CPU tensors, so that `weights_only=True` loads them.
    """
    state: dict[str, Any] = {"torch": torch.default_generator.get_state(), "python": random.getstate()}
    if numpy := sys.modules.get("numpy"):
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = (kind, keys.tolist(), *rest)
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Take back what `get_random_state` returned; NumPy's only where NumPy is loaded."""
    torch.default_generator.set_state(state["torch"])
    random.setstate(state["python"])
    if "numpy" in state and (numpy := sys.modules.get("numpy")):
        numpy.random.set_state(state["numpy"])
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
