"""Where and when a rank's work failed, kept on the exception: what the rank does after that hides it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from typing_extensions import final

from rankwise.process_group.pulse import Pulse, own_pulse

__all__ = ["Moment", "moment_of"]

_MARK = "_rankwise_moment"


@final
@dataclass(frozen=True)
class Moment:
    """When it was, on the node's monotonic clock, and the pulse of then; None where nobody reads it."""

    at_s: float
    pulse: Pulse | None


def moment_of(error: BaseException) -> Moment:
    """Return the moment at which an exception ended this rank's work: when this was first called with it."""
    moment: Moment | None = vars(error).get(_MARK)
    if moment is None:
        moment = vars(error)[_MARK] = Moment(time.monotonic(), own_pulse())
    return moment
