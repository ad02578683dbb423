"""Who takes part in a collective: the ranks of a group, and the device that carries what they exchange."""

from __future__ import annotations

import torch
import torch.distributed as dist

from rankwise.errors import InvalidArgumentError


def is_distributed() -> bool:
    """Whether a default process group exists."""
    return dist.is_available() and dist.is_initialized()


def size_of(group: dist.ProcessGroup | None) -> int:
    """Return how many ranks a group has.

    Raises:
        InvalidArgumentError: when this process is none of them: torch would return without doing anything.
    """
    if dist.get_rank(group) < 0:
        raise InvalidArgumentError(
            argument="group",
            value=group,
            expected=f"a group with global_rank {dist.get_rank()} in it: only its members take part",
        )
    return dist.get_world_size(group)


def carrier_of(group: dist.ProcessGroup | None) -> torch.device:
    """Return a device from which the group's back end can send: the CPU where it can, NCCL's otherwise."""
    backend = str(dist.get_backend(group))
    is_cuda_only = backend in ("nccl", "cuda:nccl")
    return torch.device("cuda", torch.cuda.current_device()) if is_cuda_only else torch.device("cpu")
