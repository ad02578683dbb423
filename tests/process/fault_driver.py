"""Run jobs of the table of failures, each in a fork of a process that has imported torch.

As a program it reads jobs from stdin, one after the other. For each it forks a process in a session of its
own, which runs the job and ends as a script does, and prints that process's id and later its exit code.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from pathlib import Path

from tests.helpers import processes
from tests.process.fault_tasks import fit, from_json, marker_of, run_as_main


def serve() -> str | None:
    """Fork for every line; return, in the forked process, its line, and None at the end."""
    gc.collect()
    gc.freeze()  # else each job searches all of this for garbage when it ends
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            detach(Path(from_json(line)[0].folder))
            return line
        print_number(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    return None


def print_number(number: int) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


def detach(folder: Path) -> None:
    """Give this process a session, streams, folders and a marker of its own."""
    os.setsid()
    print_number(os.getpid())
    null = os.open(os.devnull, os.O_RDONLY)
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor, number in ((null, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, number)
    os.close(null)
    os.close(output)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  the driver's own has read ahead
    for name in ("tmp", "here", "saved"):
        (folder / name).mkdir()
    os.chdir(folder / "here")
    os.environ["TMPDIR"] = str(folder / "tmp")
    os.environ[processes.MARKER] = marker_of(folder)
    tempfile.tempdir = None


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        fit(*from_json(sys.argv[2]))
    elif (job := serve()) is not None:
        run_as_main(*from_json(job))
