"""The tests' side of a module of cases: ask its program for cases, and read how they end."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from tests.helpers import processes
from tests.helpers.load import slowdown
from tests.helpers.scripts import RunningScript, ScriptResult, ScriptRunner
from tests.process.helpers import with_tests

_LEFTOVER_GRACE_S = 4.0


class CaseRunner:
    """Runs cases of a module, each in a fork of one program that has imported torch; see `case_server`.

    The program starts with the first case. Where one does not end as it should, the next has a new program.
    """

    def __init__(self, module: Path, folder: Path) -> None:
        self._module = module
        self._folder = folder
        self._runner = ScriptRunner(folder)
        self._program: RunningScript | None = None
        self._pipe = -1
        self._lines = 0

    def __call__(self, *command: str, env: Mapping[str, str] | None = None) -> ScriptResult:
        """Run a case, given by its name and arguments, with variables added."""
        return self._run(command, [env or {}])[0]

    def on_each(self, name: str, variables: Sequence[Mapping[str, str]]) -> list[ScriptResult]:
        """Run a case in several processes at once, each with variables of its own."""
        return self._run([name], variables)

    def _run(self, command: Sequence[str], variables: Sequence[Mapping[str, str]]) -> list[ScriptResult]:
        """Send a line, and wait until all its processes have ended.

        Raises:
            AssertionError: when they take too long, or leave a process behind.
        """
        program = self._program or self._start()
        self._lines += 1
        outputs = [self._folder / f"{program.pid}-{self._lines}-{number}" for number in range(len(variables))]
        began = time.monotonic()
        cases = [
            {"command": command, "variables": each, "output": str(output)}
            for each, output in zip(variables, outputs, strict=True)
        ]
        os.write(self._pipe, f"{json.dumps(cases)}\n".encode())
        try:
            program.wait_for("\n", count=self._lines, timeout=90)
            self._check_for_leftovers(program)
        except BaseException:
            self.close()
            raise
        codes = json.loads(program.stdout.splitlines()[-1])
        elapsed = time.monotonic() - began
        return [
            ScriptResult(tuple(command), code, _read(output, "stdout"), _read(output, "stderr"), elapsed)
            for output, code in zip(outputs, codes, strict=True)
        ]

    def close(self) -> None:
        """End the program."""
        if self._program is not None:
            processes.shared_pids.discard(self._program.pid)
            self._program.kill()
            os.close(self._pipe)
        self._program = None

    def _start(self) -> RunningScript:
        pipe = self._folder / "cases"
        pipe.unlink(missing_ok=True)
        os.mkfifo(pipe)
        self._pipe = os.open(pipe, os.O_RDWR)  # to open it for writing alone waits for the program
        self._program = self._runner.start(self._module, "--serve", str(pipe), env=with_tests())
        self._lines = 0
        processes.shared_pids.add(self._program.pid)
        return self._program

    def _check_for_leftovers(self, program: RunningScript) -> None:
        def find() -> list[psutil.Process]:
            return [process for process in program.processes() if process.pid != program.pid]

        if left := processes.wait_until_gone(find, _LEFTOVER_GRACE_S * slowdown()):
            shown = "\n".join(f"  {processes.describe(process)}" for process in left)
            raise AssertionError(f"The case left {len(left)} processes behind:\n{shown}")


def runner_of(module: ModuleType) -> Any:
    """Make the fixture `cases` of a module of cases."""

    @pytest.fixture(scope="module")
    def cases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CaseRunner]:
        runner = CaseRunner(Path(str(module.__file__)), tmp_path_factory.mktemp("cases"))
        yield runner
        runner.close()

    return cases


def _read(output: Path, stream: str) -> str:
    return output.with_suffix(f".{stream}").read_text(errors="replace")
