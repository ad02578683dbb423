"""Average gradients through a communication hook, in buckets of rankwise's own: where DDP is held back."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rankwise.errors import ConfigurationError
from rankwise.gradient_sync.buckets import BUCKET_BYTES, buckets_of, keep_means, trained_among
from rankwise.gradient_sync.weights import WeightedReduction

__all__ = ["HookBucket", "ManualHookRunner"]

_REMEMBERING = ("PowerSGDMemory", "PowerSGDState", "PostLocalSGDState")


@final
class HookBucket:
    """Some parameters' gradients, one after another, with the methods of torch's `GradBucket`."""

    def __init__(self, workers: list[Tensor], index: int, is_last: bool) -> None:
        self.workers = workers
        self._index = index
        self._is_last = is_last
        pieces = [
            member.new_zeros(member.numel()) if member.grad is None else member.grad.detach().reshape(-1)
            for member in workers
        ]
        self._buffer = torch.cat(pieces)

    def index(self) -> int:
        """Return the bucket's number."""
        return self._index

    def is_last(self) -> bool:
        """Return whether no further bucket follows."""
        return self._is_last

    def buffer(self) -> Tensor:
        """Return the gradients, flat."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace the gradients by others of the same number."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """Return the gradients in their shapes, as views of the buffer."""
        sizes = [member.numel() for member in self.workers]
        parts = zip(self._buffer.split(sizes), self.workers, strict=True)
        return [part.view(member.shape) for part, member in parts]

    def parameters(self) -> list[Tensor]:
        """Return the parameters whose gradients these are."""
        return self.workers


@final
class ManualHookRunner:
    """The communication hook of a wrapped module, to be run on buckets that DDP has not made.

    Args:
        hook: a function `hook(state, bucket)`.
        state: its state.

    Raises:
        ConfigurationError: for a hook that remembers gradients from step to step.
    """

    def __init__(self, hook: Any, state: Any) -> None:
        self._hook, self._state = hook, state
        if type(state).__name__ in _REMEMBERING:
            raise ConfigurationError(
                message=f"A hook with a {type(state).__name__} cannot be used in manual optimisation.",
                facts="it remembers gradients from step to step, and there a step may have any number of "
                "backward passes, each over other parameters.",
                remedy='comm_hook="bf16_compress", or automatic_optimization = True.',
            )

    @classmethod
    def of(cls, wrapped: nn.Module) -> ManualHookRunner | None:
        """Return the hook that was registered with a wrapped module; None for DDP's own average.

        Raises:
            ConfigurationError: for a hook that remembers gradients from step to step.
        """
        hooks: list[Any] = wrapped._comm_hooks if isinstance(wrapped, DistributedDataParallel) else []
        is_weighting = bool(hooks) and getattr(hooks[-1][0], "__qualname__", "") == WeightedReduction.__name__
        return None if not hooks or is_weighting else cls(*hooks[-1])

    def reduce(
        self,
        parameters: Iterable[Tensor],
        group: dist.ProcessGroup | None = None,
        *,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """Let the hook average the gradients of `parameters` over the ranks, in place.

        Which gradients exist travels by itself, in one more all-reduce: a hook may round, or drop, what it
        is given. One that exists nowhere stays None, as in `reduce_gradients`.

        Collective: every rank must call this, with the same parameters in the same order.
        """
        groups = list(buckets_of(trained_among(parameters), bucket_bytes))
        works = []
        for index, workers in enumerate(groups):
            bucket = HookBucket(workers, index, index + 1 == len(groups))
            works.append((workers, self._hook(self._state, bucket)))
        flags = [float(member.grad is not None) for workers in groups for member in workers]
        if not flags:
            return
        exist = torch.tensor(flags, device=groups[0][0].device)
        dist.all_reduce(exist, group=group)
        wanted = iter(exist.tolist())
        for workers, future in works:
            flat = future.wait()
            flat = flat if isinstance(flat, Tensor) else flat[0]
            means = flat.split([member.numel() for member in workers])
            keep_means(workers, means, list(itertools.islice(wanted, len(workers))))
