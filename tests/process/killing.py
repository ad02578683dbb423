"""Kill ranks from outside while they train, again and again, and record what each was doing."""

import ctypes
import mmap
import os
import random
import select
import signal
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from rankwise import Trainer
from tests.process.resume_tasks import Net, Noisy, ThroughTorch, train

PHASES = ("loading data", "in a step", "saving")
_PAUSE_S = 0.002
_MOST_DELAY_S = 0.12  # several steps
_LIMIT_S = 60.0


class _Rank(ctypes.Structure):
    """A rank's state: its pid, the number of restarts, and its phase."""

    _fields_ = (("pid", ctypes.c_long), ("start", ctypes.c_long), ("phase", ctypes.c_long))


class _Page(ctypes.Structure):
    """`saved_by`: the last start that has a checkpoint of its own; `begun_at`: the step where each began."""

    _fields_ = (("ranks", _Rank * 2), ("saved_by", ctypes.c_long), ("begun_at", ctypes.c_long * 64))


_page = _Page.from_buffer(mmap.mmap(-1, mmap.PAGESIZE))  # forked ranks share it; it outlives them


def note(phase: str) -> None:
    """Record what this rank does from now on; starts count from 1."""
    mine: _Rank = _page.ranks[int(os.environ["RANK"])]
    mine.phase = PHASES.index(phase)
    mine.start = _start()
    mine.pid = os.getpid()


def _start() -> int:
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1


class SlowlyLoaded(Noisy):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        note("loading data")
        time.sleep(_PAUSE_S)
        return super().__getitem__(index)


class SlowlyTrained(Net):
    def on_train_start(self) -> None:
        _page.begun_at[_start()] = self.trainer.global_step

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        note("in a step")
        time.sleep(_PAUSE_S)
        return super().training_step(batch, batch_idx)


class SlowlySaved(ThroughTorch):
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> None:
        note("saving")
        super().save_checkpoint({**checkpoint, "pause": Pause()}, path)
        _page.saved_by = _start()
        note("in a step")  # the rest of it


class Pause:
    def __reduce__(self) -> tuple[Any, tuple[()]]:
        time.sleep(_PAUSE_S)
        return OrderedDict, ()  # which a checkpoint may hold


class Killer:
    """Sends SIGKILL to a random rank at a random moment after each start has saved a checkpoint; a thread."""

    def __init__(self, kills: int, seed: int) -> None:
        self.died: list[tuple[int, str]] = []  # each rank that was killed, and what it was doing
        self.problem = ""  # why there was no further kill; nothing where all were made
        self._kills = kills
        self._chance = random.Random(seed)
        self.is_over = threading.Event()
        self.thread = threading.Thread(target=self._run, name="killer", daemon=True)

    def begun_at(self) -> list[int]:
        return list(_page.begun_at[1 : self._kills + 2])

    def _run(self) -> None:
        try:
            for start in range(1, self._kills + 1):
                self._kill(start, self._chance.randrange(2), self._chance.uniform(0, _MOST_DELAY_S))
        except (TimeoutError, ProcessLookupError) as error:
            self.problem = f"{type(error).__name__}: {error}"

    def _kill(self, start: int, rank: int, delay_s: float) -> None:
        victim: _Rank = _page.ranks[rank]
        self._wait_until(lambda: _page.saved_by == victim.start == start, f"start {start} saves")
        handle = os.pidfd_open(victim.pid)  # another process may get the number, but not this
        try:
            self.is_over.wait(delay_s)
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            select.select([handle], [], [], _LIMIT_S)
        finally:
            os.close(handle)
        self.died.append((rank, PHASES[victim.phase]))

    def _wait_until(self, holds: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _LIMIT_S
        while not holds():
            if self.is_over.wait(0.001) or time.monotonic() > deadline:
                raise TimeoutError(f"waited in vain until {what}")


def train_slowly(strategy: Any, folder: Path, epochs: int) -> Trainer:
    """Train as the tests of resuming do, so that each phase of a step takes a few milliseconds."""
    slow: dict[str, Any] = {"kill": SlowlySaved(), "module": SlowlyTrained(), "samples": SlowlyLoaded()}
    return train(strategy, folder, seed=3, max_epochs=epochs, **slow)


@contextmanager
def killing(kills: int, seed: int) -> Iterator[Killer]:
    ctypes.memset(ctypes.addressof(_page), 0, ctypes.sizeof(_page))  # from an earlier run
    killer = Killer(kills, seed)
    killer.thread.start()
    try:
        yield killer
    finally:
        killer.is_over.set()
        killer.thread.join()
