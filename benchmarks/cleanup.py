"""End what the benchmarks have started when they end themselves, in whatever way: also if they are killed.

A process of its own waits until this one has ended, which closes a pipe between them. Then it kills what
still runs and removes the temporary files. It knows the programs by a variable in their environment, which
every process that they start inherits.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

MARKER = "RANKWISE_BENCHMARKS"
_LIMIT_S, _PAUSE_S = 10.0, 0.02

_cleaners: list[subprocess.Popen[bytes]] = []


def end_programs_with_this_process() -> None:
    """Start the process that ends all programs which are started from now on.

    Mutates: this process's folder for temporary files, and the environment that it gives to programs.
    """
    folder = tempfile.mkdtemp(prefix="benchmarks-")
    command = [sys.executable, "-I", "-S", __file__, folder]
    _cleaners.append(subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True))
    os.environ[MARKER] = tempfile.tempdir = folder


def marked_processes(value: str) -> Iterator[int]:
    """Return the processes that were started with a value of the marker."""
    variable = os.fsencode(f"{MARKER}={value}")
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if variable in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)


def main() -> None:
    """Run as the process that waits."""
    folder = sys.argv[1]
    sys.stdin.buffer.read()
    deadline = time.monotonic() + _LIMIT_S
    while (running := list(marked_processes(folder))) and time.monotonic() < deadline:
        for pid in running:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_PAUSE_S)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
