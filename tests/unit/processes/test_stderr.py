"""What is said on stderr: nobody fails by it, nor waits for the reader."""

from __future__ import annotations

import io
import os
import sys
import threading
import time

import pytest

from rankwise.processes.stderr import write_stderr


class Gone(io.StringIO):
    """A stream whose reader is gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


@pytest.mark.parametrize("stream", [None, io.StringIO(), Gone()], ids=["none", "closed", "gone"])
def test_nobody_to_tell(stream: io.StringIO | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing happens."""
    if isinstance(stream, io.StringIO) and not isinstance(stream, Gone):
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    write_stderr("words\n")


def test_no_thread_starts_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a program ends, Python 3.12 starts no thread: the words are written without one."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    write_stderr("words\n")
    assert stream.getvalue() == "words\n"


def test_a_reader_that_does_not_keep_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets what was said first when it reads on; nobody waits for it, and what came after is dropped."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(writing, bytes(1 << 12))
    os.set_blocking(writing, True)
    with os.fdopen(reading, "rb") as pipe, os.fdopen(writing, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        began = time.monotonic()
        write_stderr("the first\n")
        write_stderr("the second\n")
        assert time.monotonic() - began < 20
        text = b""
        while b"first\n" not in text:
            text += pipe.read1()
        write_stderr("the third\n", timeout_s=20)  # the thread of the first may yet have to end
        text += pipe.read1()
    assert text.replace(b"\0", b"") == b"the first\nthe third\n"
