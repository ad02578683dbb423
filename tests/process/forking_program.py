"""Fork a process for each program; `forked_programs.py` runs this file.

It imports the modules in its arguments, and reads groups of programs from stdin, as JSON. It prints how each
ended: its exit code, negative for a signal, and what it has printed to stdout and stderr.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def fork_all(groups: Sequence[Sequence[Mapping[str, Any]]]) -> str | None:
    """Fork for every program; return, in the forked process, the path of its program, and None at the end."""
    ended: list[tuple[int, str, str]] = []
    for group in groups:
        outputs: dict[int, str] = {}
        for program in group:
            output = f"{program['path']}.{len(ended) + len(outputs)}"
            if (pid := os.fork()) == 0:
                begin(program, output)
                return str(program["path"])
            outputs[pid] = output
        ended += [wait(pid, output) for pid, output in outputs.items()]
    print(json.dumps(ended))
    return None


def wait(pid: int, output: str) -> tuple[int, str, str]:
    """Wait for the end of a program; return its exit code and what it has printed."""
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code, Path(f"{output}.stdout").read_text(), Path(f"{output}.stderr").read_text()


def begin(program: Mapping[str, Any], output: str) -> None:
    """Give this process the session, folder, streams, variables and arguments of a program."""
    path = str(program["path"])
    os.setsid()
    os.chdir(Path(path).parent)
    for number, stream in enumerate(("stdout", "stderr"), 1):
        opened = os.open(f"{output}.{stream}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.update(program["variables"])
    sys.argv[:] = [path, *program["args"]]
    sys.orig_argv[:] = [sys.executable, *sys.argv]
    sys.path[0] = str(Path(path).parent)


if __name__ == "__main__":
    sys.modules["mpi4py.MPI"] = None  # type: ignore[assignment]  # Lightning imports it, which starts MPI
    for module in sys.argv[1:]:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # else each program searches all of this for garbage when it ends
    if (found := fork_all(json.load(sys.stdin))) is not None:
        runpy.run_path(found, run_name="__main__")
