"""What a re-run script can tell of the main process, which started it and must not be waited for in vain."""

from __future__ import annotations

import os
import time

from rankwise.errors import RendezvousTimeoutError
from rankwise.launchers._channel import RankChannel
from rankwise.launchers._processes import is_suspended

_LOOKS = 8


def wait_until_over(channel: RankChannel, timeout_s: float | None) -> None:
    """Wait until the job is over on every rank.

    The main process may take its time, but not suspended: nothing else could end this wait then.

    Raises:
        RendezvousTimeoutError: when it was found suspended for longer than `timeout_s`.
    """
    suspended_at_s: float | None = None
    while not channel.is_over_within(None if timeout_s is None else timeout_s / _LOOKS):
        now_s = time.monotonic()
        if timeout_s is None or not is_suspended(os.getppid()):
            suspended_at_s = None
        elif suspended_at_s is None:
            suspended_at_s = now_s
        elif now_s - suspended_at_s > timeout_s:
            raise RendezvousTimeoutError("the main process, which is suspended", timeout_s)
