"""Stopping a fit before its end: on all ranks after the same step, for a signal or `should_stop`."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, TypeVar, final

from typing_extensions import Self

from rankwise.processes.signals import ROUTER, SignalRequest, StoppedBySignal
from rankwise.trainer.checkpointing import save_stop_checkpoint

if TYPE_CHECKING:
    from rankwise.trainer.state import LoopContext

_SIGNAL = "signal:"
T = TypeVar("T")


@final
class EvaluationStopped(Exception):
    """Raised on all ranks in a validation within a fit, when a signal stops the fit there."""


@final
class Stopping:
    """The points where a fit can stop: between optimizer steps, and between the batches of a validation.

    After SIGTERM, or Slurm's requeue signal, on any rank, all ranks save a checkpoint, stop, and exit with
    143. If the signal comes a second time, later than the debounce time, this process exits at once.
    """

    def __init__(self, context: LoopContext) -> None:
        self._strategy = context.strategy
        self._context = context
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
        signals = [signal.SIGTERM]
        if (requeue_signal := strategy.environment.requeue_signal) is not None:
            signals.append(requeue_signal)
        self._cleanup.enter_context(ROUTER.subscribe(signals, self._on_signal, in_main_thread=True))
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        self._cleanup.close()
        if kind is None and self._caught is not None:  # the signal came after the last step
            raise SystemExit(128 + self._caught)

    def may_continue(self) -> bool:
        """Return whether the next optimizer step may begin; False on all ranks after the same step.

        A signal that stops training raises `StoppedBySignal` on all ranks, after a checkpoint was written.
        """
        if self._context.is_at_limit:
            return False
        if self._context.wants_to_stop:
            self._agreement.request("should_stop")
        if self._agreement.begin_step():
            return True
        self.stop()
        return False

    def evaluated(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the batches of a validation; on a signal, raise `EvaluationStopped` on all ranks after one.

        Then `stop` must be called. Other ranks may have more batches.
        """
        self._raise_unless(self._agreement.begin_step())
        for batch in batches:
            self._raise_unless(self._agreement.begin_part())
            yield batch
        self._raise_unless(self._agreement.end_parts())

    def _raise_unless(self, may_continue: bool) -> None:
        if not may_continue and self._signal is not None:  # `should_stop` does not interrupt a validation
            raise EvaluationStopped

    def finish(self) -> None:
        """End training that has reached its end; stop as `may_continue` for a signal that came before."""
        if self._agreement.finish():
            self.stop()

    def stop(self) -> None:
        """Stop, after all ranks agreed to; for a signal, save a checkpoint and raise `StoppedBySignal`."""
        number = self._signal
        if number is None:
            self._context.state.should_stop = True
            return
        self._context.stage.received_sigterm |= number == signal.SIGTERM
        if not self._context.options.fast_dev_run:
            save_stop_checkpoint(self._context)
        environment = self._strategy.environment
        if number == environment.requeue_signal and self._strategy.is_global_zero:
            # The scheduler may end the job when it requeues it: first wait for asynchronous checkpoints.
            self._strategy.checkpoint_io.teardown()
            environment.requeue()
        self._caught = None
        raise StoppedBySignal(signal.SIGTERM)  # the same exit code for every signal

    @property
    def _signal(self) -> int | None:
        """The signal that all ranks stop for; None for another reason, or for none."""
        reason = self._agreement.reason or ""
        return int(reason.removeprefix(_SIGNAL)) if reason.startswith(_SIGNAL) else None

    def _on_signal(self, request: SignalRequest) -> None:
        if self._caught is None:
            self._caught = request.number
            self._context.stage.received_sigterm |= request.number == signal.SIGTERM
            self._ask(request.number)
        elif not request.is_repeat:
            raise SystemExit(128 + request.number)

    def _ask(self, signum: int) -> None:
        self._agreement.request(f"{_SIGNAL}{signum}")
