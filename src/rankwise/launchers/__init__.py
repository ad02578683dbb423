"""Launchers: start processes, watch them, end them."""

from rankwise.launchers.base import Launcher

__all__ = ["Launcher"]
