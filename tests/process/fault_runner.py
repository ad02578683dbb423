"""Run a job of the table of failures, and observe from outside how it ends."""

import contextlib
import json
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from rankwise.checkpoint import TorchCheckpointIO
from rankwise.errors import CheckpointError
from tests.helpers import leak_checks, processes
from tests.helpers.load import slowdown
from tests.helpers.preloaded import ForkedProgram, PreloadedInterpreter
from tests.process.fault_table import EXIT_S, OUTLIVES_S, UNDISTURBED, Cell, expected
from tests.process.fault_tasks import CHECKPOINT, SCRIPT, STEPS, Fault, as_json, marker_of
from tests.process.helpers import with_tests

_POLL_S = 0.02
_MOST_S = 60.0  # a job that has not ended then hangs


@dataclass(frozen=True)
class Outcome:
    """How a job ended. Times count from the fault; where there is none, from the start."""

    ranks_gone_after_s: float  # until nothing that the main process started was left
    gone_after_s: float  # until its last process was gone: the main one, once its interpreter had ended
    raised_after_s: float  # until the exception reached the caller; -1 where the caller had ended
    exit_code: int  # the main process's; negative for a signal
    exception: str  # the type's name that reached the caller; nothing where none did
    ranks: tuple[int, ...]  # that it names
    left: tuple[str, ...]  # processes, ports, files, shared memory, and what changed in the caller
    output: str  # what all its processes printed


_Watched = tuple[float, float, float, int, list[str]]


class FaultRunner:
    """Runs one job after the other, until it is closed.

    All jobs are forked from one interpreter. After a job that could not be watched to its end, it is ended,
    and the next job has a new one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = 0
        self.interpreter: PreloadedInterpreter | None = None

    def __call__(
        self, cell: Cell | None, start_method: str, outlives_s: float = OUTLIVES_S, **fault_options: Any
    ) -> Outcome:
        """Run one job. A process that outlives the main process by `outlives_s` counts as left behind."""
        self._number += 1
        folder = self._folder / str(self._number)
        folder.mkdir(parents=True)
        shared_memory = leak_checks.SharedMemory()
        fault = Fault(cell, str(folder), **fault_options)
        try:
            started_at_s, ranks_gone_at_s, gone_at_s, exit_code, left = self._run(
                fault, start_method, outlives_s
            )
        except BaseException:
            self.close()
            raise
        left += [*leak_checks.wait_until_clean([shared_memory], timeout_s=0.5), *files_left(folder)]
        report, problem = report_of(fault)
        left += [problem] if problem else []
        stamp = folder / "stamp"
        began_s = float(stamp.read_text()) if stamp.exists() else started_at_s
        return Outcome(
            ranks_gone_at_s - began_s,
            gone_at_s - began_s,
            report["raised_at_s"] - began_s if report else -1.0,
            exit_code,
            str(report["exception"]) if report else UNDISTURBED,
            tuple(rank for rank in report.get("ranks", ()) if rank is not None),
            (*left, *report.get("left", ())),
            (folder / "output").read_text(errors="replace"),
        )

    def close(self) -> None:
        if self.interpreter is not None:
            self.interpreter.close()
        self.interpreter = None

    def _run(self, fault: Fault, start_method: str, outlives_s: float) -> _Watched:
        """Return when the job began, its ranks and main had gone, by `monotonic`; exit code; what is left."""
        if self.interpreter is None:
            self.interpreter = PreloadedInterpreter(["tests.process.fault_tasks"], _variables({}))
        folder = Path(fault.folder)
        started_at_s = time.monotonic()
        program = _start(self.interpreter, folder, as_json(fault, start_method))
        main = psutil.Process(program.pid)
        try:
            times = self._watch(main, fault, started_at_s, outlives_s)
            left = [processes.describe(process) for process in _living(main.pid, folder)]
        finally:
            processes.kill(_living(main.pid, folder))
        return started_at_s, *times, program.wait(), left

    def _watch(
        self, main: psutil.Process, fault: Fault, started: float, outlives_s: float
    ) -> tuple[float, float]:
        """Wait for the end; return when the last process but the main one ended, and when the main one did.

        A suspended main process is continued when it is the last.
        """
        stamp = Path(fault.folder, "stamp")
        ranks_gone_at, main_seen_at = 0.0, started
        helpers: set[psutil.Process] = set()
        while (now := time.monotonic()) < started + _MOST_S:
            alive = set(processes.wait_until_gone(lambda: processes.in_session(main.pid), timeout_s=0))
            helpers |= {process for process in alive - helpers if processes.is_service(process, main.pid)}
            if main in alive:
                main_seen_at = now
            if alive - helpers - {main} or not stamp.exists():
                ranks_gone_at = 0.0
            elif ranks_gone_at == 0:
                ranks_gone_at = now
            elif _is_suspended(fault):
                with contextlib.suppress(psutil.NoSuchProcess):
                    main.send_signal(signal.SIGCONT)
            if not alive or now > main_seen_at + outlives_s * slowdown():
                return ranks_gone_at or now, now
            time.sleep(_POLL_S)
        return started + _MOST_S, started + _MOST_S


def _variables(more: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, **{name: value for name, value in with_tests(more).items() if value is not None}}


def _start(interpreter: PreloadedInterpreter, folder: Path, job: str) -> ForkedProgram:
    for name in ("tmp", "here", "saved"):
        (folder / name).mkdir()
    variables = _variables({"TMPDIR": str(folder / "tmp"), processes.MARKER: marker_of(folder)})
    with open(os.devnull, "rb") as stdin, (folder / "output").open("ab") as output:  # noqa: PTH123
        streams = [stdin.fileno(), output.fileno(), output.fileno()]
        return interpreter.start([str(SCRIPT), job], cwd=folder / "here", env=variables, streams=streams)


def files_left(folder: Path) -> list[str]:
    """Return the files that a job has left in its folders, without its checkpoint if that loads."""
    found = (path for name in ("tmp", "here", "saved") for path in (folder / name).rglob("*"))
    left = [f"new file: {path}" for path in found if path != folder / CHECKPOINT]
    is_torn = (folder / CHECKPOINT).exists() and _saved_step(folder) is None
    return left + (["the checkpoint does not load"] if is_torn else [])


def report_of(fault: Fault) -> tuple[dict[str, Any], str]:
    """Return the caller's report, and a problem if the report, the fault or the training is missing."""
    folder = Path(fault.folder)
    caught = folder / "caught.json"
    report: dict[str, Any] = json.loads(caught.read_text()) if caught.exists() else {}
    if not report and not (fault.cell is not None and fault.cell.ends_main):
        return report, "the caller has written no report"
    if fault.cell is not None:
        return report, "" if (folder / "stamp").exists() else "the fault has not happened"
    return report, "" if _saved_step(folder) == STEPS else f"the job has not trained for {STEPS} steps"


