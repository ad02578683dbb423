"""How a process exits: the exit code of a failed job's script, and text on stderr."""

import io
import os
import sys
import threading
import time

import pytest

from rankwise.errors import WorkerError, WorkerExitedError, WorkerKilledError, WorkerRaisedError
from rankwise.processes.exit_codes import exit_code_kept, exit_code_of, write_stderr

PLACE = (1, 1, 0, 100)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (WorkerRaisedError(*PLACE), 1),
        (WorkerKilledError(*PLACE, signal_number=9), 137),
        (WorkerKilledError(*PLACE, signal_number=1 << 63), 128),
        (WorkerExitedError(*PLACE, exit_code=3), 3),
        (WorkerExitedError(*PLACE, exit_code=0), 1),
        (WorkerExitedError(*PLACE, exit_code=256), 1),
    ],
    ids=["raised", "killed", "killed by no signal", "exited", "exited early", "more than a byte"],
)
def test_codes(error: WorkerError, code: int) -> None:
    """As a shell gives them."""
    assert exit_code_of(error) == code


def test_pytest_catches_everything() -> None:
    """Here no exception ends the interpreter: no hook is set, and the error comes through."""
    before, error = sys.excepthook, WorkerExitedError(*PLACE, exit_code=3)
    with pytest.raises(WorkerExitedError) as caught, exit_code_kept():
        raise error
    assert caught.value is error
    assert sys.excepthook is before


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
