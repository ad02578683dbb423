"""Agree on the step after which all ranks stop, without a collective.

A rank that wants to stop sends a message to all ranks. The monitor of every rank answers with the number of
the step that its main thread is in; from then on the main thread begins no other step before the agreement.
The first rank that asked, the collector, waits for all answers; the highest is the last step of all ranks.
So the requests of any other rank do not grow with the world. Without a request a boundary reads one flag.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import final

from rankwise.errors import StopAgreementError
from rankwise.monitoring.heartbeat import blocked_in
from rankwise.monitoring.rank_monitor import RankMonitor, send_message
from rankwise.ranks import RankInfo
from rankwise.stores.values import read_value
from rankwise.stores.waiting import call_store, wait_for_keys

_KIND, _REASON = "stop", "stop/reason"
_COLLECTOR, _LIMIT = "stop/collector", "stop/limit"
# How many parts a step has at most.
_PARTS = 1 << 24
# The answer of a rank whose loop has ended by itself: no rank stops before the end of its own loop then.
_ENDED = 1 << 60
_CLOSE_S = 1.0


@final
@dataclass(eq=False)
class StopAgreement:
    """One rank's part in stopping together: one per job. `begin_step` is the boundary between steps.

    A step may have parts, and their number may differ between ranks. `begin_part` is a boundary as well, and
    so is `end_parts`, after a rank's last part; from there on the whole step counts as begun.

    `monitor` is None where this is the only rank; `timeout` is how long to wait for other ranks' answers.

    Attributes:
        reason: why all ranks stop, once they do; the same on every rank.
    """

    ranks: RankInfo
    monitor: RankMonitor | None
    timeout: timedelta
    reason: str | None = field(default=None, init=False)
    _begun: int = field(default=0, init=False)  # _PARTS for each step, and one more for each of its parts
    _own_reason: str | None = field(default=None, init=False)
    _is_pending: bool = field(default=False, init=False)  # a rank, this one or another, requests to stop
    _limit: int | None = field(default=None, init=False)  # what the ranks have agreed on
    _is_collector: bool = field(default=False, init=False)

    def start(self) -> None:
        """Answer the requests of other ranks from here on."""
        if self.monitor is not None:
            self.monitor.subscribe(_KIND, self._on_request)

    def close(self) -> None:
        """Answer later requests after the loop has failed, so that no rank waits for this one.

        The answer is abandoned where the store does not reply.
        """
        self._begun = _ENDED
        if self.monitor is not None and self._limit is None:
            call_store(partial(self._on_request, ""), _CLOSE_S)

    def request(self, reason: str) -> None:
        """Request that all ranks stop; acted upon at this rank's next boundary.

        Runs on: any thread, and signal handlers, as it sets flags and nothing else.
        """
        if self._own_reason is None:
            self._own_reason = reason
        self._is_pending = True

    def begin_step(self) -> bool:
        """Return whether the next step may begin; False on all ranks after the same step, or part of it.

        Raises:
            StopAgreementError: when a rank did not answer in time.
        """
        return self._begin((self._begun // _PARTS + 1) * _PARTS)

    def begin_part(self) -> bool:
        """As `begin_step`, for the next part of the step."""
        return self._begin(self._begun + 1)

    def end_parts(self) -> bool:
        """As `begin_step`, for what comes after the step's last part."""
        return self._begin(self._begun // _PARTS * _PARTS + _PARTS - 1)

    def finish(self) -> bool:
        """End this rank's part, as its loop has ended; return whether all ranks have stopped there.

        Raises:
            StopAgreementError: when a rank did not answer in time.
        """
        self._begun = _ENDED
        if self.monitor is None:
            return False
        with blocked_in("end of training"):
            return self._agreed_limit(self.monitor) != _ENDED

    def _begin(self, number: int) -> bool:
        # A rank that has a request answers with the step before: a step after which all request is the last.
        if self._is_pending and number > self._wait_for_limit():
            return False
        # First the number, then the flag; `_on_request` does it the other way round. So it either answers
        # with this step, or this step waits for the agreement.
        before, self._begun = self._begun, number
        if self._is_pending and number > self._wait_for_limit():
            self._begun = before
            return False
        return True

    def _on_request(self, _: str) -> None:
        """Answer. Runs on: the monitor's thread, or one of `close`."""
        self._is_pending = True
        if self.monitor is not None:
            self.monitor.set_once(_answer_key(self.ranks.global_rank), str(self._begun))

    def _wait_for_limit(self) -> int:
        """Return the step after which all ranks stop; wait until all have answered."""
        if self.monitor is None:
            self.reason = self._own_reason
            return self._begun
        if self._own_reason is not None and self._limit is None:
            self._ask(self.monitor, self._own_reason)
        return self._agreed_limit(self.monitor)

    def _ask(self, monitor: RankMonitor, reason: str) -> None:
        """Send the request to all ranks, unless another one has."""
        own = str(self.ranks.global_rank)
        monitor.store.compare_set(_REASON, "", reason)  # the first reason counts
        if monitor.store.compare_set(_COLLECTOR, "", own) == own.encode():
            self._is_collector = True
            send_message(monitor.store, range(self.ranks.world_size), _KIND)

    def _agreed_limit(self, monitor: RankMonitor) -> int:
        if self._limit is None:
            own = monitor.store.compare_set(_answer_key(self.ranks.global_rank), "", str(self._begun))
            if self._is_collector:
                self._limit = self._highest_answer(monitor)
                monitor.store.set(_LIMIT, str(self._limit))
            else:
                self._limit = _ENDED if own == b"%d" % _ENDED else self._collected_limit(monitor)
            if self._limit != _ENDED:
                self.reason = monitor.store.get(_REASON).decode(errors="replace")
        return self._limit

    def _collected_limit(self, monitor: RankMonitor) -> int:
        if not wait_for_keys(monitor.store, [_LIMIT], self.timeout):
            everyone = range(self.ranks.world_size)
            missing = tuple(rank for rank in everyone if not monitor.store.check([_answer_key(rank)]))
            collector = read_value(monitor.store, _COLLECTOR, int)
            raise StopAgreementError(missing=missing or (collector,), timeout_s=self.timeout.total_seconds())
        return read_value(monitor.store, _LIMIT, int)

    def _highest_answer(self, monitor: RankMonitor) -> int:
        keys = [_answer_key(rank) for rank in range(self.ranks.world_size)]
        if not wait_for_keys(monitor.store, keys, self.timeout):
            missing = tuple(rank for rank, key in enumerate(keys) if not monitor.store.check([key]))
            raise StopAgreementError(missing=missing, timeout_s=self.timeout.total_seconds())
        return max(read_value(monitor.store, key, int) for key in keys)


def _answer_key(rank: int) -> str:
    return f"stop/answer{rank}"
