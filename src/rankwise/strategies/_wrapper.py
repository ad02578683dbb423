"""What `configure_ddp` has returned: whether it is a wrapper, and averages over the right ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from rankwise.errors import ConfigurationError, InvalidTypeError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["checked_wrapper"]


def checked_wrapper(wrapped: object, strategy: str, group: ProcessGroup | None) -> DistributedDataParallel:
    """Return `wrapped`, if it averages gradients over the ranks of `group` (None for all).

    Args:
        wrapped: what `configure_ddp` returned.
        strategy: the name of the strategy's class.
        group: the strategy's `data_parallel_group`.

    Raises:
        InvalidTypeError: when it is no wrapper.
        ConfigurationError: when it averages over other ranks than those that share out the data.
    """
    if not isinstance(wrapped, DistributedDataParallel):
        raise InvalidTypeError(
            argument=f"{strategy}.configure_ddp()",
            value=wrapped,
            expected="it to return a DistributedDataParallel",
        )
    averaged, sharing = _ranks_of(wrapped.process_group), _ranks_of(group)
    if set(averaged) != set(sharing):
        raise ConfigurationError(
            message=f"{strategy}.configure_ddp() averages gradients over other ranks than share the data.",
            facts=f"its wrapper's process_group has the ranks {averaged}, data_parallel_group {sharing}.",
            remedy=f"{type(wrapped).__name__}(module, device_ids=device_ids, "
            "process_group=self.data_parallel_group, **self.ddp_kwargs).",
        )
    return wrapped


def _ranks_of(group: ProcessGroup | None) -> list[int]:
    return dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
