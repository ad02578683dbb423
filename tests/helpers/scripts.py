"""Run a Python program in a session of its own, and check that it leaves no process behind."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, TypedDict

import psutil
from typing_extensions import Unpack

from tests.helpers import processes
from tests.helpers.load import slowdown
from tests.helpers.preloaded import HERE, TORCH, Place, Program, preloaded

WITHOUT_COVERAGE: Mapping[str, str | None] = {"COVERAGE_PROCESS_START": None, "COVERAGE_PROCESS_CONFIG": None}
"""`env=` for a program whose time is measured."""


Start = Callable[..., Program]
_BLOCKED_S = 0.3
_NAMED = 'hostname "$0" && exec "$@"'


@dataclass(frozen=True)
class ScriptResult:
    """How a program ended. `returncode` is negative if a signal ended it; `elapsed` is in seconds."""

    command: tuple[str, ...]
    returncode: int
    stdout: str
    stderr: str
    elapsed: float

    def __str__(self) -> str:
        return (
            f"{' '.join(self.command)}\n"
            f"ended with {self.returncode} after {self.elapsed:.2f} s\n"
            f"--- stdout ---\n{self.stdout[-8000:]}\n--- stderr ---\n{self.stderr[-8000:]}"
        )

    __repr__ = __str__  # so that `assert text in result.stdout, result` shows all

    def check_returncode(self, expected: int = 0) -> "ScriptResult":
        """Return this result; fail, and show all, if the program ended with another code."""
        assert self.returncode == expected, self
        return self


class RunningScript:
    """A running program; `finish` waits for its end. It prints to files, which no orphan can block."""

    def __init__(
        self, command: Sequence[str], cwd: Path, env: Mapping[str, str], stdin: str | None, start: Start
    ) -> None:
        self.command = tuple(command)
        self._stdout: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 -- closed by _close
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 -- closed by _close
        self._marker = env[processes.MARKER]
        self._started = time.monotonic()
        with _input(stdin) as stdin_file:
            streams = [file.fileno() for file in (stdin_file, self._stdout, self._stderr)]
            self.popen: Program = start(self.command, cwd=cwd, env=env, streams=streams)

    @property
    def pid(self) -> int:
        """The program's process id, which is also its session's and its process group's."""
        return self.popen.pid

    @property
    def stdout(self) -> str:
        """What it has printed so far."""
        return _read(self._stdout)

    @property
    def stderr(self) -> str:
        """What it has printed to stderr so far."""
        return _read(self._stderr)

    def processes(self) -> list[psutil.Process]:
        """Return the program's living processes, itself included, lowest pid first."""
        return processes.wait_until_gone(self._find, timeout_s=0)

    def wait_for(self, text: str, *, count: int = 1, timeout: float = 60) -> None:
        """Wait until stdout holds `text` at least `count` times.

        Raises:
            AssertionError: when the program ends, or `timeout` seconds pass (more on a busy machine, see
                `slowdown`), before it does.
        """
        deadline = time.monotonic() + timeout * slowdown()
        while self.stdout.count(text) < count:
            has_ended = self.popen.poll() is not None
            if self.stdout.count(text) >= count:
                return
            if has_ended or time.monotonic() > deadline:
                problem = "ended" if has_ended else f"ran for {timeout:g} s more"
                problem += f" without printing {text!r} {count} times"
                raise AssertionError(f"The program {problem}.\n{self._end()}")
            time.sleep(0.01)

    def wait_until_blocked(self, *, timeout: float = 60) -> None:
        """Wait until the program's main thread waits for something, and goes on to for `_BLOCKED_S`.

        Raises:
            AssertionError: when the program ends, or `timeout` seconds (more on a busy machine) pass, before.
        """
        deadline = time.monotonic() + timeout * slowdown()
        began = time.monotonic()
        while time.monotonic() - began < _BLOCKED_S:
            if self.popen.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"The program did not come to wait for anything.\n{self._end()}")
            time.sleep(0.01)
            if psutil.Process(self.pid).status() != psutil.STATUS_SLEEPING:
                began = time.monotonic()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the program's first process alone."""
        self.popen.send_signal(number)

    def send_signal_to_group(self, number: signal.Signals) -> None:
        """Send a signal to the program's process group, as a terminal does on Ctrl-C."""
        os.killpg(self.pid, number)

    def finish(self, *, timeout: float = 90, leftover_grace_s: float = 4.0) -> ScriptResult:
        """Wait for the program's end, and check that its processes end `leftover_grace_s` after it.

        On a busy machine both times are longer, see `slowdown`.

        Raises:
            AssertionError: when it runs longer than `timeout` seconds, or leaves a process behind. What was
                left has been killed then.
        """
        try:
            self.popen.wait(timeout * slowdown())
        except subprocess.TimeoutExpired:
            shown = "\n".join(f"  {processes.describe(process)}" for process in self.processes())
            problem = f"ran longer than {timeout:g} s. Its processes:\n{shown}\n{self._end()}"
            raise AssertionError(f"The program {problem}") from None
        elapsed = time.monotonic() - self._started
        left = processes.wait_until_gone(self._find, leftover_grace_s * slowdown())
        shown = "\n".join(f"  {processes.describe(process)}" for process in left)
        processes.kill(left)
        result = self._result(elapsed)
        self._close()
        if left:
            raise AssertionError(f"The program left {len(left)} processes behind:\n{shown}\n{result}")
        return result

    def kill(self) -> None:
        """Kill the processes of the program that still run."""
        if not self._stdout.closed:
            self._end()

    def _find(self) -> set[psutil.Process]:
        return processes.in_session(self.pid) | processes.with_marker(self._marker)

    def _end(self) -> ScriptResult:
        processes.kill(self.processes())
        self.popen.wait(30)
        result = self._result(time.monotonic() - self._started)
        self._close()
        return result

    def _result(self, elapsed: float) -> ScriptResult:
        return ScriptResult(self.command, self.popen.wait(), self.stdout, self.stderr, elapsed)

    def _close(self) -> None:
        self._stdout.close()
        self._stderr.close()


