"""A job that lasts until this process ends: each rank runs the rest of the script."""

from __future__ import annotations

import atexit
import dis
import os
import sys
from contextlib import ExitStack
from traceback import walk_stack
from types import TracebackType
from typing import Any, ClassVar, NoReturn, final

from rankwise.errors import LaunchRefusedError, WorkerError, WorkerExitedError
from rankwise.failures.record import FailureRecord
from rankwise.launchers.channel import Kind
from rankwise.launchers.context import CallerLauncher, WorkerContext
from rankwise.processes.exit_codes import exit_code_of, exit_now, report_at_exit
from rankwise.strategies.base import Strategy

_FAILURE = 1
_open: OpenJob | None = None


def begin_job(strategy: Strategy) -> None:
    """Start a strategy's processes, and be a rank of its job until this process ends.

    What ends the script ends the job: its last line on every rank, an exception on any of them, a signal. The
    job's first failure is then printed instead of this rank's own, as `Strategy.launch` would raise it.

    Mutates: `sys.excepthook`, `sys.exit`, and what a job changes, until this process ends. Raises
    `LaunchRefusedError` where processes run a function only, and within such a job.
    """
    global _open
    strategy._check_not_in_job("begin_job()")
    if not strategy.is_bound:
        strategy.bind()
    if _open is not None and _open.is_running:
        raise LaunchRefusedError(
            message="A job without a function runs already, until this script ends.",
            remedy="use one Fabric, launched once; or launch a function with each: fabric.launch(main).",
        )
    launcher = strategy.launcher
    if not isinstance(launcher, CallerLauncher):
        raise LaunchRefusedError(
            message="launch() needs the function that is to run in the processes that it starts.",
            facts=f"{type(strategy).__name__}, start_method={getattr(launcher, 'start_method', None)!r}.",
            remedy='put the loop into a function main(fabric): fabric.launch(main); or use strategy="ddp" in '
            "a script, or torchrun.",
        )
    with ExitStack() as stack:
        run = stack.enter_context(launcher.running(strategy._rendezvous_of_launch()))
        stack.enter_context(strategy.running_as(run.worker))
        _open = OpenJob(stack.pop_all(), run.worker)


@final
class OpenJob:
    """Ends a job with the script."""

    def __init__(self, job: ExitStack, worker: WorkerContext) -> None:
        self.is_running = True
        self._job = job
        self._worker = worker
        self._script = list(walk_stack(sys._getframe()))[-1][0]  # the outermost frame
        self._pid = os.getpid()
        self._hook = sys.excepthook
        sys.excepthook = self._on_exception
        sys.exit = _exit
        atexit.register(self._on_exit)

    def _end(self, error: BaseException | None) -> BaseException | None:
        """End the job; return its cause: `error`, or the failure that `error` was a consequence of."""
        self.is_running = False
        try:
            if error is None:
                self._job.close()
            else:
                self._job.__exit__(type(error), error, error.__traceback__)
        except BaseException as raised:  # noqa: BLE001  it is reported
            return raised
        return error

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        """Report what ended the job instead of a consequence; be the script's `sys.excepthook`."""
        if self.is_running and os.getpid() == self._pid:
            error = self._end(error) or error
        if isinstance(error, SystemExit):
            raise error
        # A worker's error has the worker's traceback in its text; its own leads to the end of this script.
        shown = error.with_traceback(None) if isinstance(error, WorkerError) else error
        self._hook(type(shown), shown, shown.__traceback__)
        if exit_code_of(error) != _FAILURE:
            raise SystemExit(exit_code_of(error))

    def _on_exit(self) -> None:
        if not self.is_running or os.getpid() != self._pid:
            return
        # Another excepthook has printed it, or Python does not treat it as an error and exits with this code.
        own = getattr(sys, "last_value", None) or ScriptExit.uncaught
        last = dis.opname[self._script.f_code.co_code[self._script.f_lasti]]
        has_returned = last.startswith("RETURN")  # not ended by an exception
        if own is None and self._worker.channel is not None and not has_returned:
            # By `raise SystemExit(...)`; its code is not known yet: the other ranks may have finished, too.
            phase = WorkerExitedError.BY_SYSTEM_EXIT
            record = FailureRecord.of_rank(self._worker.ranks, os.getpid(), phase=phase)
            self._worker.channel.send(Kind.EXITED, record.to_json())
        error = self._end(own)
        if error is None or error is own:
            return
        if isinstance(error, SystemExit):
            exit_now(error.code if isinstance(error.code, int) else _FAILURE)
        report_at_exit(error)
        exit_now(exit_code_of(error))


def _exit(status: Any = None, /) -> NoReturn:
    """Raise a `SystemExit` that is known when exit hooks run; be the script's `sys.exit`."""
    raise ScriptExit() if status is None else ScriptExit(status)


class ScriptExit(SystemExit):
    """The `SystemExit` of a script in an open job. Python drops it, and its code, before exit hooks run."""

    uncaught: ClassVar[SystemExit | None] = None  # what ends the script with another exit code than 0

    def __del__(self) -> None:
        try:
            sys._getframe(1)
        except ValueError:  # no Python code runs any more, so none has caught it
            if self.code not in (None, 0):
                ScriptExit.uncaught = SystemExit(self.code)
