"""Both ends of a rank's connection prove that they have the job's key."""

import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest

from rankwise.errors import PeerAuthenticationError
from rankwise.launchers.commands.connection import (
    Introduction,
    Purpose,
    accept,
    connect,
    receive_bytes,
    receive_file,
    send_bytes,
    send_file,
)
from rankwise.processes.memory_file import create_memory_file

KEY = b"a key of the job"


@contextmanager
def listening(key: bytes) -> Iterator[tuple[tuple[str, int], Future[Any]]]:
    """Accept one connection in a thread, as the launching process does; provide its address and outcome."""
    outcome: Future[Any] = Future()

    def serve() -> None:
        sock, _ = listener.accept()
        with sock:
            try:
                outcome.set_result(accept(sock, key))
            except Exception as error:
                outcome.set_exception(error)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname(), outcome
        thread.join(20)


def test_an_introduction() -> None:
    """The launching process learns which rank has connected, and for what; both have one clock."""
    with listening(KEY) as (address, outcome):
        connection = connect(address, KEY, Purpose.VALUE, 3)
        with connection.sock:
            expected = Introduction(Purpose.VALUE, 3, os.getpid(), socket.gethostname())
            assert outcome.result(20) == expected
            assert connection.clock_offset_s == 0.0


def test_a_launching_process_without_the_key() -> None:
    """The rank sends it nothing that needs the key."""
    with listening(b"another key") as (address, outcome):
        with pytest.raises(PeerAuthenticationError, match="does not have the job's key"):
            connect(address, KEY, Purpose.CHANNEL, 0)
        with pytest.raises((EOFError, OSError)):
            outcome.result(20)


def test_a_process_without_the_key() -> None:
    """It is not taken for a rank, whatever it claims, also if it sends back what it has received."""
    with listening(KEY) as (address, outcome), socket.create_connection(address) as sock:
        sock.sendall(bytes(32))
        sock.recv(32 + 8 + 32, socket.MSG_WAITALL)
        sock.sendall(b"\0\2{}" + bytes(32))
        with pytest.raises(PeerAuthenticationError, match="without the job's key"):
            outcome.result(20)


def test_files() -> None:
    """Contents arrive as they were, and a connection that is cut is an error."""
    one, other = socket.socketpair()
    with one, other:
        sent, received = create_memory_file(), create_memory_file()
        os.write(sent, b"x" * 100_000)

        def send() -> None:
            send_file(one, sent)
            send_bytes(one, b"end")
            one.close()

        sending = threading.Thread(target=send)
        sending.start()
        receive_file(other, received)
        assert os.pread(received, 200_000, 0) == b"x" * 100_000
        assert receive_bytes(other) == b"end"
        with pytest.raises(EOFError):
            receive_bytes(other)
        sending.join()
        os.close(sent)
        os.close(received)
