"""What must be known as soon as rankwise is imported: the working directory, and a re-run script's seat."""

from __future__ import annotations

import os
from pathlib import Path

WORKING_DIRECTORY = str(Path.cwd())
SEAT_VARIABLE = "RANKWISE_SEAT"

if SEAT_VARIABLE in os.environ:
    from rankwise.launchers import _inherited

    _inherited.take_seat(os.environ.pop(SEAT_VARIABLE))
