"""`errors_shared`: what fails on one rank fails on every rank, with the same error."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rankwise.errors import RankwiseError
from rankwise.failures.classify import mark_propagated
from rankwise.failures.record import FailureRecord
from rankwise.ranks import RankInfo


@contextmanager
def errors_shared(strategy: Any, *, of_rank_zero: bool = False) -> Iterator[None]:
    """Raise an exception of the block on every rank. Collective; the block must not call collectives.

    With `of_rank_zero`, only the block on global rank 0 can fail.

    Errors of this package are the same on all ranks; for others, other ranks get a `WorkerRaisedError`.
    """
    own: Exception | None = None
    errors: list[Exception] = []
    try:
        yield
    except Exception as error:  # noqa: BLE001  raised below, on all ranks
        own = error
    try:
        sent = None if own is None else _sent(own, strategy.ranks)
        found = [strategy.broadcast(sent)] if of_rank_zero else strategy.all_gather_object(sent)
        errors = [error for error in found if error is not None]
        if errors:
            raise mark_propagated(errors[0]) if own is None else own
    finally:
        own, sent, found, errors = None, None, [], []  # their tracebacks refer to this frame


def _sent(error: Exception, ranks: RankInfo) -> RankwiseError:
    """Return an error that every rank can read."""
    if isinstance(error, RankwiseError):
        return error
    return FailureRecord.of_exception(ranks, error).to_error(time.monotonic(), (), ())
