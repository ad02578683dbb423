"""Test code that runs on several ranks, and extensions of rankwise. Needs pytest for the marker alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankwise.start import lazy_names

if TYPE_CHECKING:
    from rankwise.testing.contracts import check_checkpoint_io, check_environment
    from rankwise.testing.faults import Fault, InjectedFault, inject_faults
    from rankwise.testing.jobs import check_launcher, check_strategy, run_distributed

_HOMES = {
    "rankwise.testing.contracts": "check_checkpoint_io check_environment",
    "rankwise.testing.faults": "Fault InjectedFault inject_faults",
    "rankwise.testing.jobs": "check_launcher check_strategy run_distributed",
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
