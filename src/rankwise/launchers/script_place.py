"""The place of this process among the processes that run one script together, under strategy "ddp"."""

from __future__ import annotations

from typing import Protocol

from rankwise.processes.command_line import launch_count, rerun_command
from rankwise.ranks import RankInfo


class RunningScript(Protocol):
    """A script that several processes run, in one of them: the main process, or one that was run again.

    Attributes:
        ranks: this process's.
        pid: this process's; one that it forks is not the rank.
    """

    ranks: RankInfo
    pid: int


running: RunningScript | None = None
"""The script that this process runs with others; None where it runs alone. Set by the launcher."""


def script_place() -> RankInfo | None:
    """Return the ranks with which this process already runs its script, or None where it runs alone."""
    return None if running is None else running.ranks


def can_rerun() -> bool:
    """Whether running this process's command again leads to the launch that comes next."""
    from rankwise.errors import LaunchRefusedError

    if script_place() is not None:
        return True
    try:
        rerun_command()
    except LaunchRefusedError:
        return False
    return launch_count() == 0
