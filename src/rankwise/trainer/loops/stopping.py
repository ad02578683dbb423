"""Stopping a fit before its end: on all ranks after the same step, for a signal or `should_stop`."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, TypeVar, final

from typing_extensions import Self

from rankwise.processes.exit_codes import write_stderr
from rankwise.processes.signals import (
    INTERRUPT_NOTICE,
    ROUTER,
    SignalRequest,
    ended_by,
    raises_keyboard_interrupt,
    stopped_by,
)
from rankwise.trainer.checkpointing import save_stop_checkpoint
from rankwise.trainer.state_transfer import gather_rank_states

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

    After SIGTERM, Slurm's requeue signal or Ctrl-C, on any rank, all ranks save a checkpoint, stop, and exit
    with 143 or raise `KeyboardInterrupt`. A second signal, later than the debounce time, does that at once; a
    second Ctrl-C does so at any time, unless an outer launcher may have forwarded it.
    """

    def __init__(self, context: LoopContext) -> None:
        self._strategy = context.strategy
        self._context = context
        self._caught: int | None = None
        self._cleanup = ExitStack()

    def __enter__(self) -> Self:
        strategy, channel = self._strategy, self._strategy.worker.channel
        self._agreement = strategy.worker.agree_on_stopping(strategy.timeout)
        self._agreement.start()
        self._cleanup.callback(self._agreement.close)
        if channel is not None:
            channel.call_on_request(self._ask)
            self._cleanup.callback(channel.call_on_request, None)
        environment, enter = strategy.environment, self._cleanup.enter_context
        signals = [signal.SIGTERM, *filter(None, [environment.requeue_signal])]
        enter(ROUTER.subscribe(signals, self._on_signal, in_main_thread=True))
        if raises_keyboard_interrupt():
            interrupts = ROUTER.subscribe(
                [signal.SIGINT],
                self._on_signal,
                in_main_thread=True,
                calls_earlier_handler=False,
                is_debounced=environment.creates_processes_externally,
            )
            enter(interrupts)
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        self._cleanup.close()
        if kind is None and self._caught is not None:  # the signal arrived after the last step
            raise ended_by(self._caught)

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
        """End training that has reached its end; stop as in `may_continue` if a signal arrived before."""
        if self._agreement.finish():
            self.stop()

    def stop(self) -> None:
        """Stop, after all ranks agreed to; for a signal, save a checkpoint and raise `StoppedBySignal`."""
        number, context = self._signal, self._context
        if number is None:
            context.state.should_stop = True
            return
        context.state.received_sigterm |= number == signal.SIGTERM
        if not context.options.fast_dev_run:
            save_stop_checkpoint(context)
        context.state.rank_states = gather_rank_states(context)  # a fit that continues needs them
        environment = self._strategy.environment
        if number == environment.requeue_signal and self._strategy.is_global_zero:
            # The scheduler may end the job when it requeues it: first wait for asynchronous checkpoints.
            self._strategy.checkpoint_io.teardown()
            environment.requeue()
        self._caught = None
        number = number if number == signal.SIGINT else signal.SIGTERM  # the others have one exit code
        raise stopped_by(number)

    @property
    def _signal(self) -> int | None:
        """The signal that all ranks stop for; None for another reason, or for none."""
        reason = self._agreement.reason or ""
        return int(reason.removeprefix(_SIGNAL)) if reason.startswith(_SIGNAL) else None

    def _on_signal(self, request: SignalRequest) -> None:
        if self._caught is None:
            self._caught = request.number
            self._context.state.received_sigterm |= request.number == signal.SIGTERM
            self._ask(request.number)
            is_supervised = self._strategy.worker.channel is not None  # a supervisor prints it for its ranks
            if request.number == signal.SIGINT and self._strategy.is_global_zero and not is_supervised:
                write_stderr(INTERRUPT_NOTICE)
        elif not request.is_repeat:
            raise ended_by(request.number)

    def _ask(self, signum: int) -> None:
        self._agreement.request(f"{_SIGNAL}{signum}")
