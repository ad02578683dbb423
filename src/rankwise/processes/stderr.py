"""Tell the user something on stderr from a thread that must neither fail by it nor wait for the reader."""

from __future__ import annotations

import sys
import threading

__all__ = ["write_stderr"]

_PATIENCE_S = 0.2

_writing: threading.Thread | None = None


def write_stderr(text: str, patience_s: float = _PATIENCE_S) -> None:
    """Write a text to stderr, in a thread of its own.

    Where nobody reads stderr any more, or there is none, nothing happens; where a reader does not keep up,
    the text comes when it does, and what is said until then is dropped.

    Args:
        text: what to write, with its line breaks.
        patience_s: how long to wait until it is written.
    """
    global _writing
    if _writing is not None and _writing.is_alive():
        _writing.join(patience_s)
        if _writing.is_alive():
            return
    _writing = thread = threading.Thread(target=_write, args=(text,), name="rankwise-says", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # Python 3.12 starts none while exit hooks run
        _write(text)
    else:
        thread.join(patience_s)


def _write(text: str) -> None:
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except Exception:  # noqa: BLE001  no stderr, a closed one, one without a reader, one that is anybody's code
        return
