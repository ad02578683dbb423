"""The table of failures: who fails, how and when, under which strategy, and what has to come of it."""

import itertools
import signal
from dataclasses import dataclass

WHO = ("rank 0", "rank 1", "main")
HOW = (
    *("raises", "exits 0", "exits 3", "SIGKILL", "SIGSTOP"),
    *("hangs outside a collective", "hangs inside a collective"),
)
WHEN = ("before the group", "mid-step", "while saving", "at teardown")
STRATEGIES = ("ddp", "ddp_spawn", "ddp_fork", "ddp_forkserver")
START_METHODS = {"ddp": "popen", "ddp_spawn": "spawn", "ddp_fork": "fork", "ddp_forkserver": "forkserver"}

LIMIT_S = 2.0
"""How long after the fault the caller may not know, or a rank live, on an idle machine.

With a hang it is counted from the end of the timeout and the grace."""
EXIT_S = 2.0
"""How long main may take beyond that to leave its interpreter; on an idle machine it takes a fraction."""
OUTLIVES_S = 5.0
"""Who is still there so long after main has ended is left behind; before that it is only late."""
GRACE_S = 1.0
UNDISTURBED = ""
"""The type of the exception where there is none: the job comes to its end."""


@dataclass(frozen=True)
class Cell:
    who: str
    how: str
    when: str
    strategy: str

    def __str__(self) -> str:
        return f"{self.strategy}-{self.who}-{self.how}-{self.when}".replace(" ", "_")

    @property
    def start_method(self) -> str:
        return START_METHODS[self.strategy]

    @property
    def rank(self) -> int | None:
        """The rank that fails; None for a main process that is no rank."""
        return None if self.who == "main" else int(self.who[-1])

    @property
    def hits_main(self) -> bool:
        """Whether the process that fails is the one that the user started."""
        return self.who == "main" or (self.strategy == "ddp" and self.rank == 0)

    @property
    def ends_main(self) -> bool:
        """Whether the process that the user started ends on the spot, so that nobody is left to tell."""
        return self.hits_main and self.how in ("exits 3", "SIGKILL")

    @property
    def hangs(self) -> bool:
        """Whether only a timeout ends it."""
        return self.how == "SIGSTOP" or self.how.startswith("hangs")

    @property
    def timeout_s(self) -> float:
        """The strategy's `timeout`: far beyond the limit where nobody hangs, so that who waits is late."""
        if not self.hangs or self.when == "before the group":
            return 20.0
        return 3.0 if self.strategy == "ddp_fork" else 5.0

    @property
    def init_timeout_s(self) -> float:
        """The strategy's `init_timeout`; a rank that starts from nothing imports torch within it."""
        if not self.hangs or self.when != "before the group":
            return 60.0
        return 3.0 if self.strategy == "ddp_fork" else 12.0

    @property
    def limit_s(self) -> float:
        """How long after the fault the caller knows, and no rank is left."""
        if not self.hangs:
            return LIMIT_S
        return min(self.timeout_s, self.init_timeout_s) + GRACE_S + LIMIT_S


@dataclass(frozen=True)
class Expected:
    """What the caller sees."""

    exception: str  # the type's name; nothing where no exception can be, or none is due
    rank: int | None  # that it must name
    exit_code: int  # the script's; negative for a signal


def reason_against(cell: Cell) -> str:
    if cell.who == "main" and cell.strategy == "ddp":
        return "under ddp the main process is rank 0: the line of rank 0 says it"
    if cell.who == "main" and cell.how == "hangs inside a collective":
        return "this main process is no rank and takes part in no collective"
    if cell.when == "before the group" and cell.how == "hangs inside a collective":
        return "there is no collective before there is a group; waiting to meet is what the other rank does"
    return ""


ALL = [Cell(*cell, strategy) for strategy in STRATEGIES for cell in itertools.product(WHO, HOW, WHEN)]
LEFT_OUT = {cell: reason for cell in ALL if (reason := reason_against(cell))}
CELLS = [cell for cell in ALL if cell not in LEFT_OUT]


def expected(cell: Cell) -> Expected:
    """Return what must come of a cell: the one place that says it."""
    if cell.ends_main:
        return Expected(UNDISTURBED, None, 3 if cell.how == "exits 3" else -signal.SIGKILL)
    if cell.who == "main":
        return _of_a_mere_launcher(cell)
    if cell.how == "hangs inside a collective" and cell.when == "at teardown" and cell.strategy != "ddp":
        # The others have left, which its collective notices. Under ddp they stay for the next job.
        return Expected("WorkerRaisedError", cell.rank, 1)
    if cell.hangs:
        return Expected("WorkerTimedOutError", cell.rank, 1)
    return {
        "raises": Expected("WorkerRaisedError", cell.rank, 1),
        "exits 0": Expected("WorkerExitedError", cell.rank, 1),
        "exits 3": Expected("WorkerExitedError", cell.rank, 3),
        "SIGKILL": Expected("WorkerKilledError", cell.rank, 128 + signal.SIGKILL),
    }[cell.how]


def _of_a_mere_launcher(cell: Cell) -> Expected:
    """Return what comes of a main process that is no rank: what it raises itself is nobody else's failure.

    While it does not go on, its ranks do, and leave; it sees later how they ended. Those that still have to
    meet wait for `init_timeout`, and those that have yet to agree that training is over, for `timeout`.
    """
    if cell.how == "raises":
        return Expected("ValueError", None, 1)
    if cell.how == "exits 0":
        return Expected("SystemExit", None, 0)
    if cell.how == "SIGSTOP" and cell.when != "at teardown":
        return Expected("WorkerTimedOutError", None, 1)
    return Expected(UNDISTURBED, None, 0)
