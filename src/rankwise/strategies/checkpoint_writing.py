"""Write a checkpoint: on global rank 0, while the others wait; after a failure, on each rank by itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed import DistError

from rankwise.checkpoint.base import as_checkpoint_error
from rankwise.errors import CheckpointError, RankZeroFailedError, RendezvousTimeoutError
from rankwise.launchers import Launcher
from rankwise.launchers.context import WorkerContext
from rankwise.monitoring.heartbeat import report_phase, saving_in_hook_reported
from rankwise.process_group.after_failure import is_after_failure, refuse_partly_updated
from rankwise.process_group.collectives import is_distributed
from rankwise.process_group.rank_zero import awaited_between_jobs
from rankwise.strategies.collectives import errors_shared


def write_checkpoint(strategy: Any, checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a checkpoint; see `Strategy.save_checkpoint`."""
    if is_after_failure():
        refuse_partly_updated("save_checkpoint()")
        with saving_in_hook_reported():
            _write(strategy, checkpoint, path)
        return
    if (worker := _context_between_jobs(strategy)) is not None:
        with _awaited(strategy, worker, path):
            if strategy.is_global_zero:
                _write(strategy, checkpoint, path)
        return
    with errors_shared(strategy, of_rank_zero=True):
        if strategy.is_global_zero:
            report_phase("checkpoint")
            _write(strategy, checkpoint, path)


def _context_between_jobs(strategy: Any) -> WorkerContext | None:
    """Return the context of a rank that continues after a job; None in a job, or without other ranks."""
    if not strategy.is_bound or strategy.is_in_job or is_distributed():
        return None
    launcher: Launcher | None = strategy.placement.launcher
    return None if launcher is None else launcher.context_between_jobs()


@contextmanager
def _awaited(strategy: Any, worker: WorkerContext, path: str | os.PathLike[str]) -> Iterator[None]:
    """Enter the block on rank 0, then on the other ranks; raise a failure of rank 0's on all."""
    try:
        store = worker.open_store(strategy.timeout)
        with awaited_between_jobs(store, worker.ranks.global_rank, strategy.timeout):
            yield
    except RankZeroFailedError as error:
        problem = f"could not be written by global_rank={error.global_rank}: {error.failure}"
        raise CheckpointError(
            path=os.fspath(path), problem=problem, remedy=error.ADVICE.format(global_rank=0)
        ) from None
    except DistError:
        if worker.ranks.global_rank == 0:
            return  # it has written the file; the others are gone with the store
        raise RendezvousTimeoutError(
            "global_rank=0 to save a checkpoint, too", strategy.timeout.total_seconds()
        ) from None


def _write(strategy: Any, checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> None:
    with as_checkpoint_error(path):
        strategy.checkpoint_io.save_checkpoint(checkpoint, path)
