"""Run a script again, and the place of this process among those that run one together (strategy "ddp")."""

from __future__ import annotations

import multiprocessing.process
import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from rankwise import start
from rankwise.errors import LaunchRefusedError
from rankwise.launchers.channel import RankChannel
from rankwise.launchers.context import RankRun, WorkerContext
from rankwise.ranks import RankInfo


class RunningScript(ABC):
    """A script that several processes run, in one of them: the main process, or one that was run again."""

    ranks: RankInfo  # this process's
    pid: int  # this process's; one that it forks is not the rank
    address: tuple[str, int] | None  # of the store; None where it is private
    channel: RankChannel  # to the supervisor
    jobs: int  # how many this process has begun

    @abstractmethod
    def running(self, timeout_s: float | None) -> AbstractContextManager[RankRun]:
        """Run one job, as this process's rank in the block; `timeout_s` is for a main process that hangs."""

    def context_between_jobs(self) -> WorkerContext | None:
        """Return the context of this rank between two jobs; None before the first, and in a fork."""
        if self.pid != os.getpid() or not self.jobs:
            return None
        return WorkerContext(self.ranks, address=self.address, channel=self.channel, job=0)


running: RunningScript | None = None
"""The script that this process runs with others; None where it runs alone. Set by the launcher."""

_launches = 0


def script_place() -> RankInfo | None:
    """Return the ranks with which this process already runs its script, or None where it runs alone."""
    return None if running is None else running.ranks


def can_rerun() -> bool:
    """Whether running this process's command again leads to the launch that comes next."""
    if running is not None:
        return True
    try:
        rerun_command()
    except LaunchRefusedError:
        return False
    return not _launches


def count_launch() -> int:
    """Count one more launch of this process; return how many were begun before, failed ones included."""
    global _launches
    _launches += 1
    return _launches - 1


_WITHOUT_FILE = ("in a notebook", "in an interactive shell", "with a script that came through stdin")
_NOTEBOOK, _SHELL, _STDIN = _WITHOUT_FILE
_RUNNING_FLAG = re.compile(r"-(?!-)[^WXmc]*([mc])")  # -m or -c, also at the end of a cluster such as -Om


def rerun_command() -> tuple[list[str], str]:
    """Return the command and the directory that this process was started with, or raise `LaunchRefusedError`.

    Interpreter flags, `-m`, `-c` and a changed `sys.argv` survive: `sys.orig_argv` is the true command line.
    """
    if (problem := _problem(sys.orig_argv)) is not None:
        # A spawned process cannot import what a notebook, a shell or stdin defines.
        name = "ddp_notebook" if problem in _WITHOUT_FILE else "ddp_spawn"
        raise LaunchRefusedError(
            message=f'strategy="ddp" runs the script again for each rank, which cannot work {problem}.',
            facts=f"the command line is {sys.orig_argv!r}.",
            remedy=f'use strategy="{name}".',
        )
    return [sys.executable, *sys.orig_argv[1:]], _original_directory(sys.orig_argv)


def _problem(command: Sequence[str]) -> str | None:
    if "ipykernel" in sys.modules and "IPython" in sys.modules and _in_kernel():
        return _NOTEBOOK
    if "ps1" in sys.__dict__ or sys.flags.interactive:
        return _SHELL
    # A script that a test starts has the variable, but not the module.
    if "PYTEST_CURRENT_TEST" in os.environ and "_pytest" in sys.modules:
        return "inside pytest"
    if multiprocessing.process.parent_process() is not None:
        return "in a process that multiprocessing started"
    if not sys.executable:
        return "where there is no Python executable"
    if _script(command) is None:
        return _STDIN
    if not os.path.isdir(_original_directory(command)):  # noqa: PTH112  "" is none, and Path("") is one
        return "where the folder that it was started in has been removed"
    return None


def _in_kernel() -> bool:
    try:
        from IPython import get_ipython  # type: ignore[import-not-found,unused-ignore]  # optional
    except ImportError:  # another module of this name, or one that is still being imported
        return False
    return get_ipython() is not None


def _script(command: Sequence[str]) -> str | None:
    """Return the argument that says what the interpreter runs: a path, `-m` or `-c`; None for stdin."""
    words = iter(command[1:])
    for word in words:
        if word in ("-W", "-X", "--check-hash-based-pycs"):
            next(words, None)
        elif word == "-" or not word.startswith("-"):
            return None if word == "-" else word
        elif flag := _RUNNING_FLAG.match(word):
            return f"-{flag[1]}"
    return None


def _original_directory(command: Sequence[str]) -> str:
    """Return the directory in which the process was started: the script's full path less the given one."""
    script = _script(command) or ""
    full = getattr(sys.modules["__main__"], "__file__", None)
    if script.startswith("-") or full is None or Path(script).is_absolute() or not Path(full).is_absolute():
        return start.WORKING_DIRECTORY
    parts, given = Path(full).parts, Path(os.path.normpath(script)).parts
    if ".." in given or parts[-len(given) :] != given:
        return start.WORKING_DIRECTORY
    return str(Path(*parts[: -len(given)]))
