"""Ranks that exist for many programs: forked once, connected by gloo, each runs one job after another."""

import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_TIMEOUT = timedelta(seconds=60)
_LIMIT_S = 120.0
_FORK = multiprocessing.get_context("fork")


class RankError(Exception):
    """A rank's failure, with its traceback."""


class Ranks:
    """Processes with a process group; after a failure, `run` starts others."""

    def __init__(self, world_size: int, folder: Path) -> None:
        self._world_size = world_size
        self._folder = folder
        self._starts = 0
        self._members: list[tuple[Any, Any]] = []

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call `function(rank, world_size, *arguments)` on every rank; return what each returned."""
        if not self._members:
            self._start()
        for _, connection in self._members:
            connection.send((function, arguments))
        waiting: dict[Any, int] = {connection: rank for rank, (_, connection) in enumerate(self._members)}
        results: dict[int, Any] = {}
        while waiting:
            ready: list[Any] = wait(list(waiting), _LIMIT_S)
            if not ready:
                self.stop()
                raise RankError(f"ranks {sorted(waiting.values())} of {self._world_size} do not end.")
            for connection in ready:
                rank = waiting.pop(connection)
                has_failed, results[rank] = connection.recv()
                if has_failed:
                    self.stop()
                    raise RankError(f"rank {rank} of {self._world_size}:\n{results[rank]}")
        return [results[rank] for rank in range(self._world_size)]

    def _start(self) -> None:
        self._starts += 1
        store = self._folder / f"store-{self._world_size}-{self._starts}"
        for rank in range(self._world_size):
            here, there = _FORK.Pipe()
            place = (rank, self._world_size, store, there)
            process = _FORK.Process(target=_serve, args=place, daemon=True)
            process.start()
            there.close()
            self._members.append((process, here))

    def stop(self) -> None:
        """End the processes."""
        for process, connection in self._members:
            process.kill()
            process.join()
            connection.close()
        self._members = []


@contextmanager
def ranks_of_many_sizes(folder: Path) -> Iterator[Callable[[int], Ranks]]:
    """Yield a function from a world size to its ranks; end all of them after the block."""
    started: dict[int, Ranks] = {}
    try:
        yield lambda world_size: started.setdefault(world_size, Ranks(world_size, folder))
    finally:
        for ranks in started.values():
            ranks.stop()


def _serve(rank: int, world_size: int, store: Path, connection: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(store), world_size),
        rank=rank,
        world_size=world_size,
        timeout=_TIMEOUT,
    )
    while True:
        function, arguments = connection.recv()
        try:
            answer = False, function(rank, world_size, *arguments)
        except BaseException:
            answer = True, traceback.format_exc()
        connection.send(answer)
