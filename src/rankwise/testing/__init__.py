"""Test code that runs on several ranks, and extensions of rankwise. Needs pytest for the marker alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.start import lazy_names

if TYPE_CHECKING:
    from rankwise.testing.checkpoints import check_checkpoint_io
    from rankwise.testing.environments import check_environment
    from rankwise.testing.faults import Fault, InjectedFault, inject_faults
    from rankwise.testing.launchers import check_launcher
    from rankwise.testing.running import run_distributed
    from rankwise.testing.strategies import check_strategy

_HOMES = {
    "rankwise.testing.checkpoints": "check_checkpoint_io",
    "rankwise.testing.environments": "check_environment",
    "rankwise.testing.faults": "Fault InjectedFault inject_faults",
    "rankwise.testing.launchers": "check_launcher",
    "rankwise.testing.running": "run_distributed",
    "rankwise.testing.strategies": "check_strategy",
}

__all__ = [
    "Fault",
    "InjectedFault",
    "check_checkpoint_io",
    "check_environment",
    "check_launcher",
    "check_strategy",
    "inject_faults",
    "run_distributed",
]

if not TYPE_CHECKING:
    __getattr__ = lazy_names(__name__, _HOMES)
