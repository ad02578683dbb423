"""One supervisor with many workers on a node: forked processes that use its store, and do nothing else."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import socket
import sys
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

from benchmarks.programs import run_ranks
from rankwise.errors import WorkerError
from rankwise.launchers.channel import REQUEST_ID_SIZE, FrameReader, Kind, frame
from rankwise.launchers.context import WorkerContext
from rankwise.launchers.supervisor import SupervisionOptions
from rankwise.launchers.worker_group import WorkerGroup, WorkerLinks
from rankwise.processes.started_process import MultiprocessingProcess
from rankwise.ranks import RankInfo
from rankwise.stores.private import pack_fields

_REQUESTS = 20
_SETTLE_S = 0.2
_CHUNK = 1 << 16


def measure(workers: int) -> dict[str, float]:
    """Return seconds: to start all workers, of a store request, and from one's death to the end of all."""
    found: dict[str, float] = run_ranks("benchmarks.supervised", {"workers": workers})
    return found


def _work(channel: socket.socket, number: int, workers: int) -> None:
    """Run as a worker: send requests, wait until all have; wait for the end."""
    channel.setblocking(True)
    channel.sendall(frame(Kind.HELLO))
    begun = time.perf_counter()
    for _ in range(_REQUESTS):
        _ask(channel, b"add", b"count", b"1")
    spent = (time.perf_counter() - begun) / _REQUESTS
    _ask(channel, b"set", b"ready/%d" % number, b"%f" % spent)
    _ask(channel, b"wait", *(b"ready/%d" % each for each in range(workers)))
    if number == workers - 1:
        values = [float(_ask(channel, b"get", b"ready/%d" % each)) for each in range(workers)]
        Path(os.environ["SUPERVISED"]).write_text(json.dumps(sorted(values)[workers // 2]))
        time.sleep(_SETTLE_S)
        Path(os.environ["SUPERVISED"] + ".died").write_text(repr(time.perf_counter()))
        os.kill(os.getpid(), signal.SIGKILL)
    channel.recv(_CHUNK)  # STOP
    os._exit(0)


def _ask(channel: socket.socket, *fields: bytes) -> bytes:
    channel.sendall(frame(Kind.STORE_REQUEST, bytes(REQUEST_ID_SIZE) + pack_fields(fields)))
    reader, received = FrameReader(), list[tuple[Kind, bytes]]()
    while not received:
        reader.feed(channel.recv(_CHUNK), lambda *each: received.append(each))
    kind, payload = received[0]
    if kind is not Kind.STORE_REPLY:
        os._exit(0)  # STOP
    return payload[REQUEST_ID_SIZE:]


def _start(context: WorkerContext, links: WorkerLinks) -> MultiprocessingProcess:
    ranks = context.ranks
    arguments = (links.channel, ranks.global_rank, ranks.world_size)
    process = multiprocessing.get_context("fork").Process(target=_work, args=arguments)
    process.start()
    return MultiprocessingProcess(process, links.parent_pipe)


def main() -> None:
    """Run as a program: start the workers, let them work, and see the last one die."""
    request = json.loads(sys.argv[1])
    workers, folder = request["workers"], Path(request["folder"])
    os.environ["SUPERVISED"] = str(folder / "spent")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    ranks = [RankInfo(number, number, 0, workers, workers, 1) for number in range(workers)]
    options = SupervisionOptions(grace_period_s=5.0, init_timeout=timedelta(minutes=5))
    with ExitStack() as opened:
        begun = time.perf_counter()
        group = WorkerGroup(ranks, options, 1)
        opened.callback(group.close)
        group.start(ranks, _start)
        group.supervisor.start()
        started = time.perf_counter() - begun
        group.supervisor.begin_job(until_exit=True)
        try:
            group.supervisor.wait_job()
        except WorkerError:
            gone = time.perf_counter()
        else:
            raise RuntimeError("the supervisor has not seen that a worker was killed")
    died = float((folder / "spent.died").read_text())
    spent = float(json.loads((folder / "spent").read_text()))
    result = {"start": started, "request": spent, "end": gone - died}
    (folder / "result").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
