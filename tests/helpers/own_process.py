"""What a test changes in its own process for a block, and waits for there."""

import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

Handler = Callable[[int, FrameType | None], object] | signal.Handlers


@contextmanager
def signal_handled(number: int, handler: Handler) -> Iterator[None]:
    """Handle a signal in the block; restore the handler of before."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@contextmanager
def few_files(count: int) -> Iterator[list[int]]:
    """Let this process open only so many more files in the block; provide the numbers that were free."""
    free = [number for number in range(2000) if not Path(f"/proc/self/fd/{number}").exists()]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[count], limits[1]))
    try:
        yield free
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def wait_until(condition: Callable[[], bool], limit_s: float = 60) -> None:
    """Wait until a condition holds, as when another thread has gone on."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
