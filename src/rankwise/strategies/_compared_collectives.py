"""`check_collectives=True`: the ranks of a strategy compare each collective before it runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from rankwise.errors import InvalidArgumentError, InvalidTypeError
from rankwise.gradient_sync.comm_hook import register_ddp_comm_hook
from rankwise.process_group.collective_check import CollectiveCheck
from rankwise.strategies.base import Strategy

VARIABLE = "RANKWISE_CHECK_COLLECTIVES"
_VALUES = {"": False, "0": False, "1": True}


class ComparedCollectives(Strategy):
    """Compare collectives for as long as a job lasts, where that is asked for.

    Attributes:
        check_collectives: whether it is.
    """

    check_collectives: bool = False
    init_timeout: timedelta
    _check: CollectiveCheck | None = None

    @contextmanager
    def collectives_compared(self, store: dist.Store) -> Iterator[None]:
        """Compare each collective of this process in the block; do nothing where nobody asks for it."""
        if not self.check_collectives or self.world_size == 1:
            yield
            return
        own = self.worker.open_another(store, self.init_timeout)
        self._check = CollectiveCheck(self.global_rank, own, self.timeout)
        try:
            with self._check.checking():
                yield
        finally:
            self._check = None

    def compare_collectives_of(self, wrapped: DistributedDataParallel) -> None:
        """Have what DDP does by itself compared too: its buckets are averaged in a hook instead of C++."""
        if self._check is None:
            return
        if not wrapped._comm_hooks:
            register_ddp_comm_hook(wrapped, hook="allreduce")
        _BucketsRebuilt(wrapped, self._check)

    def before_finish(self) -> None:
        """Compare that all ranks are done, and none waits for others in a collective."""
        if self._check is not None:
            self._check.finish()


@final
class _BucketsRebuilt:
    """Compare the forward pass in which DDP's C++ arranges its buckets anew: the one after a first step.

    Args:
        wrapped: by DDP; called before its forward passes, until that one.
        check: compares.
    """

    def __init__(self, wrapped: DistributedDataParallel, check: CollectiveCheck) -> None:
        self._check = check
        self._has_stepped = False
        self._handle = wrapped.register_forward_pre_hook(self)

    def __call__(self, wrapped: Any, args: Any) -> None:
        """Run before a forward pass."""
        if not torch.is_grad_enabled():
            return
        if self._has_stepped:
            self._handle.remove()
            self._check.compare(wrapped.process_group, "forward pass of DistributedDataParallel")
        self._has_stepped |= wrapped.require_backward_grad_sync


def is_check_wanted(value: object) -> bool:
    """Return whether collectives are to be compared; None asks the environment.

    Raises:
        InvalidTypeError, InvalidArgumentError: when nobody can know.
    """
    if isinstance(value, bool):
        return value
    if value is not None:
        raise InvalidTypeError(argument="check_collectives", value=value, expected="True, False or None")
    given = os.environ.get(VARIABLE, "")
    if given not in _VALUES:
        raise InvalidArgumentError(argument=VARIABLE, value=given, expected="1 or 0")
    return _VALUES[given]
