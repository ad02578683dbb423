"""What a shadow step must not leave behind: changed buffers, and random numbers that were drawn."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.trainer.metric_objects import is_metric_object

__all__ = ["untouched"]


@contextmanager
def untouched(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Put buffers and metric objects of the module, and all random state, back after the block."""
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
        metrics = [(metric, _metric_state(metric)) for metric in module.modules() if is_metric_object(metric)]
        yield
    for metric, state in metrics:
        for name, value in state.items():
            setattr(metric, name, value)
    with torch.no_grad():
        for submodule, name, buffer, before in buffers:
            submodule._buffers[name] = buffer  # it may have been replaced, not changed
            buffer.copy_(before)


def _metric_state(metric: Any) -> dict[str, Any]:
    """Return what an update of a metric object changes."""
    states = {
        name: state.clone() if isinstance(state, Tensor) else list(state)
        for name, state in metric.metric_state.items()
    }
    return {**states, "_update_count": metric.update_count, "_computed": None}
