"""Ranks as threads of this process, on torch's private "threaded" back end, which only this file uses."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed import multi_threaded_pg
from typing_extensions import override

from rankwise.environments import ClusterEnvironment
from rankwise.launchers import Launcher
from rankwise.launchers.inline import InlineLauncher
from rankwise.ranks import RankInfo
from rankwise.strategies import DDPStrategy
from rankwise.strategies.job import variables_set
from rankwise.strategies.placement import Placement

T = TypeVar("T")
_private: Any = multi_threaded_pg  # untyped
if not hasattr(_private.ThreadLocalWorld, "comms"):  # torch 2.11 destroys what is in it
    _private.ThreadLocalWorld.comms = []
_END_S = 20.0


def run_ranks(world_size: int, function: Callable[[int], T]) -> list[T]:
    """Run `function(rank)` on `world_size` threads that have a process group; return what each returned.

    The first exception that is no consequence of another is raised.
    """
    results: dict[int, T] = {}
    errors: list[BaseException] = []
    store = dist.HashStore()

    def run(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
            try:
                results[rank] = function(rank)
            finally:
                dist.destroy_process_group()
        except BaseException as error:
            errors.append(error)
            _end_ranks(error)

    with variables_set({}), _kept_what_threads_share():  # torch sets a variable
        _run_threads(world_size, run)
    for error in errors:
        if not isinstance(error, SystemExit):  # how a rank ends when another has failed
            raise error
    return [results[rank] for rank in range(world_size)]


@contextmanager
def _kept_what_threads_share() -> Iterator[None]:
    """Restore what is one for all threads: each sets it and puts back what it found, in any order."""
    hook = sys.excepthook  # torch wraps it
    dtype = torch.get_default_dtype()
    wrapper: Any = DistributedDataParallel  # remembers whose forward is under way
    active = wrapper._active_ddp_module
    try:
        yield
    finally:
        wrapper._active_ddp_module = active
        torch.set_default_dtype(dtype)
        sys.excepthook = hook


def _run_threads(world_size: int, run: Callable[[int], None]) -> None:
    distributed: Any = torch._C._distributed_c10d
    isolate = distributed._set_thread_isolation_mode
    isolate(True)
    _private._install_threaded_pg()
    try:
        _run_to_the_end([_Rank(run, rank) for rank in range(world_size)])
    finally:
        _private.ProcessLocalGroup.reset()
        _private._uninstall_threaded_pg()
        isolate(False)


class _Rank(threading.Thread):
    """A rank's thread. Unlike `join` in Python 3.11, an interrupted `wait` does not take it as ended."""

    def __init__(self, run: Callable[[int], None], rank: int) -> None:
        super().__init__(target=run, args=(rank,))
        self._has_ended = threading.Event()

    @override
    def run(self) -> None:
        try:
            super().run()
        finally:
            self._has_ended.set()

    def wait(self, timeout_s: float) -> bool:
        """Return whether it has ended. A signal just before a wait does not cut it: hence the limit."""
        if self._has_ended.wait(timeout_s):
            self.join()
        return self._has_ended.is_set()


def _run_to_the_end(ranks: list[_Rank]) -> None:
    try:
        _start(ranks)
        while not all(rank.wait(1.0) for rank in ranks):
            pass
    except BaseException as error:  # a time limit of pytest: a rank waits in a collective for ever
        _end_ranks(error)
        for rank in ranks:
            rank.wait(_END_S)
        raise


def _start(ranks: list[_Rank]) -> None:
    """Start all ranks; what a signal's handler raises comes after that."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGALRM})
    try:
        for rank in ranks:
            rank.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_ranks(error: BaseException) -> None:
    """Make every rank that is in a collective, or comes to one, leave by SystemExit."""
    with _private.ProcessLocalGroup._coll_lock:  # it iterates over what the ranks add to and take from
        _private.ProcessLocalGroup.exception_handle(error)


@contextmanager
def counted_reductions() -> Iterator[dict[int, list[int]]]:
    """Count the all-reduces of the ranks that `run_ranks` runs in the block: their sizes, by rank."""
    sizes: dict[int, list[int]] = {}
    group = _private.ProcessLocalGroup
    plain = group.allreduce

    def counting(self: Any, *arguments: Any, **named: Any) -> Any:
        if not arguments:  # of a barrier
            return plain(self, **named)
        tensors, *options = arguments
        tensor = tensors if isinstance(tensors, torch.Tensor) else tensors[0]
        sizes.setdefault(self._rank, []).append(tensor.numel())
        return plain(self, tensors, *options, **named)

    group.allreduce = counting
    try:
        yield sizes
    finally:
        group.allreduce = plain


class ThreadedStrategy(DDPStrategy):
    """DDP on one of the threads of `run_ranks`; the process group is there already."""

    def __init__(self, rank: int, world_size: int, **arguments: Any) -> None:
        super().__init__(accelerator="cpu", devices=world_size, start_method="fork", **arguments)
        self._ranks_of_thread = RankInfo(rank, rank, 0, world_size, world_size, 1)

    def place_ranks(
        self, environment: ClusterEnvironment, local_world_size: int, num_nodes: int | None
    ) -> RankInfo:
        return self._ranks_of_thread

    def create_launcher(self, placement: Placement) -> Launcher:
        return InlineLauncher(placement.ranks)

    def setup_environment(self) -> None:
        self.job.cleanup.callback(self._release_modules, self.job.modules)
