"""Start Python programs as forks of one interpreter that has imported what they need, which takes seconds."""

from __future__ import annotations

import atexit
import itertools
import json
import os
import re
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from tests.helpers import processes
from tests.helpers.leak_checks import SET_BY_IMPORTS
from tests.mutation.worker import TEST_VARIABLE

SERVER = Path(__file__).with_name("preloaded_server.py")
REPOSITORY = Path(__file__).parents[2]
TORCH = ("torch", "torch.distributed", "torch._dynamo", "lightning_utilities", "rankwise")
"""What nearly every program of the tests imports; `rankwise` as `kept_modules.py` says."""

_READ_AT_START = re.compile(
    # Python and coverage read these when an interpreter starts, the C library when a program does,
    r"PYTHON(?!PATH$)|COVERAGE_|LD_|LC_|LANG|TZ$|MALLOC_|GLIBC_|"
    # torch and its libraries of kernels when they are imported.
    r"TORCH|PYTORCH_|CUDA|OMP_|GOMP_|KMP_|MKL_|OPENBLAS_|NPY_|NUMPY_|ATEN_"
)
_RESERVED = "/" * 400  # for the program's own marker


Place = tuple[str, str]
"""A network namespace, and the host's name there; what is empty is as in this process."""
HERE: Place = ("", "")


class ForkedProgram:
    """A program that a preloaded interpreter has forked."""

    def __init__(self, interpreter: PreloadedInterpreter, number: int, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._interpreter = interpreter
        self._number = number

    def poll(self) -> int | None:
        """Return the exit code, or None while the program runs."""
        if self.returncode is None:
            self.returncode = self._interpreter.fact(self._number, "code", timeout_s=0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the program's end; `subprocess.TimeoutExpired` is raised after `timeout` seconds."""
        if self.returncode is None:
            self.returncode = self._interpreter.fact(self._number, "code", timeout_s=timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return self.returncode

    def send_signal(self, sig: int) -> None:
        """Send a signal, if the program runs."""
        if self.poll() is None:
            os.kill(self.pid, sig)


Program = subprocess.Popen[bytes] | ForkedProgram


class PreloadedInterpreter:
    """An interpreter that has imported `modules`, and forks a process for each program.

    It ends when `close` is called, and when this process has ended.
    """

    def __init__(self, modules: Sequence[str], env: Mapping[str, str]) -> None:
        self._env = {**env, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), env.get("PYTHONPATH", "")])}
        self._numbers = itertools.count(1)
        self._facts: dict[tuple[int, str], int] = {}
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 -- closed by close
        self._channel, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other, tempfile.TemporaryFile() as stdout:  # a file, as that of a program: print fills a buffer
            self._popen = subprocess.Popen(
                [sys.executable, str(SERVER), str(other.fileno()), *modules],
                env={**self._env, processes.MARKER: _RESERVED},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=self._stderr,
                pass_fds=[other.fileno()],
                start_new_session=True,
            )
        processes.shared_pids.add(self.pid)
        self._receive(None)

    @property
    def pid(self) -> int:
        """Its process's id."""
        return self._popen.pid

    @property
    def has_ended(self) -> bool:
        """Whether it cannot run programs any more."""
        return self._popen.poll() is not None

    def fits(self, env: Mapping[str, str]) -> bool:
        """Tell whether a program with these variables would find them as in an interpreter of its own.

        It would not, where they differ in what has been read when the interpreter started, or in where the
        modules come from that it has imported.
        """
        own, given = _places(self._env), _places(env)
        added = [place for place in given if place not in own]
        return (
            _read_at_start(env) == _read_at_start(self._env)
            and [place for place in given if place in own] == own
            and not any(map(_has_imported_modules, added))
        )

    def start(
        self,
        command: Sequence[str],
        *,
        cwd: Path,
        env: Mapping[str, str],
        streams: Sequence[int],
        siblings: int = 0,
        place: Place = HERE,
    ) -> ForkedProgram:
        """Run a file or module with arguments in a session of its own.

        Args:
            command: the file and its arguments; or "-m", the module and its arguments.
            cwd: the working directory.
            env: all variables.
            streams: descriptors of stdin, stdout and stderr.
            siblings: how many of the Python files that the program starts are forks, too.
            place: where the program runs.
        """
        number = next(self._numbers)
        marker = f"{processes.MARKER}={env[processes.MARKER]}"
        request = {"number": number, "command": [*map(str, command)], "cwd": str(cwd), "env": {**env}}
        request |= {"marker": marker, "siblings": siblings, "place": place}
        request["context"] = env.get(TEST_VARIABLE)
        socket.send_fds(self._channel, [json.dumps(request).encode()], list(streams))
        while (pid := self._facts.pop((number, "pid"), None)) is None:
            assert (number, "code") not in self._facts, f"{command} did not start:\n{self._printed()}"
            self._receive(None)
        return ForkedProgram(self, number, pid)

    def fact(self, number: int, name: str, timeout_s: float | None) -> int | None:
        """Return what the interpreter has answered, None if it does not within the time."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (number, name) not in self._facts:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._receive(left):
                return None
        return self._facts.pop((number, name))

    def close(self) -> None:
        """End the interpreter; its programs continue."""
        processes.shared_pids.discard(self.pid)
        self._channel.close()
        self._popen.kill()
        self._popen.wait()
        self._stderr.close()

    def _receive(self, timeout_s: float | None) -> bool:
        """Wait for an answer, and keep it; return False after the time."""
        if not select.select([self._channel], [], [], timeout_s)[0]:
            return False
        try:
            text = self._channel.recv(1 << 12)
        except ConnectionResetError:  # it has ended, and has not read all
            text = b""
        assert text, f"the preloaded interpreter has ended with {self._popen.wait()}:\n{self._printed()}"
        answer = json.loads(text)
        number = answer.pop("number")
        self._facts.update({(number, name): value for name, value in answer.items()})
        return True

    def _printed(self) -> str:
        return os.pread(self._stderr.fileno(), 1 << 16, 0).decode(errors="replace")


_interpreters: dict[tuple[str, ...], PreloadedInterpreter] = {}


def preloaded(modules: tuple[str, ...] = TORCH) -> PreloadedInterpreter:
    """Return the interpreter of this test run that has imported `modules`, started at the first call."""
    found = _interpreters.get(modules)
    if found is None or found.has_ended:
        found = _interpreters[modules] = PreloadedInterpreter(modules, os.environ)
        atexit.register(_close, found, os.getpid())
    return found


def _close(interpreter: PreloadedInterpreter, of: int) -> None:
    if os.getpid() == of:  # and not a fork of that process
        interpreter.close()


def _read_at_start(env: Mapping[str, str]) -> dict[str, str]:
    names = [name for name in env if _READ_AT_START.match(name) and name not in SET_BY_IMPORTS]
    return {name: env[name] for name in names}


def _has_imported_modules(folder: str) -> bool:
    """Tell whether a folder has a module of a name that is imported here, as everywhere in the tests."""
    imported = {name.partition(".")[0] for name in sys.modules}
    return any(path.stem in imported for path in Path(folder).glob("*"))


def _places(env: Mapping[str, str]) -> list[str]:
    """Return the folders of modules; the tests' own modules are not imported yet."""
    entries = env.get("PYTHONPATH", "").split(os.pathsep)
    return [entry for entry in entries if entry not in ("", str(REPOSITORY))]