def wrong(cell: Cell, outcome: Outcome) -> list[str]:
    """Return what is left of a job, and how exception and exit code differ from the expected ones."""
    due = expected(cell)
    found = list(outcome.left)
    if (seen := (outcome.exception, outcome.exit_code)) != (wanted := (due.exception, due.exit_code)):
        found.append(f"exception and exit code are {seen}, not {wanted}")
    if due.rank is not None and due.rank not in outcome.ranks:
        found.append(f"it names {outcome.ranks}, not rank {due.rank}")
    return found


def late(cell: Cell, outcome: Outcome) -> list[str]:
    factor = slowdown()
    times = {"no rank was left": outcome.ranks_gone_after_s}
    if not (cell.how == "SIGSTOP" and cell.hits_main):  # it cannot raise before it continues
        times["the caller had the exception"] = outcome.raised_after_s
    found = [
        f"it took {took:.2f} s until {what}" for what, took in times.items() if took > cell.limit_s * factor
    ]
    leaving_s = outcome.gone_after_s - max(times.values())
    return found + ([f"main took {leaving_s:.2f} s to leave"] if leaving_s > EXIT_S * factor else [])


def _saved_step(folder: Path) -> int | None:
    try:
        checkpoint = TorchCheckpointIO().load_checkpoint(folder / CHECKPOINT)
    except CheckpointError:
        return None
    step: int = checkpoint["global_step"]
    return step


def _is_suspended(fault: Fault) -> bool:
    return fault.cell is not None and fault.cell.how == "SIGSTOP" and fault.cell.hits_main


def _living(session_id: int, folder: Path) -> list[psutil.Process]:
    """Return the living processes of a job, those in other sessions included."""
    return processes.wait_until_gone(
        lambda: processes.in_session(session_id) | processes.with_marker(marker_of(folder)), timeout_s=0
    )
