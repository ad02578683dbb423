"""A port that every rank of a job works out alike, and that two jobs on one node do not share."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

# Below the kernel's range for outgoing connections (from 32768), above the ports of well-known services.
_FIRST, _COUNT = 20_000, 12_000
# Steps of one job, and jobs one after another, are neighbours: they differ for sure up to this many steps.
_STEPS = 31


def port_of_job(ids: Sequence[str]) -> int:
    """Return a port from 20000 to 31999 for a job that has these ids: the job's, its step's.

    Plain numbers are mixed so that neighbouring jobs and steps never meet; other ids are hashed.
    """
    number = 0
    for text in ids:
        number = number * _STEPS + _as_number(text)
    return _FIRST + number % _COUNT


def _as_number(text: str) -> int:
    is_plain = text.isascii() and text.isdecimal()
    return int(text[-18:]) if is_plain else zlib.crc32(text.encode("utf-8", "replace"))
