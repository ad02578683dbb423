"""Name the rank that ended this one's job, where no supervisor sees them all."""

from __future__ import annotations

import dataclasses
import logging
import time

from rankwise.errors import NodesLostError
from rankwise.launchers._records import FailureRecord
from rankwise.process_group.flight_recorder import write_flight_record
from rankwise.process_group.last_words import LastWords, Roll
from rankwise.process_group.meeting import FailedElsewhere
from rankwise.ranks import RankInfo

_log = logging.getLogger(__name__)


def wait_for_other_nodes(last_words: LastWords | None) -> None:
    """Wait until the ranks of all nodes are done, so that what fails on one has failed on all.

    Raises:
        FailedElsewhere: where one has failed; `with_the_cause` turns it into that failure.
        NodesLostError: where one is not to be heard of any more.
    """
    if last_words is None or last_words.is_one_node:
        return  # whoever started them sees all
    heard = last_words.wait_for_the_others()
    if isinstance(heard, NodesLostError):
        raise heard
    if heard is not None:
        raise FailedElsewhere(heard)


def with_the_cause(
    error: BaseException, ranks: RankInfo, last_words: LastWords | None
) -> tuple[BaseException, FailureRecord]:
    """Return what this rank raises and what it reports; on several nodes both may be another rank's.

    A failure of this rank's own is left for the other nodes; one that echoes another's is looked up. One that
    waited in vain says where the others are.
    """
    if isinstance(error, FailedElsewhere):
        return _as_here(error.record)
    record = FailureRecord.of_exception(ranks, error)
    if not isinstance(error, Exception):
        return error, record
    if record.is_timeout and (path := write_flight_record(ranks.global_rank)):
        note = f"the flight record of global_rank={ranks.global_rank} is {path}"
        record = dataclasses.replace(record, notes=(note,))
    if last_words is None or (last_words.is_one_node and not record.is_timeout):
        return error, record
    if not (record.is_consequence or record.is_timeout):
        last_words.say(record.to_json())
        return error, record
    return _looked_up(error, record, ranks, last_words)


def _looked_up(
    error: Exception, record: FailureRecord, ranks: RankInfo, last_words: LastWords
) -> tuple[BaseException, FailureRecord]:
    heard = last_words.hear(error, is_timeout=record.is_timeout)
    if not isinstance(heard, Roll) and record.has_own_words:
        _log.warning("%s: a consequence of what ended the job.", record.line())  # which is raised instead
    if isinstance(heard, NodesLostError):
        return heard, FailureRecord.of_exception(ranks, heard)
    if isinstance(heard, Roll):
        if not record.is_timeout:
            return error, record
        record = dataclasses.replace(record, missing=heard.missing, last_seen=heard.last_seen)
        return record.to_error(last_words.began_s, (), ()), record
    return _as_here(heard, record)


def _as_here(heard: bytes, *others: FailureRecord) -> tuple[BaseException, FailureRecord]:
    # Each node has a clock of its own.
    first = dataclasses.replace(FailureRecord.from_json(heard), at_s=time.monotonic())
    return first.to_error(time.monotonic(), (), others), first
