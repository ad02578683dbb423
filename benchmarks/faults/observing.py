"""Run a job of a contender with a fault, and observe how it ends.

The faults are those of `tests/process/fault_table.py` that a contender can have: which process fails, how,
and when, in a fit of three steps on two ranks that saves after each. Processes that a contender leaves
running are killed afterwards. Needs psutil.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.faults.job import LONG_S, Job
from benchmarks.programs import variables
from benchmarks.results import is_installed
from tests.helpers import processes

CONTENDERS = ("rankwise ddp", "Lightning ddp", "torchrun", "rankwise ddp_spawn", "torch spawn")
NAMED = (  # patterns for the failed rank in a text: the first match counts
    r"waited too long for global_rank=(\d)",
    r"Worker global_rank=(\d)",
    r"Root Cause[^$]*?rank\s*: (\d)",
    r"\[rank: (\d)\] Child process",
    r"Process (\d) terminated",
    r"^\[rank(\d)\]:",
)


@dataclass(frozen=True)
class Seen:
    """The result of a job; `gone_after_s` is None if a process still ran at the limit."""

    gone_after_s: float | None
    exit_code: int | None
    exception: str
    names_rank: bool
    left: tuple[str, ...]

    def __str__(self) -> str:
        time_taken = "**still there**" if self.gone_after_s is None else f"{self.gone_after_s:.1f} s"
        return f"{time_taken}, {self.manner}"

    @property
    def manner(self) -> str:
        """How it ended: the exit code, the exception, whether the rank is named, what was left."""
        code = "killed by us" if self.exit_code is None else f"exit {self.exit_code}"
        named = "named" if self.names_rank else ""
        return ", ".join(filter(None, [code, self.exception, named, *self.left]))


def observe(job: Job, most_s: float) -> Seen | None:
    """Run a job; return None if the contender cannot have its fault, or did not reach it."""
    if not job.makes_sense():
        return None
    for name in ("tmp", "saved"):
        Path(job.folder, name).mkdir(parents=True)
    marker = f"faults-{job.folder}"
    environment = variables(**job.variables(), **{processes.MARKER: marker})
    with Path(job.folder, "output").open("wb") as output:
        main = subprocess.Popen(
            command(job), env=environment, stdout=output, stderr=output, start_new_session=True
        )

    def living() -> list[Any]:
        mine = processes.with_marker(marker) | processes.in_session(main.pid)
        return [each for each in mine if not processes.is_gone(each) and each.pid != main.pid]

    try:
        gone_after_s, has_come = watch(job, main, living, most_s)
        left = living()
        exit_code = main.poll()
    finally:
        processes.kill(living())
        main.kill()
        main.wait()
    return seen(job, gone_after_s, exit_code, len(left)) if has_come else None


def command(job: Job) -> list[str]:
    """Return the command that starts a job."""
    if not job.contender.startswith("torch"):
        return [sys.executable, "-m", "benchmarks.faults.trainers"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    options = torchrun if job.contender == "torchrun" else []
    return [sys.executable, *options, "-m", "benchmarks.faults.by_hand"]


def watch(
    job: Job, main: subprocess.Popen[bytes], living: Callable[[], list[Any]], most_s: float
) -> tuple[float | None, bool]:
    """Wait until all processes are gone, or for `most_s` after the fault; return if it happened."""
    stamp, moment = Path(job.folder, "stamp"), Path(job.folder, "moment")
    began = time.monotonic()
    is_suspended = job.how == "SIGSTOP" and job.hits_main
    has_struck = False
    while True:
        time.sleep(0.05)
        if moment.exists() and not has_struck:
            has_struck = True
            strike(job, main)
        came_at = float(stamp.read_text()) if stamp.exists() else None
        if (
            is_suspended
            and came_at is not None
            and all(processes.is_service(each, main.pid) for each in living())
        ):
            is_suspended = False
            main.send_signal(signal.SIGCONT)
        if main.poll() is not None and not living():
            return time.monotonic() - (came_at or began), came_at is not None
        if time.monotonic() > (began + LONG_S if came_at is None else came_at + most_s):
            return None, came_at is not None


def strike(job: Job, main: subprocess.Popen[bytes]) -> None:
    """Inject the fault into a main process that is no rank."""
    if job.how.startswith("SIG"):
        job.note()
        main.send_signal(signal.Signals[job.how])
    else:
        main.send_signal(signal.SIGALRM)  # its handler is the fault


def seen(job: Job, gone_after_s: float | None, exit_code: int | None, processes_left: int) -> Seen:
    """Return the result of a job from its files and output."""
    folder = Path(job.folder)
    text = (folder / "output").read_text(errors="replace")
    caught = (folder / "caught").read_text() if (folder / "caught").exists() else ""
    found = next((match[1] for name in NAMED if (match := re.search(name, text, re.MULTILINE))), None)
    files = [path for path in job.checkpoint.parent.iterdir() if path != job.checkpoint]
    files += [path for path in (folder / "tmp").iterdir() if not path.name.startswith("torchinductor")]
    left = (counted(processes_left, "process", "processes"), counted(len(files), "file", "files"))
    names_rank = job.rank is not None and found == str(job.rank)
    return Seen(gone_after_s, exit_code, caught, names_rank, tuple(filter(None, left)))


def counted(number: int, one: str, many: str) -> str:
    """Return how many are left, in words, or nothing."""
    return "" if not number else f"{number} {one if number == 1 else many} left"


def taking_part(asked: Iterable[str] = CONTENDERS) -> list[str]:
    """Return the requested contenders that are installed."""
    return [
        name
        for name in CONTENDERS
        if name in asked and ("Lightning" not in name or is_installed("lightning"))
    ]
