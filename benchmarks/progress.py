"""A line on stderr that says what is being measured."""

from __future__ import annotations

import sys
import time

_INTERVAL_S = 30.0  # between two lines where stderr is no terminal

_question = ""
_begun_s = _shown_s = 0.0


def begin(question: str) -> None:
    """Show the progress of a question from now on; without a name, of none."""
    global _question, _begun_s
    if _question and sys.stderr.isatty():
        sys.stderr.write("\r\033[K")
    _question, _begun_s = question, time.monotonic()
    show("")


def show(what: str) -> None:
    """Show what of the question is measured now, and how long the question has taken."""
    global _shown_s
    now_s, is_terminal = time.monotonic(), sys.stderr.isatty()
    if not _question or (what and not is_terminal and now_s - _shown_s < _INTERVAL_S):
        return
    _shown_s = now_s
    minutes, seconds = divmod(int(now_s - _begun_s), 60)
    text = f"{_question}: {what or 'begun'}, {minutes}:{seconds:02}"
    sys.stderr.write(f"\r\033[K{text}" if is_terminal else f"{text}\n")
    sys.stderr.flush()
