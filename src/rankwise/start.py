"""Record the working directory at `import rankwise`, before the script can change it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

try:
    WORKING_DIRECTORY = os.getcwd()  # noqa: PTH109 -- pathlib takes longer to import
except OSError:
    WORKING_DIRECTORY = ""  # it has been removed

# Set by the main process of strategy "ddp" for the scripts that it runs again.
CONTEXT_VARIABLE = "RANKWISE_WORKER"

# Set in such a script: returns the random state of the main process when it imported `rankwise.seed`.
main_random_state: Callable[[], Any] | None = None
