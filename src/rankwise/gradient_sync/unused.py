"""Name unused parameters in DDP's error, and warn when the search for them is unnecessary."""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Container, Mapping
from contextlib import suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from rankwise.errors import UnusedParametersError, text_of
from rankwise.process_group.collectives import all_reduce
from rankwise.ranks import warn
from rankwise.stores.tcp import default_store
from rankwise.stores.values import read_value

_MESSAGE = "Expected to have finished reduction in the prior iteration"
# With find_unused_parameters, after a backward pass outside of the step has reached the parameter.
_MESSAGE_OF_UNDEFINED = "Encountered gradient which is undefined, but still allreduced"
_INDICES = r"did not receive grad for rank \d+: ((?:\d+ ?)+)"
_NAMES_TIMEOUT = timedelta(milliseconds=300)
_recorded: weakref.WeakKeyDictionary[DistributedDataParallel, list[str]] = weakref.WeakKeyDictionary()


def record_reduced_names(wrapped: DistributedDataParallel, apart: Container[int] = ()) -> None:
    """Record the names of the parameters that DDP reduces from now on, without the ids in `apart`."""
    _recorded.pop(wrapped, None)
    _recorded[wrapped] = reduced_names(wrapped, apart)


def reduced_names(wrapped: DistributedDataParallel, apart: Container[int] = ()) -> list[str]:
    """Return the names of the parameters that DDP reduces, in the order of DDP's indices."""
    if wrapped in _recorded:
        return _recorded[wrapped]
    ignored = wrapped.parameters_to_ignore
    return [
        name
        for name, parameter in wrapped.module.named_parameters()
        if parameter.requires_grad and name not in ignored and id(parameter) not in apart
    ]


def check_finished(wrapped: DistributedDataParallel) -> None:
    """Check that the last backward pass has averaged every gradient; torch checks in the next forward."""
    try:
        wrapped._check_reducer_finalized()
    except RuntimeError as error:
        raise explain_unused(error, wrapped) or error from None


def explain_unused(
    error: BaseException, wrapped: DistributedDataParallel | None = None
) -> UnusedParametersError | None:
    """Return DDP's error about missing gradients with the parameters' names; None for any other error."""
    text = text_of(error)
    if not isinstance(error, RuntimeError) or (_MESSAGE not in text and _MESSAGE_OF_UNDEFINED not in text):
        return None
    wrapped = _wrapped_module_in(error.__traceback__) if wrapped is None else wrapped
    if wrapped is None:
        return None
    names, match = reduced_names(wrapped), re.search(_INDICES, text)
    if _MESSAGE_OF_UNDEFINED in text:
        parameters = dict(wrapped.module.named_parameters())
        own = tuple(name for name in names if name in parameters and parameters[name].grad is None)
    else:
        numbers = [] if match is None else [int(number) for number in match.group(1).split()]
        own = tuple(names[number] for number in numbers if number < len(names))
    found = UnusedParametersError(names_by_rank=_exchange_names(own), module=type(wrapped.module).__name__)
    return found.with_traceback(error.__traceback__)


def _wrapped_module_in(traceback: TracebackType | None) -> DistributedDataParallel | None:
    found = None
    while traceback is not None:
        owner = traceback.tb_frame.f_locals.get("self")
        found = owner if isinstance(owner, DistributedDataParallel) else found
        traceback = traceback.tb_next
    return found


def _exchange_names(own: tuple[str, ...]) -> Mapping[int, tuple[str, ...]]:
    """Return the names of this rank, and of the other ranks that fail within `_NAMES_TIMEOUT`."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    try:
        store: Any = default_store()
        store.set(f"unused/{rank}", json.dumps(own))
        keys = {other: f"unused/{other}" for other in range(world_size)}
        with suppress(Exception):  # a timeout, for which each kind of store has its own class
            store.wait(list(keys.values()), _NAMES_TIMEOUT)
        present = [other for other, key in keys.items() if store.check([key])]
        return {other: tuple(read_value(store, keys[other], list[str])) for other in present}
    except Exception:  # noqa: BLE001  the store may have ended with the rank that hosts it; own names suffice
        return {rank: own}


@final
class UnusedParameterMonitor:
    """Warns if `find_unused_parameters` finds no unused parameter in the first reductions of a job."""

    LENGTH = 10  # torch logs them in the first ten reductions, and in few of the later ones

    def __init__(self) -> None:
        self._num_reductions = 0
        self._num_extra = 0
        self._found = False
        self._is_done = False

    def record(self, wrapped: DistributedDataParallel, is_final_microbatch: bool) -> None:
        """Record a reduction, on every rank; after `LENGTH` of them warn on rank 0 if none found any."""
        if self._is_done:
            return
        self._num_reductions += 1
        self._num_extra += not is_final_microbatch
        data = wrapped._get_ddp_logging_data()
        self._found = self._found or bool(data.get("unused_parameter_size"))
        if not is_final_microbatch or self._num_reductions < self.LENGTH:
            return
        self._is_done = True
        flag = torch.tensor(self._found, device=next(wrapped.parameters()).device)
        found = all_reduce(flag, wrapped.process_group, "max")
        if not found and dist.get_rank(wrapped.process_group) == 0:
            number = len(reduced_names(wrapped))
            warn(
                f"find_unused_parameters=True found no unused parameter in {self._num_reductions} "
                f"reductions on any rank. It cost: {self._num_reductions} searches of the graph for "
                f"{number} parameters, and {self._num_reductions} more all-reduces, of {number} flags each; "
                f"{self._num_extra} of the reductions were not the last of their step. Leave it out if every "
                "later step uses the whole model.",
            )
