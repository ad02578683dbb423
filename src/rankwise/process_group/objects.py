"""Collectives for objects: a pickle is unpickled only if a rank of the group has sent it."""

from __future__ import annotations

import ctypes
import hmac
import io
import pickle
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rankwise.checks import check_choice
from rankwise.errors import PeerAuthenticationError
from rankwise.process_group.authentication import GroupKey, key_of
from rankwise.process_group.collectives import broadcast_bytes, gather_bytes, is_distributed, ranks_of
from rankwise.stores.sealed import CODE_BYTES

T = TypeVar("T")


def broadcast(value: T, src: int = 0, group: dist.ProcessGroup | None = None) -> T:
    """Return rank `src`'s value, which may be any picklable object, on every rank.

    Collective: every rank must call this, in the same order.

    Raises:
        InvalidArgumentError: when `src` or this rank does not belong to `group`.
        PeerAuthenticationError: when the received data was not sent by `src`.
    """
    ranks = _ranks_with(src, "src", group)
    if not is_distributed(group):
        return value
    key = key_of(group)
    is_src = dist.get_rank() == src
    if is_src:
        broadcast_bytes(_sealed(value, key), src, group)
        return value
    key.begin_collective()
    message = broadcast_bytes(None, src, group)
    received: T = _opened(message, key, ranks.index(src))
    return received


def all_gather_object(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Gather any picklable value from every rank, in rank order.

    Collective: every rank must call this, in the same order.

    Raises:
        InvalidArgumentError: when this rank does not belong to `group`.
        PeerAuthenticationError: when the received data was not sent by the rank that it came for.
    """
    ranks_of(group)  # which checks that this rank is a member
    if not is_distributed(group):
        return [value]
    key = key_of(group)
    messages = gather_bytes(_sealed(value, key), group)
    return [_opened(message, key, rank) for rank, message in enumerate(messages)]


def gather_object(value: T, dst: int = 0, group: dist.ProcessGroup | None = None) -> list[T] | None:
    """Gather any picklable value from every rank on one of them.

    Collective: every rank must call this, in the same order.

    Args:
        value: this rank's value.
        dst: the global rank that receives the values.
        group: the ranks to gather from; all of them by default.

    Returns:
        Every rank's value, in rank order, on `dst`; None on other ranks.

    Raises:
        InvalidArgumentError: when `dst` or this rank does not belong to `group`.
        PeerAuthenticationError: on `dst`, when received data was not sent by the rank that it came for.
    """
    _ranks_with(dst, "dst", group)
    if not is_distributed(group):
        return [value]
    key = key_of(group)
    messages = gather_bytes(_sealed(value, key), group, dst)
    if dist.get_rank() != dst:
        return None
    return [_opened(message, key, rank) for rank, message in enumerate(messages)]


def _ranks_with(rank: int, argument: str, group: dist.ProcessGroup | None) -> list[int]:
    ranks = ranks_of(group)
    check_choice(argument, rank, ranks, f"one of the ranks {ranks}")
    return ranks


def _sealed(value: object, key: GroupKey) -> Tensor:
    """Return a code and the pickle that it is for, as bytes; this begins a collective."""
    stream = io.BytesIO()
    stream.write(bytes(CODE_BYTES))
    pickle.Pickler(stream).dump(value)
    key.begin_collective()
    message = stream.getbuffer()
    message[:CODE_BYTES] = key.code_of(message[CODE_BYTES:])
    return torch.frombuffer(message, dtype=torch.uint8)


def _opened(message: Tensor, key: GroupKey, sender: int) -> Any:
    """Return the object in a message, once its code has shown that the rank `sender` has sent it."""
    own = message.cpu()
    data = memoryview(ctypes.string_at(own.data_ptr(), own.numel()))  # without NumPy
    if not hmac.compare_digest(data[:CODE_BYTES], key.code_of(data[CODE_BYTES:], sender)):
        raise PeerAuthenticationError(
            f"An object that came as rank {sender}'s was sent by another process, and was not unpickled."
        )
    return pickle.loads(data[CODE_BYTES:])
