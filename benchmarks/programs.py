"""Run programs of benchmarks in fresh processes, which write files in a folder."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
LIMIT_S = 300.0
_LAST_LINES = 6


class ProgramError(Exception):
    """A program failed, or did not end in time; with the last lines of its output."""


def variables(**more: str) -> dict[str, str]:
    """Return the environment of a program: one thread per process, as launchers set it, and no coverage."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    paths = [str(REPOSITORY), *filter(None, [kept.get("PYTHONPATH")])]
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), **more}


def torchrun_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return the variables by which a rank that was started by hand finds the others."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@contextmanager
def running(
    arguments: list[str], folder: Path, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a program in a session of its own, with its output in a file; end all of it afterwards."""
    with Path(folder, f"output-{time.monotonic_ns()}").open("wb") as output:
        program = subprocess.Popen(
            arguments,
            env={**environment, "TMPDIR": str(folder)},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield program
    finally:
        with suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        program.wait()


def wait(program: subprocess.Popen[bytes], folder: Path, is_done: Callable[[], bool] = lambda: False) -> None:
    """Wait until a program has ended with 0, or `is_done`.

    Raises:
        ProgramError: when it has failed, or takes longer than `LIMIT_S`.
    """
    deadline = time.monotonic() + LIMIT_S
    while not is_done():
        try:
            code = program.wait(0.005)
        except subprocess.TimeoutExpired:
            if time.monotonic() < deadline:
                continue
            raise ProgramError(f"did not end in {LIMIT_S:.0f} s; {_last_lines(folder)}") from None
        if code:
            raise ProgramError(f"exit code {code}; {_last_lines(folder)}")
        return


def _last_lines(folder: Path) -> str:
    """Return how the output of each process ends."""
    texts = [path.read_text(errors="replace").strip() for path in sorted(folder.glob("output-*"))]
    return "\n".join(line for text in texts for line in text.splitlines()[-_LAST_LINES:])


def run_ranks(module: str, request: Mapping[str, Any], ranks: int = 1) -> Any:
    """Run a program once per rank; return what rank 0 has written as JSON to the file `result`.

    The request gets the folder, and a port for a group of the program's own beside torchrun's.

    Raises:
        ProgramError: when one failed.
    """
    with tempfile.TemporaryDirectory() as name, ExitStack() as started:
        folder, port = Path(name), free_port()
        request = {**request, "folder": name, "port": free_port()}
        command = [sys.executable, "-m", module, json.dumps(request)]
        places = [torchrun_variables(rank, ranks, port) for rank in range(ranks)] if ranks > 1 else [{}]
        programs = [started.enter_context(running(command, folder, variables(**place))) for place in places]
        for program in programs:
            wait(program, folder)
        return json.loads((folder / "result").read_text())