def _is_plain(command: Sequence[str]) -> bool:
    """Tell whether a command runs a Python file with this interpreter, without flags."""
    return len(command) > 1 and command[0] == sys.executable and str(command[1]).endswith(".py")


@contextmanager
def _input(text: str | None) -> Iterator[IO[bytes]]:
    """Provide a file to read from: with the text, or empty."""
    with tempfile.TemporaryFile() if text is not None else open(os.devnull, "rb") as file:  # noqa: PTH123
        if text is not None:
            file.write(text.encode())
            file.seek(0)
        yield file


def _start_new(
    command: Sequence[str], *, cwd: Path, env: Mapping[str, str], streams: Sequence[int], place: Place
) -> Program:
    """Start a command."""
    stdin, stdout, stderr = streams
    command = inside(command, place)
    return subprocess.Popen(
        command, cwd=cwd, env=env, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True
    )


def inside(command: Sequence[str], place: Place) -> list[str]:
    """Return the command that runs `command` in a place."""
    namespace, host = place
    enter = ["ip", "netns", "exec", namespace] if namespace else []
    return [*enter, *(["unshare", "--uts", "bash", "-c", _NAMED, host] if host else []), *command]


class Options(TypedDict, total=False):
    """How a program runs.

    Attributes:
        env: variables to add to this process's; None takes one away.
        cwd: the working directory; the test's `tmp_path` by default.
        stdin: what the program can read.
        fresh: whether an interpreter of its own runs it. By default a Python file is a fork of one that has
            imported `preload`, if there are no flags, and `env` changes nothing that an interpreter or torch
            reads when it starts. That differs in `sys.modules`, `sys.meta_path`, the parent process, in what
            the garbage collector looks at and the end clears (not what was imported already), in C++'s
            functions at exit, which are not called, and in a frame below the program's own.
        preload: names of modules; there is one interpreter for each such tuple.
        siblings: how many processes to fork for the Python files and modules that the program will start by
            `subprocess`, as `strategy="ddp"` and torchrun do: importing torch anew takes seconds. The
            program itself may be a module then (`-m torch.distributed.run`). For tests whose subject is not
            how a rank starts.
        place: the network namespace that the program runs in, and the host's name there; `HERE` by default.
    """

    env: Mapping[str, str | None] | None
    cwd: Path | None
    stdin: str | None
    fresh: bool
    preload: tuple[str, ...]
    siblings: int
    place: Place


