"""How busy this machine is, for tests that limit how long something may take."""

import os
from pathlib import Path

MOST = 5.0


def slowdown() -> float:
    """Return how many times longer work takes here and now than on an idle machine: 1 to `MOST`.

    It is the number of processes for each core that run or wait for one, by the load average of the last
    minute or by the count of this moment, whichever is greater. A limit that is multiplied by it is the same
    on an idle machine and stays well below the timeouts of the jobs under test on a busy one.
    """
    last_minute, *_ = os.getloadavg()
    return min(MOST, max(1.0, max(last_minute, _running_now()) / _cores()))


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _running_now() -> int:
    try:
        return int(Path("/proc/loadavg").read_text().split()[3].split("/")[0]) - 1  # this process itself
    except (OSError, ValueError, IndexError):
        return 0
