"""Ranks that a function of the user starts by a command: on other hosts, in containers, in a queue."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.start import lazy_names

if TYPE_CHECKING:
    from rankwise.launchers.commands.launcher import CommandLauncher
    from rankwise.launchers.commands.process import CommandProcess

_HOMES = {
    "rankwise.launchers.commands.launcher": "CommandLauncher",
    "rankwise.launchers.commands.process": "CommandProcess",
}

__all__ = ["CommandLauncher", "CommandProcess"]


if not TYPE_CHECKING:
    __getattr__ = lazy_names(__name__, _HOMES)
