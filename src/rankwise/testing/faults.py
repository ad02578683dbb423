"""`inject_faults`: let one rank fail, hang or be late at a step or phase of a job."""

from __future__ import annotations

import mmap
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

from rankwise.checks import check_choice, check_is_a, check_minimum, check_value
from rankwise.errors import ConfigurationError
from rankwise.monitoring import heartbeat

ACTIONS = ("raise", "kill", "stop", "exit", "delay")


class InjectedFault(RuntimeError):
    """The exception of a fault that raises."""


@final
@dataclass(frozen=True)
class Fault:
    """A rank's failure, once.

    Args:
        action: `"raise"` (an `InjectedFault`), `"kill"` (SIGKILL), `"stop"` (SIGSTOP: the rank hangs),
            `"exit"` (`os._exit(3)`) or `"delay"`.
        rank: its global rank.
        step: the optimizer step, from 0 on, at or after which it happens.
        phase: the phase in which it begins: `"connecting"`, `"running"`, `"data loading"`, `"forward"`,
            `"backward"`, `"optimizer"`, `"checkpoint"`, `"teardown"`, or the name of a collective of the
            strategy, such as `"all_reduce"`. A Trainer reports steps; without one it is step 0 until the
            first optimizer step has begun.
        delay_s: how long a delay takes.

    Raises:
        InvalidArgumentError, InvalidTypeError: for impossible values.
    """

    action: str
    rank: int
    step: int | None = None
    phase: str | None = None
    delay_s: float = 1.0

    def __post_init__(self) -> None:
        """Check the values."""
        check_choice("action", self.action, ACTIONS)
        check_is_a("rank", self.rank, int)
        check_minimum("rank", self.rank, 0)
        is_given = self.step is not None or self.phase is not None
        check_value("step", self.step, is_given, "a step, or a phase, or both")

    def happen(self) -> None:
        """Let this process fail now, whatever its rank."""
        if self.action == "raise":
            raise InjectedFault(f"injected by {self}")
        if self.action == "delay":
            time.sleep(self.delay_s)
        elif self.action == "exit":
            os._exit(3)
        else:
            os.kill(os.getpid(), signal.SIGKILL if self.action == "kill" else signal.SIGSTOP)


@final
@dataclass(eq=False)
class FaultInjection:
    """The faults of a block, in memory that ranks share if they are forks: a time for each, 0 for not yet."""

    faults: Sequence[Fault]

    def __post_init__(self) -> None:
        """Make the shared memory."""
        self._times = memoryview(mmap.mmap(-1, max(1, len(self.faults)) * 8)).cast("d")
        self._optimizer_steps = 0

    def happened_s(self, fault: Fault) -> float | None:
        """Return when a fault happened, on the node's monotonic clock; None if it did not."""
        return self._times[self.faults.index(fault)] or None

    def on_phase(self, step: int, phase: str) -> None:
        """Let the faults happen that are due on this rank."""
        at = step if step >= 0 else self._optimizer_steps  # only a Trainer reports steps
        self._optimizer_steps += phase == heartbeat.OPTIMIZER
        for number, fault in enumerate(self.faults):
            is_due = fault.phase in (None, phase) and at >= (fault.step or 0)
            if is_due and os.environ.get("RANK") == str(fault.rank) and self.happened_s(fault) is None:
                self._times[number] = time.monotonic()
                fault.happen()


@contextmanager
def inject_faults(*faults: Fault) -> Iterator[FaultInjection]:
    """Let faults happen in jobs of the block: in this process if it is a rank, and in ranks that it forks.

    With another start method than `"fork"`, use it in the function that runs on each rank; a fault of another
    rank is none there.

    Raises:
        ConfigurationError: at the end of a block that has raised nothing, for a fault that has not happened.
        InvalidTypeError: for anything that is not a `Fault`.
    """
    for fault in faults:
        check_is_a("faults", fault, Fault)
    injection = FaultInjection(faults)
    before, heartbeat.on_phase = heartbeat.on_phase, injection.on_phase
    try:
        yield injection
    finally:
        heartbeat.on_phase = before
    own = os.environ.get("RANK")
    expected = [fault for fault in faults if own is None or own == str(fault.rank)]
    for fault in expected:
        if injection.happened_s(fault) is None:
            raise ConfigurationError(
                message=f"{fault} has not happened: no rank of this process's jobs came there.",
                remedy="compare rank, step and phase with the job; where the ranks are no forks of this "
                "process, call inject_faults() in the function that runs on each rank.",
            )
