"""Agree on the step after which all ranks stop: no collective, and no waiting where nobody asks.

Who wants to stop says so in the store. A thread of every rank then answers with the number of the step that
its main thread is in; from then on that one begins no other before all have answered. The highest answer is
the step after which all of them stop.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import final

import torch.distributed as dist

from rankwise.errors import StopAgreementError
from rankwise.monitoring.heartbeat import blocked_in
from rankwise.ranks import RankInfo
from rankwise.stores.waiting import wait_long

__all__ = ["StopAgreement"]

# How many parts a step has at most.
_PARTS = 1 << 24
# The answer of a rank whose loop has come to its end by itself: then all go there, and nobody stops before.
_LEFT = 1 << 60
# torch's clients hand a timeout to poll(2), in an int of milliseconds: 24 days is all that fits.
_CLOSE_S = 1.0


@final
class StopAgreement:
    """One rank's part in stopping together. `begin_step` is the boundary; there it reads a flag.

    A step may have parts, of which ranks may have different numbers: `begin_part` is a boundary as well, and
    so is `end_parts`, after a rank's last one; from there on the whole step counts as begun.

    Args:
        ranks: who this process is.
        store: the job's.
        open_listener: opens the same store once more, where a thread that waits in it would hold up the
            others; called in that thread.
        timeout: how long to wait for the other ranks' answers.

    Attributes:
        reason: why all stop, once they do; the same words on every rank.
    """

    def __init__(
        self,
        ranks: RankInfo,
        store: dist.Store,
        open_listener: Callable[[], dist.Store],
        timeout: timedelta,
    ) -> None:
        self.reason: str | None = None
        self._ranks = ranks
        self._store = store
        self._open_listener = open_listener
        self._timeout = timeout
        self._is_alone = ranks.world_size == 1
        self._begun = 0  # a multiple of _PARTS for each step, and one more for each of its parts
        self._wanted: str | None = None
        self._is_pending = False  # somebody, here or elsewhere, wants to stop
        self._limit = _LEFT  # the decision
        self._failure: Exception | None = None
        self._is_decided = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rankwise-stop-agreement", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        if not self._is_alone:
            self._thread.start()

    def ask(self, reason: str) -> None:
        """Want all ranks to stop; acted upon at this rank's next boundary.

        Runs on: any thread, and signal handlers, as it sets flags and nothing else.
        """
        if self._wanted is None:
            self._wanted = reason
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

    def leave(self) -> bool:
        """Take part no more, as the loop has come to its end; return whether all ranks have stopped there.

        Raises:
            StopAgreementError: when a rank did not answer in time.
        """
        self._begun = _LEFT
        if self._is_alone:
            return False
        with blocked_in("end of training"):
            self._wake_myself()
            self._decided_limit()
            self._thread.join()
        return self._limit != _LEFT

    def close(self) -> None:
        """End the thread, however the loop was left; leave it to itself where the store does not answer."""
        self._begun = _LEFT
        if self._thread.is_alive():
            closing = threading.Thread(
                target=self._end_thread, name="rankwise-stop-agreement-end", daemon=True
            )
            closing.start()
            closing.join(_CLOSE_S)

    def _end_thread(self) -> None:
        try:
            self._wake([self._ranks.global_rank])
        except Exception:  # noqa: BLE001  a store whose host is gone: the thread has left, or will
            return
        self._thread.join(_CLOSE_S)  # longer only where it waits for ranks that will not answer

    # ------------------------------------------------------------------ the main thread

    def _begin(self, number: int) -> bool:
        # A rank that knows of a request answers with the step before: what all ask for at once, all do then.
        if self._is_pending and number > self._decided_limit():
            return False
        # First the number, then the flag; the thread does it the other way round. So either it answers with
        # this step, or this step waits for the decision.
        before, self._begun = self._begun, number
        if self._is_pending and number > self._decided_limit():
            self._begun = before
            return False
        return True

    def _decided_limit(self) -> int:
        """Return the step after which all stop; wait until that is known."""
        if self._is_alone:
            self._limit, self.reason = self._begun, self._wanted
            return self._limit
        if self._wanted is not None and not self._is_decided.is_set() and self._begun != _LEFT:
            self._publish(self._wanted)
        self._is_decided.wait()
        if self._failure is not None:
            raise self._failure
        return self._limit

    def _publish(self, reason: str) -> None:
        self._store.compare_set("stop/reason", "", reason)  # the first one's counts
        self._wake(range(self._ranks.world_size))

    def _wake_myself(self) -> None:
        try:
            self._wake([self._ranks.global_rank])
        except dist.DistStoreError as error:
            self._failure = error  # so that `close` does not wait for the store once more
            raise

    def _wake(self, ranks: range | list[int]) -> None:
        for rank in ranks:
            self._store.set(f"stop/wake{rank}", "1")

    # ------------------------------------------------------------------ the thread

    def _watch(self) -> None:
        try:
            self._listen()
        except Exception as error:  # noqa: BLE001  raised where the main thread next asks
            self._failure = error
        finally:
            self._is_decided.set()

    def _listen(self) -> None:
        store = self._open_listener()
        wait_long(store, f"stop/wake{self._ranks.global_rank}")
        self._is_pending = True
        answer = self._begun
        store.set(f"stop/answer{self._ranks.global_rank}", str(answer))
        if answer != _LEFT:
            self._limit = self._highest_answer(store)
        if self._limit != _LEFT:
            self.reason = store.get("stop/reason").decode()

    def _highest_answer(self, store: dist.Store) -> int:
        keys = [f"stop/answer{rank}" for rank in range(self._ranks.world_size)]
        try:
            store.wait(keys, self._timeout)
        except dist.DistStoreError:
            silent = tuple(rank for rank, key in enumerate(keys) if not store.check([key]))
            raise StopAgreementError(missing=silent, timeout_s=self._timeout.total_seconds()) from None
        has_many = store.has_extended_api()  # type: ignore[attr-defined]  # torch's stubs leave it out
        answers = store.multi_get(keys) if has_many else [store.get(key) for key in keys]
        return max(map(int, answers))
