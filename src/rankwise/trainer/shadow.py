"""What a shadow step must not leave behind: changed buffers, and random numbers that were drawn."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

__all__ = ["untouched"]


@contextmanager
def untouched(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Put the module's buffers, and this process's and `device`'s random state, back after the block."""
    buffers = [
        (submodule, name, buffer, buffer.detach().clone())
        for submodule in module.modules()
        for name, buffer in submodule._buffers.items()
        if buffer is not None
    ]
    devices = [] if device.type == "cpu" else [device]
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"))
        stack.callback(random.setstate, random.getstate())
        if numpy := sys.modules.get("numpy"):
            stack.callback(numpy.random.set_state, numpy.random.get_state())
        yield
    with torch.no_grad():
        for submodule, name, buffer, before in buffers:
            submodule._buffers[name] = buffer  # it may have been replaced, not changed
            buffer.copy_(before)
