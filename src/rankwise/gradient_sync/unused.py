"""Parameters that had no part in the loss, by name and rank: DDP's error made readable, and its reverse."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from rankwise.errors import UnusedParametersError
from rankwise.failures.classify import text_of
from rankwise.gradient_sync.modes import GradientSyncMode

__all__ = ["UnusedWatch", "check_finished", "explain_unused", "reduced_names"]

_MESSAGE = "Expected to have finished reduction in the prior iteration"
_INDICES = re.compile(r"did not receive grad for rank \d+: ((?:\d+ ?)+)")
_PATIENCE = timedelta(milliseconds=300)


def reduced_names(wrapped: DistributedDataParallel) -> list[str]:
    """Return the names of the parameters that DDP reduces, by its own numbers for them."""
    ignored = wrapped.parameters_to_ignore
    return [
        name
        for name, parameter in wrapped.module.named_parameters()
        if parameter.requires_grad and name not in ignored
    ]


def check_finished(wrapped: DistributedDataParallel) -> None:
    """Make sure that the backward pass that has just run has reduced every gradient.

    torch looks at the next forward pass only, which after the last step never comes.

    Raises:
        UnusedParametersError: when it has not.
    """
    check = getattr(wrapped, "_check_reducer_finalized", None)  # torch's own, of 2.1 and later
    if check is None:
        return
    try:
        check()
    except RuntimeError as error:
        translate_error = explain_unused(error, wrapped)
        raise error if translate_error is None else translate_error from None


def explain_unused(
    error: BaseException, wrapped: DistributedDataParallel | None = None
) -> UnusedParametersError | None:
    """Return DDP's error about unfinished reductions with names in it; None for any other error.

    Args:
        error: what was raised.
        wrapped: whose reductions they are; found in the error's traceback by default.
    """
    if not isinstance(error, RuntimeError) or _MESSAGE not in text_of(error):
        return None
    wrapped = _wrapper_in(error.__traceback__) if wrapped is None else wrapped
    if wrapped is None:
        return None
    match = _INDICES.search(str(error))
    names = reduced_names(wrapped)
    numbers = [] if match is None else [int(number) for number in match.group(1).split()]
    own = tuple(names[number] for number in numbers if number < len(names))
    return UnusedParametersError(names_by_rank=_of_all_ranks(own), module=type(wrapped.module).__name__)


def _wrapper_in(traceback: TracebackType | None) -> DistributedDataParallel | None:
    found = None
    while traceback is not None:
        owner = traceback.tb_frame.f_locals.get("self")
        found = owner if isinstance(owner, DistributedDataParallel) else found
        traceback = traceback.tb_next
    return found


def _of_all_ranks(own: tuple[str, ...]) -> Mapping[int, tuple[str, ...]]:
    """Return the names of this rank, and of those that fail with it within a moment."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    try:
        store: Any = dist.distributed_c10d._get_default_store()
        store.set(f"unused/{rank}", json.dumps(own))
        keys = {other: f"unused/{other}" for other in range(world_size)}
        with suppress(Exception):  # whatever a store raises: not all are there
            store.wait(list(keys.values()), _PATIENCE)
        present = [other for other, key in keys.items() if store.check([key])]
        return {other: tuple(json.loads(store.get(keys[other]))) for other in present}
    except Exception:  # noqa: BLE001  the store may be gone with the rank that keeps it; the names are known
        return {rank: own}


@final
class UnusedWatch:
    """Looks whether a search for unused parameters ever finds one, in the first reductions of a job."""

    LENGTH = 10  # torch notes it in the first ten reductions, and in few of the later ones

    def __init__(self, wrapped: DistributedDataParallel) -> None:
        self._wrapped = wrapped
        self._num_reductions = 0
        self._num_extra = 0
        self._found = False
        self.is_done = False

    @contextmanager
    def around(
        self, block: AbstractContextManager[None], is_final_microbatch: bool, mode: GradientSyncMode
    ) -> Iterator[None]:
        """Run the block, and look at what its reduction found."""
        with block:
            yield
        if is_final_microbatch or mode is GradientSyncMode.MULTI_AUTO_SYNC:
            self._num_reductions += 1
            self._num_extra += not is_final_microbatch
            data = self._wrapped._get_ddp_logging_data()
            self._found = self._found or bool(data.get("unused_parameter_size"))
        if is_final_microbatch and self._num_reductions >= self.LENGTH:
            self.is_done = True
            self._tell()

    def _tell(self) -> None:
        """Have rank 0 say that nothing was found, on any rank.

        Collective: the ranks are at the same reduction.
        """
        found = torch.tensor([float(self._found)], device=next(self._wrapped.parameters()).device)
        dist.all_reduce(found, group=self._wrapped.process_group)
        if float(found) == 0 and dist.get_rank(self._wrapped.process_group) == 0:
            number = len(reduced_names(self._wrapped))
            warnings.warn(
                f"find_unused_parameters=True found no unused parameter in {self._num_reductions} "
                f"reductions on any rank. It cost: {self._num_reductions} searches of the graph for "
                f"{number} parameters, and {self._num_reductions} more all-reduces, of {number} flags each; "
                f"{self._num_extra} of the reductions were not the last of their step. Leave it out if no "
                "later step skips a part of the model.",
                stacklevel=2,
            )
