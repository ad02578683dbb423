"""The program of a rank that was started by a command: connect to the launching process, and be its worker.

python -m rankwise.launchers.commands.worker HOST PORT GLOBAL_RANK
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import sys
import threading
import time
from functools import partial
from multiprocessing import spawn
from typing import Any

from rankwise.launchers.channel import Kind, RankChannel
from rankwise.launchers.commands import connection
from rankwise.launchers.commands.connection import Purpose
from rankwise.launchers.context import Entry, WorkerContext
from rankwise.launchers.worker_main import open_channel, run_worker
from rankwise.monitoring.heartbeat import LEAVING, NO_FILE, contents_of_page, report_phase
from rankwise.processes.parent_death import end_with_peer
from rankwise.start import JOB_KEY

_HEARTBEAT_S = 0.2


def run_rank(host: str, port: str, rank: str) -> None:
    """Run one job as a rank."""
    if not (key := os.fsencode(os.environ.pop(JOB_KEY, ""))):
        sys.exit(f"rankwise: {JOB_KEY} is not set: start() has to set the variables that it is given.")
    open_connection = partial(connection.connect, (host, int(port)), key, global_rank=int(rank))
    lifeline = open_connection(Purpose.LIFELINE)
    end_with_peer(lifeline.sock.fileno())
    sock, clock_offset_s = open_connection(Purpose.CHANNEL)
    worker, entry = _receive_job(sock)
    worker.key, worker.clock_offset_s = key, clock_offset_s
    worker.channel = open_channel(sock, NO_FILE)
    sending = (worker.channel, clock_offset_s)
    threading.Thread(target=_send_heartbeats, args=sending, name="rankwise-heartbeat", daemon=True).start()
    run_worker(entry, worker, partial(_return_value, open_connection), on_failure=lambda error: 1)
    report_phase(LEAVING)


def _receive_job(sock: socket.socket) -> tuple[WorkerContext, Entry]:
    """Return the rank's context and its entry, which imports the main module first."""
    from rankwise.processes.memory_file import create_memory_file

    worker, preparation = pickle.loads(connection.receive_bytes(sock))
    entry = create_memory_file()
    connection.receive_file(sock, entry)
    return worker, partial(_run, preparation, entry)


def _run(preparation: dict[str, Any], entry: int, worker: WorkerContext) -> Any:
    """Import the main module, with multiprocessing's data for that, then run the entry."""
    from rankwise.processes.memory_file import unpack

    process: Any = multiprocessing.process.current_process()
    process._inheriting = True  # what the main module starts meanwhile is refused
    try:
        spawn.prepare(preparation)  # also sets the default start method
        function = unpack(entry, copy=False)
    finally:
        del process._inheriting
    return function(worker)


def _return_value(open_connection: Any, value: object) -> None:
    from rankwise.processes.memory_file import create_memory_file, pack

    descriptor = create_memory_file()
    pack(value, descriptor)
    with open_connection(Purpose.VALUE).sock as sock:
        connection.send_file(sock, descriptor)
        if not sock.recv(1):
            raise EOFError("the launching process has not taken what this rank returned")


def _send_heartbeats(channel: RankChannel, clock_offset_s: float) -> None:
    last = b""
    while True:
        if (contents := contents_of_page(clock_offset_s)) != last:
            channel.send(Kind.HELLO, contents)
            last = contents
        time.sleep(_HEARTBEAT_S)


if __name__ == "__main__":
    run_rank(*sys.argv[1:])
