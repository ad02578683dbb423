"""What must be noted as soon as rankwise is imported, before the script can change it."""

from __future__ import annotations

from pathlib import Path

WORKING_DIRECTORY = str(Path.cwd())

# Set by the main process of strategy "ddp" for the scripts that it runs again.
SEAT_VARIABLE = "RANKWISE_SEAT"
