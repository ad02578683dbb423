"""Name the rank on another node that ended this one's job."""

from __future__ import annotations

import dataclasses
import time

from rankwise.errors import NodesLostError
from rankwise.launchers._records import FailureRecord
from rankwise.process_group.last_words import LastWords
from rankwise.ranks import RankInfo


def with_the_cause(
    error: BaseException, ranks: RankInfo, last_words: LastWords | None
) -> tuple[BaseException, FailureRecord]:
    """Return what this rank raises and what it reports; on several nodes both may be another rank's.

    A failure of this rank's own is left for the other nodes; one that echoes another's is looked up.
    """
    record = FailureRecord.of_exception(ranks, error)
    if last_words is None or not isinstance(error, Exception):
        return error, record
    if not (record.is_consequence or record.is_timeout):
        last_words.say(record.to_json())
        return error, record
    heard = last_words.hear(error)
    if heard is None:
        return error, record
    if isinstance(heard, NodesLostError):
        return heard, FailureRecord.of_exception(ranks, heard)
    # Each node has a clock of its own.
    first = dataclasses.replace(FailureRecord.from_json(heard), at_s=time.monotonic())
    return first.to_error(time.monotonic(), (), (record,)), first
