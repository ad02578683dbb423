"""One rank fails in a known way while the other is busy in a known way; the time of the fault is recorded."""

import os
import signal
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from rankwise.errors import WorkerError, WorkerExitedError, WorkerKilledError, WorkerRaisedError
from rankwise.strategies import DDPStrategy, Strategy
from tests.helpers.load import slowdown

EXPECTED: dict[str, tuple[type[WorkerError], dict[str, int]]] = {
    "raise": (WorkerRaisedError, {}),
    "kill": (WorkerKilledError, {"signal_number": signal.SIGKILL}),
    "_exit": (WorkerExitedError, {"exit_code": 3}),
    "exit": (WorkerExitedError, {"exit_code": 0}),
}
"""The exception of each fault, and its fields."""
HOW = tuple(EXPECTED)
WHEN = ("before", "step", "sleep", "loop", "store")
MESSAGE = "the fault of this test"
LIMIT_S = 2.0
"""How long after a fault the caller may not know, on an idle machine."""
STALL_S = 5.0
"""How long a client of a TCP store may look up a name: in C, so that nothing cuts it in the main process."""
# Far beyond the limit, so that what only ends by a timeout is seen to be late, and a slow start is not.
_TIMEOUTS = {"timeout": timedelta(seconds=30), "init_timeout": timedelta(seconds=40)}
_LEAD_S = 0.1  # how long the other rank has to become busy


@dataclass(frozen=True)
class Fault:
    """Which rank fails, how, what the other one does meanwhile, and the file for the time."""

    who: int
    how: str
    when: str
    stamp: str

    def happen(self) -> NoReturn:
        Path(self.stamp).write_text(repr(time.monotonic()))
        if self.how == "raise":
            raise ValueError(MESSAGE)
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "_exit":
            os._exit(3)
        sys.exit(0)

    def seconds_ago(self) -> float:
        return time.monotonic() - float(Path(self.stamp).read_text())


class FaultyStrategy(DDPStrategy):
    fault: Fault | None = None

    def setup_environment(self) -> None:
        fault = self.fault
        if fault is not None and fault.when == "before" and fault.who == self.global_rank:
            time.sleep(_LEAD_S)
            fault.happen()
        super().setup_environment()


def strategy_with(fault: Fault, start_method: str, rendezvous: str, **arguments: object) -> FaultyStrategy:
    settings = {"accelerator": "cpu", "devices": 2, **_TIMEOUTS, **arguments}
    strategy = FaultyStrategy(start_method=start_method, rendezvous=rendezvous, **settings)  # type: ignore[arg-type]  # checked by itself
    strategy.fault = fault
    return strategy


def job(strategy: Strategy, fault: Fault) -> str:
    strategy.barrier()
    if strategy.global_rank == fault.who:
        time.sleep(_LEAD_S)
        fault.happen()
    be_busy(fault.when)
    return "finished"


def be_busy(when: str) -> None:
    end = time.monotonic() + 60
    if when == "step":
        dist.all_reduce(torch.ones(2))
    elif when == "sleep":
        time.sleep(60)
    elif when == "loop":
        while time.monotonic() < end:
            sum(range(1000))
    elif when == "computation":
        sum(range(10**12))  # in one call of C code, with the interpreter's lock
    elif when == "write":
        pipe = os.pipe()[1]
        while True:
            os.write(pipe, bytes(1 << 16))  # which nobody reads
    elif when == "store":
        dist.distributed_c10d._get_default_store().wait(["never set"], timedelta(seconds=60))


def problems(fault: Fault, error: BaseException, limit_s: float = LIMIT_S) -> list[str]:
    """Return what is wrong with how the fault reached the caller; the one place that says what is right."""
    if not Path(fault.stamp).exists():
        return [f"raised before the fault: {error!r}: {error}"]
    elapsed = fault.seconds_ago()
    found = []
    if elapsed > limit_s * slowdown():
        found.append(f"it took {elapsed:.2f} s from the fault to the exception")
    kind, fields = EXPECTED[fault.how]
    if type(error) is not kind:
        return [*found, f"it is a {type(error).__name__}: {error}"]
    for name, value in {"global_rank": fault.who, **fields}.items():
        if getattr(error, name) != value:
            found.append(f"its {name} is {getattr(error, name)!r}: {error}")
    tracebacks = str(error).count("Traceback (most recent call last)")
    if tracebacks != (1 if fault.how in ("raise", "exit") else 0):
        found.append(f"it carries {tracebacks} tracebacks: {error}")
    if error.__cause__ is not None or not (error.__context__ is None or error.__suppress_context__):
        found.append(f"it brings a second exception with it: {error.__cause__ or error.__context__!r}")
    return found