class ScriptRunner:
    """What the fixture `run_script` gives: call it to run a program, or `start` one to send it signals."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._running: list[RunningScript] = []

    def __call__(
        self,
        source_or_path: str | Path,
        *args: str,
        timeout: float = 90,
        python_args: Sequence[str] = (),
        **options: Unpack[Options],
    ) -> ScriptResult:
        """Run a program, given as source text or as a path, to its end.

        Args:
            source_or_path: source text (str, dedented, written to `script.py`) or a file (Path).
            args: the program's own arguments.
            timeout: seconds after which the program is killed and the test fails.
            python_args: the interpreter's arguments, such as `("-X", "utf8", "-O")`.
            options: see `Options`.

        Raises:
            AssertionError: when it runs too long, or leaves a process behind.
        """
        return self.start(source_or_path, *args, python_args=python_args, **options).finish(timeout=timeout)

    def start(
        self,
        source_or_path: str | Path,
        *args: str,
        python_args: Sequence[str] = (),
        **options: Unpack[Options],
    ) -> RunningScript:
        """Start a program, and return while it runs. Arguments as above."""
        path = self.write(source_or_path) if isinstance(source_or_path, str) else source_or_path
        return self.start_command([sys.executable, *python_args, str(path), *args], **options)

    def command(
        self, command: Sequence[str], *, timeout: float = 90, **options: Unpack[Options]
    ) -> ScriptResult:
        """Run any command, such as `[sys.executable, "-m", "torch.distributed.run", ...]`, to its end."""
        return self.start_command(command, **options).finish(timeout=timeout)

    def start_command(self, command: Sequence[str], **options: Unpack[Options]) -> RunningScript:
        """Start any command, and return while it runs."""
        changes = options.get("env") or {}
        variables = {name: value for name, value in os.environ.items() if name not in changes}
        variables |= {name: value for name, value in changes.items() if value is not None}
        outer = os.environ.get(processes.MARKER, str(os.getpid()))  # none is set for a module's fixture
        variables[processes.MARKER] = f"{outer}/{id(self)}/{len(self._running)}"
        preload, place = options.get("preload", TORCH), options.get("place", HERE)
        start: Start = partial(_start_new, place=place)
        siblings = options.get("siblings", 0)
        is_plain = _is_plain(command) or (siblings and [*command[:2]] == [sys.executable, "-m"])
        if not options.get("fresh") and is_plain and preloaded(preload).fits(variables):
            fork = preloaded(preload).start
            start = lambda words, **more: fork(words[1:], siblings=siblings, place=place, **more)  # noqa: E731
        cwd = options.get("cwd") or self.folder
        running = RunningScript(command, cwd, variables, options.get("stdin"), start)
        self._running.append(running)
        return running

    def write(self, source: str, name: str = "script.py") -> Path:
        """Write a program's source text, dedented, into the test's folder."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
        return path

    def kill_all(self) -> None:
        """Kill what a failed test has left running."""
        for running in self._running:
            running.kill()


# What torch 2.8 prints for each group; lines of two ranks may mix.
_OF_GLOO = re.compile(r"^\[Gloo\] Rank.*\n|^.*connected peer ranks is : \d*\n", re.MULTILINE)


def _read(file: IO[bytes]) -> str:
    # pread leaves the offset alone, which the program shares and writes at.
    text = os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")
    return _OF_GLOO.sub("", text)
