"""Launchers: start processes, watch them, end them.

A launcher hands each rank a `Seat`; a strategy takes it and does the rest. The two classes are all that one
knows of the other.
"""

from rankwise.launchers.base import Launcher
from rankwise.launchers.seat import MeetingPoint, Seat

__all__ = ["Launcher", "MeetingPoint", "Seat"]
