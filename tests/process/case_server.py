"""What makes a module of cases a program: it runs one case, or each case of a test in a fork of its own.

`python MODULE NAME ARGUMENT...` runs one case as a script does: so does the second rank of a script. With
`--serve PIPE` the program imports torch once, and forks a process for each case that it reads from the pipe.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path


def main(cases: Mapping[str, Callable[..., object]]) -> None:
    """Run the case of the command line, or serve; the process then ends as that of a script."""
    command = serve(Path(sys.argv[2])) if sys.argv[1] == "--serve" else sys.argv[1:]
    if command:
        cases[command[0]](*command[1:])


def serve(pipe: Path) -> Sequence[str]:
    """Fork for each case of each line; return its command in the fork, and no command at the end.

    The cases of one line run at once. When all have ended, their exit codes are printed.
    """
    from rankwise.processes.fork_safety import import_dynamo

    import_dynamo()
    gc.collect()
    gc.freeze()  # else each case searches all of this for garbage when it ends
    with pipe.open() as lines:
        for line in lines:
            pids = []
            for case in json.loads(line):
                if (pid := os.fork()) == 0:
                    _begin(**case)
                    return sys.argv[1:]
                pids.append(pid)
            codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
            print(json.dumps(codes), flush=True)
    return ()


def _begin(command: Sequence[str], variables: Mapping[str, str], output: str) -> None:
    """Give this fork the session, streams, variables and command line of a script."""
    os.setsid()
    for descriptor, path in enumerate((os.devnull, f"{output}.stdout", f"{output}.stderr")):
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.environ.update(variables)
    sys.argv[1:] = command
    sys.orig_argv[-2:] = command
