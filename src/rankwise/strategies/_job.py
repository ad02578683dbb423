"""The function that every rank runs: take the seat, connect, call what the user launched, let go."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from typing_extensions import final

from rankwise.launchers.seat import Seat
from rankwise.process_group.causes import work_begins
from rankwise.process_group.pulse import TEARDOWN, beat
from rankwise.strategies._last_words import wait_for_other_nodes, with_the_cause
from rankwise.strategies._late_end import ending_once_saved

_log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from rankwise.strategies.base import Strategy


@final
@dataclass
class RankEntry:
    """What a strategy gives to its launcher; picklable where the strategy and the arguments are."""

    strategy: Strategy
    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @work_begins()
    def __call__(self, seat: Seat) -> Any:
        """Run as the rank that `seat` says."""
        self.strategy.take_seat(seat)
        with ending_once_saved(self.strategy.checkpoint_io):
            return self._run(seat)

    def _run(self, seat: Seat) -> Any:
        try:
            self.strategy.setup_environment()
            value = self.function(self.strategy, *self.args, **self.kwargs)
            self.strategy.all_have_finished()
            self.strategy.checkpoint_io.teardown()
            wait_for_other_nodes(seat.last_words)
            return value
        except BaseException as error:
            explained = self.strategy.explained(error)
            explained, record = with_the_cause(explained, self.strategy.ranks, seat.last_words)
            seat.report_failure(explained, record)  # before the clean-up, which takes its time
            self._finish_checkpoints()
            if explained is error:
                raise
            raise explained from None
        finally:
            beat(TEARDOWN)
            self.strategy.teardown()
            beat("finished", waits=True)

    def _finish_checkpoints(self) -> None:
        try:
            self.strategy.checkpoint_io.teardown()
        except Exception:  # noqa: BLE001  what ended the job is raised
            _log.exception("A checkpoint could not be finished.")

    def described(self) -> dict[str, object]:
        """Return the parts by the names that the user knows them by."""
        arguments = {f"argument {index} ({type(arg).__name__})": arg for index, arg in enumerate(self.args)}
        return {
            "the launched function": self.function,
            "the strategy": self.strategy,
            **arguments,
            **{f"argument {name!r}": value for name, value in self.kwargs.items()},
        }
