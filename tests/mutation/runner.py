"""Run chosen tests of an overlay of a project, with or without a mutant."""

import contextlib
import json
import math
import os
import queue
import shutil
import site
import subprocess
import sysconfig
import tempfile
import venv
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

import psutil

from tests.mutation import worker
from tests.mutation.mutants import Mutant
from tests.mutation.worker import Outcome, Request

T = TypeVar("T")
R = TypeVar("R")

PRELOAD = ("torch", "torch.distributed")
USUAL_LIMIT_S = 120.0
NOT_COPIED = shutil.ignore_patterns(".git", ".venv*", ".*_cache", ".hypothesis", ".coverage*", "__pycache__")
REMOVED = (
    *("PYTHONPATH", "PYTEST_CURRENT_TEST", "PYTEST_XDIST_WORKER"),
    *("COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG"),
    "PYTHONDONTWRITEBYTECODE",  # each program would compile the package again
)


def make_overlay(project: Path, folder: Path) -> tuple[Path, Path]:
    """Copy `project` into `folder`; return the copy and the Python that imports it.

    All that this Python starts with `sys.executable` imports the copy too, with any environment variables.
    It takes the other packages from the environment of this process.
    """
    copy = folder / "copy"
    shutil.copytree(project, copy, ignore=NOT_COPIED)
    venv.create(folder / "venv", symlinks=True, with_pip=False)
    packages = next((folder / "venv" / "lib").glob("python*/site-packages"))
    installed = sorted({sysconfig.get_path("purelib"), *site.getsitepackages()})
    lines = [str(copy / "src"), *(f"import site; site.addsitedir({path!r})" for path in installed)]
    (packages / "overlay.pth").write_text("\n".join(lines) + "\n")
    return copy, folder / "venv" / "bin" / "python"


class Runner:
    """An overlay with a warm process in it: a copy of a project, with a Python that imports the copy."""

    def __init__(self, project: Path, folder: Path, preload: Sequence[str]) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self.copy, python = make_overlay(project, folder)
        variables = {name: value for name, value in os.environ.items() if name not in REMOVED}
        self._process = subprocess.Popen(
            [python, worker.__file__, str(folder), *preload],
            cwd=self.copy,
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._count = 0

    def run(
        self,
        files: Sequence[str],
        tests: Sequence[str] = (),
        *,
        mutant: Mutant | None = None,
        limits_s: Mapping[str, float] | None = None,
        budget_s: float = math.inf,
        config: Path | None = None,
    ) -> Outcome:
        """Run tests, all of `files` if `tests` is empty. With `tests`, the first failure ends the run."""
        path = None if config is None else str(config)
        request = Request(files, tests, limits_s or {}, USUAL_LIMIT_S, budget_s, path)
        with self._mutated(mutant):
            return self._ask(request)

    def _ask(self, request: Request) -> Outcome:
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("The process has no pipes.")
        print(json.dumps(asdict(request)), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"The process that runs tests has ended with {self._process.wait()}.")
        return Outcome(**json.loads(answer))

    @contextlib.contextmanager
    def _mutated(self, mutant: Mutant | None) -> Iterator[None]:
        if mutant is None:
            yield
            return
        path = self.copy / mutant.path
        original = path.read_text()
        try:
            self._write(path, mutant.text)
            yield
        finally:
            self._write(path, original)

    def _write(self, path: Path, text: str) -> None:
        """Write a file with another time than it ever had, so that no compiled file is taken for it."""
        self._count += 1
        path.write_text(text)
        os.utime(path, (self._count, self._count))

    def kill(self) -> None:
        """End the process and what it runs; a request that waits for its answer raises."""
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self._process.pid)
            for each in (process, *process.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    each.kill()

    def close(self) -> None:
        """End the process and remove the overlay."""
        self.kill()
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()
        shutil.rmtree(self._folder, ignore_errors=True)


@contextlib.contextmanager
def runners(project: Path, count: int, preload: Sequence[str] = PRELOAD) -> Iterator[list[Runner]]:
    """Return `count` runners, each with its own overlay in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder, contextlib.ExitStack() as stack:
        made = [Runner(project, Path(folder) / str(number), preload) for number in range(count)]
        for runner in made:
            stack.callback(runner.close)
        yield made


def at_once(
    runners: Sequence[Runner], function: Callable[[Runner, T], R], values: Iterable[T]
) -> Iterator[R]:
    """Call `function` for each value, as many at once as there are runners; yield the results in order."""
    idle: queue.SimpleQueue[Runner] = queue.SimpleQueue()
    for runner in runners:
        idle.put(runner)

    def call(value: T) -> R:
        runner = idle.get()
        try:
            return function(runner, value)
        finally:
            idle.put(runner)

    with ThreadPoolExecutor(len(runners)) as pool:
        try:
            yield from pool.map(call, values)
        except BaseException:  # such as KeyboardInterrupt: the threads wait for answers
            for runner in runners:
                runner.kill()
            raise
