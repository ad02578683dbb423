"""One job: who fails, how and when, and the folder for the results of its processes."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import OrderedDict
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

VARIABLE = "FAULTS_JOB"
TIMEOUT_S = 6.0  # of a collective, in jobs that hang; the rendezvous has twice that
LONG_S = 120.0
MAIN_HANGS_S = 8.0  # a main process that is no rank: its ranks do not wait for it
MESSAGE = "the fault of this benchmark"
SCRIPTED = ("rankwise ddp", "Lightning ddp")  # the process that the user starts is rank 0
_FIRST = "before the group"

lonely: list[Any] = []
"""A group of all ranks in which only the rank that hangs calls anything."""


@dataclass(frozen=True)
class Job:
    """One cell of one contender."""

    contender: str
    who: str
    how: str
    when: str
    folder: str

    @classmethod
    def of_environment(cls) -> Job:
        """Return the job that this process belongs to."""
        return cls(**json.loads(os.environ[VARIABLE]))

    def variables(self) -> dict[str, str]:
        """Return the environment variables of its processes."""
        return {VARIABLE: json.dumps(asdict(self)), "TMPDIR": str(Path(self.folder, "tmp"))}

    @property
    def rank(self) -> int | None:
        """The rank that fails; None for a main process that is no rank."""
        return None if self.who == "main" else int(self.who[-1])

    @property
    def hits_main(self) -> bool:
        """Whether the process that the user started is the one that fails."""
        return self.who == "main" or (self.contender in SCRIPTED and self.rank == 0)

    @property
    def hangs(self) -> bool:
        """Whether it needs a timeout to end."""
        return self.how == "SIGSTOP" or self.how.startswith("hangs")

    @property
    def timeout(self) -> timedelta:
        """Limit of a collective."""
        return timedelta(seconds=TIMEOUT_S if self.hangs and self.when != _FIRST else LONG_S)

    @property
    def init_timeout(self) -> timedelta:
        """Limit of the rendezvous."""
        return timedelta(seconds=2 * TIMEOUT_S if self.hangs and self.when == _FIRST else LONG_S)

    @property
    def only_timeout(self) -> timedelta:
        """The timeout of a contender that has only one."""
        return min(self.timeout, self.init_timeout)

    def makes_sense(self) -> bool:
        """Return whether the contender can have this fault."""
        if self.who == "main":
            is_code_of_its_own = not self.how.startswith("SIG")
            is_possible = self.how != "hangs inside a collective" and self.contender not in SCRIPTED
            return is_possible and not (is_code_of_its_own and self.contender == "torchrun")
        return not (self.when == _FIRST and self.how == "hangs inside a collective")

    def come(self, when: str, rank: int, step: int = 1) -> None:
        """Fail, if this is the time and the process of the fault."""
        if self.when != when or step != 1:
            return
        if self.rank == rank:
            time.sleep(0.3)
            self.happen()
        elif self.rank is None and rank == 0:
            Path(self.folder, "moment").touch()
            time.sleep(0.5)

    def happen(self) -> None:
        """Record the time, then fail."""
        self.note()
        if self.how == "raises":
            raise ValueError(MESSAGE)
        if self.how == "exits 0":
            sys.exit(0)
        if self.how == "exits 3":
            os._exit(3)
        if self.how == "hangs outside a collective":
            time.sleep(LONG_S if self.rank is not None else MAIN_HANGS_S)
            return
        if self.how == "hangs inside a collective":
            import torch
            import torch.distributed as dist

            dist.all_reduce(torch.ones(1), group=lonely[0])
        os.kill(os.getpid(), signal.Signals[self.how])

    def note(self) -> None:
        """Record the time of the fault."""
        Path(self.folder, "stamp.new").write_text(repr(time.monotonic()))
        Path(self.folder, "stamp.new").rename(Path(self.folder, "stamp"))

    @property
    def checkpoint(self) -> Path:
        """The path of the checkpoint."""
        return Path(self.folder, "saved", "last.ckpt")


@dataclass
class Trap:
    """Triggers the fault of rank 0 while a checkpoint is pickled."""

    job: Job
    step: int

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        self.job.come("while saving", 0, self.step)
        return OrderedDict, ()  # a type that checkpoints allow
