"""Runs jobs of the table of failures, each as a script of its own, in a process that finds torch imported.

As a program it reads jobs from stdin, one after the other, and forks for each a process in a session of its
own, which ends as any script does, through the interpreter's own end; its id is printed, then its status.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from pathlib import Path

from tests.helpers import processes
from tests.process.fault_tasks import be_main, fit, from_json, marker_of


def serve() -> str | None:
    """Fork for every line; return, in the forked process, its line, and None at the end."""
    gc.collect()
    gc.freeze()  # a job is charged with its own time to end, and not with the search through all this
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            become_a_script(Path(from_json(line)[0].folder))
            return line
        say(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    return None


def say(number: int) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


def become_a_script(folder: Path) -> None:
    """Take leave of the driver: a session, streams, folders and a marker of one's own."""
    os.setsid()
    say(os.getpid())
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
        be_main(*from_json(job))
