"""Write to stderr from a thread that must neither fail nor wait for the reader."""

from __future__ import annotations

import sys
import threading

__all__ = ["write_stderr"]

_TIMEOUT_S = 0.2

_writing: threading.Thread | None = None


def write_stderr(text: str, timeout_s: float = _TIMEOUT_S) -> None:
    """Write a text to stderr, in a thread of its own.

    Does nothing where stderr is closed or has no reader. Where the reader is slow, the text is written later,
    and other texts are dropped until then.

    Args:
        text: what to write, with its line breaks.
        timeout_s: how long to wait until it is written.
    """
    global _writing
    if _writing is not None and _writing.is_alive():
        _writing.join(timeout_s)
        if _writing.is_alive():
            return
    _writing = thread = threading.Thread(target=_write, args=(text,), name="rankwise-stderr", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # Python 3.12 starts none while exit hooks run
        _write(text)
    else:
        thread.join(timeout_s)


def _write(text: str) -> None:
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except Exception:  # noqa: BLE001  no stderr, a closed one, one without a reader, one that is anybody's code
        return
