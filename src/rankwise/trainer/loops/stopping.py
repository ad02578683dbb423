"""When a fit stops before its end: on all ranks after the same step, for a signal or `should_stop`."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, final

from typing_extensions import Self

from rankwise.processes.signals import ROUTER, SignalRequest, StoppedBySignal

if TYPE_CHECKING:
    from rankwise.trainer.loops.context import LoopContext

__all__ = ["EvaluationLeft", "Stopping"]

_SIGNAL = "signal:"


@final
class EvaluationLeft(Exception):
    """Raised out of a validation within a fit, on all ranks, when a signal makes them stop there."""


@final
class Stopping:
    """The boundaries between optimizer steps and between a validation's batches, and the signals heard there.

    SIGTERM, and under Slurm its requeue signal, makes all ranks save a checkpoint, leave, and exit with 143,
    whichever ranks it reached; one that comes later than an echo of the first ends this process at once.

    Args:
        context: of this rank.
    """

    def __init__(self, context: LoopContext) -> None:
        self._strategy = context.strategy
        self._state = context.stop
        self._save_checkpoint = context.save_stop_checkpoint
        self._caught: int | None = None
        self._cleanup = ExitStack()

    def __enter__(self) -> Self:
        strategy = self._strategy
        channel = strategy.worker.channel
        self._agreement = strategy.worker.agree_on_stopping(strategy.timeout)
        self._agreement.start()
        self._cleanup.callback(self._agreement.close)
        if channel is not None:
            channel.call_on_request(self._ask)
            self._cleanup.callback(channel.call_on_request, None)
        self._cleanup.enter_context(ROUTER.subscribe(self._signals(), self._on_signal, in_main_thread=True))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._cleanup.close()
        if kind is None and self._caught is not None:  # it came after the last boundary
            raise SystemExit(128 + self._caught)

    def may_go_on(self) -> bool:
        """Return whether the next optimizer step may begin; False on all ranks after the same one.

        Raises:
            StoppedBySignal: on all ranks, with a checkpoint written, when that is what makes them stop.
        """
        if self._state.is_at_limit:
            return False
        if self._state.wants_to_stop:
            self._agreement.request("should_stop")
        if self._agreement.begin_step():
            return True
        self.stop()
        return False

    def begin_evaluation(self) -> None:
        """A validation within the fit begins.

        Raises:
            EvaluationLeft: on all ranks, here or after the same batch; `stop` is then to be called.
        """
        self._leave_unless(self._agreement.begin_step())

    def begin_evaluation_batch(self) -> None:
        """Its next batch begins. Raises: as `begin_evaluation`."""
        self._leave_unless(self._agreement.begin_part())

    def end_evaluation_batches(self) -> None:
        """This rank has no more; others may have. Raises: as `begin_evaluation`."""
        self._leave_unless(self._agreement.end_parts())

    def _leave_unless(self, may_go_on: bool) -> None:
        if not may_go_on and self._is_for_signal:  # `should_stop` lets a validation come to its end
            raise EvaluationLeft

    def finish(self) -> None:
        """Training has come to its end.

        Raises:
            StoppedBySignal: as `may_go_on`, for a signal that all have heard of by now.
        """
        if self._agreement.finish():
            self.stop()

    def stop(self) -> None:
        """Stop, as all ranks do here: save, for a signal.

        Raises:
            StoppedBySignal: for a signal.
        """
        if not self._is_for_signal:
            self._state.should_stop = True
            return
        if self._save_checkpoint is not None:
            self._save_checkpoint()
        number = int(self._reason.removeprefix(_SIGNAL))
        environment = self._strategy.environment
        if number == environment.requeue_signal and self._strategy.is_global_zero:
            # The scheduler ends the job as it takes it back: what a thread still writes must be there.
            self._strategy.checkpoint_io.teardown()
            environment.requeue()
        self._caught = None
        raise StoppedBySignal(signal.SIGTERM)  # one exit code, whatever asked

    @property
    def _reason(self) -> str:
        return self._agreement.reason or ""

    @property
    def _is_for_signal(self) -> bool:
        return self._reason.startswith(_SIGNAL)

    # ------------------------------------------------------------------ signals

    def _signals(self) -> list[signal.Signals]:
        requeue_signal = self._strategy.environment.requeue_signal
        return [signal.SIGTERM] if requeue_signal is None else [signal.SIGTERM, requeue_signal]

    def _on_signal(self, request: SignalRequest) -> None:
        if self._caught is None:
            self._caught = request.number
            self._ask(request.number)
        elif not request.is_repeat:
            raise SystemExit(128 + request.number)

    def _ask(self, signum: int) -> None:
        self._agreement.request(f"{_SIGNAL}{signum}")
