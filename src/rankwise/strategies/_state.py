"""The states of a strategy's life."""

from __future__ import annotations

from enum import Enum


class State(Enum):
    """What a strategy is; the values are the words of its error messages."""

    CONFIGURED = "configured"
    BOUND = "bound"
    IN_JOB = "in a job"
