"""What a communication hook remembers: saved and restored rank by rank, and in a world of another size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["read_state", "state_for_rank", "write_state"]


def read_state(state: Any) -> dict[str, Any]:
    """Return what a hook's state must keep, as plain types and tensors; {} for what keeps nothing.

    A state of the user's own is asked for its `state_dict()`, if it has one.
    """
    if callable(own := getattr(state, "state_dict", None)):
        return dict(own())
    if _counts_steps(state):
        return {"iter": state.iter}
    return {}


def write_state(state: Any, saved: Mapping[str, Any]) -> None:
    """Give a hook's state back what `read_state` returned."""
    if not saved:
        return
    if callable(own := getattr(state, "load_state_dict", None)):
        own(saved)
    elif _counts_steps(state):
        state.iter = saved["iter"]


def _counts_steps(state: Any) -> bool:
    """Return whether this is torch's `PostLocalSGDState`, or one made like it."""
    return isinstance(getattr(state, "iter", None), int)


def state_for_rank(saved: Sequence[Mapping[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
    """Return one rank's part of what all ranks have saved.

    In a world of another size every rank gets the mean of the errors that the ranks had: what they have not
    sent yet stays the same when it is averaged.
    """
    if len(saved) == world_size:
        return dict(saved[rank])
    first = dict(saved[0])
    if errors := first.get("errors"):
        others = [state["errors"] for state in saved]
        first["errors"] = {name: _mean([other.get(name) for other in others]) for name in errors}
    return first


def _mean(parts: Sequence[Tensor | None]) -> Tensor:
    present = [part for part in parts if part is not None]
    return torch.stack(present).sum(dim=0) / len(parts)
