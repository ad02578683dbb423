"""Listening sockets of a job are on loopback only, without a store if private; ports never conflict."""

import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from rankwise.strategies import Strategy
from tests.helpers.parameters import first
from tests.helpers.scripts import ScriptRunner
from tests.process.helpers import ddp, with_tests

JOB = """
    import sys, time, pathlib
    import torch, torch.distributed as dist
    from rankwise.strategies import DDPStrategy
    from tests.process.training_tasks import Regression, loader, quiet_trainer

    def stay_up():
        dist.new_group([0, 1]).rank()
        print("up", flush=True)
        while not pathlib.Path("stop").exists():
            time.sleep(0.02)

    def job(strategy):
        strategy.all_reduce(torch.ones(1))
        stay_up()
        strategy.barrier()

    class Line(Regression):
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 1:
                stay_up()

    if __name__ == "__main__":
        how, what = sys.argv[1:]
        if how == "fit":
            quiet_trainer(what, 2, max_epochs=1).fit(Line(), loader(8, 2))
        else:
            options = {"rendezvous": what, "accelerator": "cpu", "devices": 2}
            DDPStrategy(start_method=how, **options).launch(job)
"""


@pytest.fixture(scope="module")
def namespace() -> Iterator[str]:
    """Make a network namespace with an address beside loopback."""
    if shutil.which("ip") is None or shutil.which("ss") is None:
        pytest.skip("needs the commands ip and ss (iproute2)")
    name = f"rankwise-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode != 0:
        pytest.skip(f"no network namespace can be made here: {made.stderr.strip()}")
    try:
        for command in (
            "link set lo up",
            "link add outside0 type veth peer name outside1",
            "addr add 10.77.3.1/24 dev outside0",
            "link set outside0 up",
            "link set outside1 up",
        ):
            done = subprocess.run(["ip", "-n", name, *command.split()], capture_output=True, text=True)
            if done.returncode != 0:
                pytest.skip(f"`ip {command}` is not possible here: {done.stderr.strip()}")
        yield name
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)


def _listeners(namespace: str) -> list[str]:
    """Return the address of each listening socket of the namespace."""
    command = ["ip", "netns", "exec", namespace, "ss", "-H", "-l", "-t", "-n"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [line.split()[3].rpartition(":")[0] for line in lines]


@pytest.mark.parametrize(
    "arguments",
    first(
        3,
        [
            *("popen private", "fork tcp", "fit ddp_notebook"),
            *("popen tcp", "fork private", "spawn private", "forkserver tcp", "fit ddp"),
        ],
    ),
)
def test_a_job_listens_on_loopback_only(arguments: str, namespace: str, run_script: ScriptRunner) -> None:
    """Every listening socket is on 127.0.0.1; a store has one only with `rendezvous="tcp"`."""
    running = run_script.start(JOB, *arguments.split(), place=(namespace, ""), env=with_tests(), siblings=1)
    running.wait_for("up", count=2)
    listeners = _listeners(namespace)
    (run_script.folder / "stop").touch()
    assert running.finish().returncode == 0
    of_gloo = 2 * 2  # one socket for each rank and group
    assert listeners == ["127.0.0.1"] * (of_gloo + ("tcp" in arguments))


def test_gloos_interface_is_the_users_if_he_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own `GLOO_SOCKET_IFNAME` is not changed."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert ddp("fork").launch(lambda strategy: os.environ["GLOO_SOCKET_IFNAME"]) == "lo"


def _total(strategy: Strategy) -> float:
    return float(strategy.all_reduce(torch.ones(1), reduce_op="sum"))


def _side_by_side(jobs: int, threads: int, rendezvous: str) -> list[float]:
    with ThreadPoolExecutor(threads) as pool:
        started = [pool.submit(ddp("fork", rendezvous).launch, _total) for _ in range(jobs)]
        return [job.result(timeout=150) for job in started]


@pytest.mark.parametrize("jobs", [4, pytest.param(34, marks=pytest.mark.soak)])
def test_jobs_meet_no_port_conflict(jobs: int) -> None:
    """Jobs with a TCP store each, of two independent programs."""
    with ProcessPoolExecutor(2, get_context("fork")) as pool:
        totals = [pool.submit(_side_by_side, jobs // 2, 1, "tcp") for _ in range(2)]
        assert [total for job in totals for total in job.result()] == [2.0] * jobs


@pytest.mark.soak
@pytest.mark.parametrize("jobs", [15, pytest.param(150, marks=pytest.mark.soak)])
@pytest.mark.parametrize("rendezvous", ["private", pytest.param("tcp", marks=pytest.mark.soak)])
def test_jobs_from_threads(rendezvous: str, jobs: int) -> None:
    """Jobs of one process, five side by side at any time, each from a thread of its own.

    Over TCP a fork may inherit a lock of the C library (docs/failures.md, "After a hang"), so that one hangs.
    """
    assert _side_by_side(jobs, 5, rendezvous) == [2.0] * jobs


def test_gloo_takes_no_connections_of_strangers(tmp_path: Path) -> None:
    """It listens only from when all ranks are there until they are connected; the program's servers go on."""
    before = socket.create_server(("127.0.0.1", 0))
    with before:
        states = ddp("fork").launch(connect_to_all, before.getsockname()[1], tmp_path / "serves")
    of_gloo = [False, False]  # of the default group and of the further one
    of_program = {"before": [True], "meanwhile": [True], "after": [True]}
    assert states == {"gloo": of_gloo, "opened while a rank was missing": [], **of_program}


def connect_to_all(strategy: Strategy, before: int, serves: Path) -> dict[str, list[bool]]:
    """Return whether connections to each listening socket of this process can be made.

    In another thread the program begins to serve while a group waits for its other rank.
    """
    names = {before: "before"}
    servers = []
    states: dict[str, list[bool]] = {}

    def serve_meanwhile(listening: int) -> None:
        time.sleep(0.3)  # of waiting for the other rank
        states["opened while a rank was missing"] = [True] * (len(listening_ports()) - listening)
        servers.append(socket.create_server(("127.0.0.1", 0)))
        serves.touch()

    thread = threading.Thread(target=serve_meanwhile, args=[len(listening_ports())])
    if strategy.is_global_zero:
        thread.start()
    while not strategy.is_global_zero and not serves.exists():
        time.sleep(0.001)
    dist.new_group([0, 1])
    if strategy.is_global_zero:
        thread.join()
        servers.append(socket.create_server(("127.0.0.1", 0)))
        for server, name in zip(servers, ("meanwhile", "after"), strict=True):
            names[server.getsockname()[1]] = name
        for port in listening_ports():
            states.setdefault(names.get(port, "gloo"), []).append(can_connect(port))
    strategy.all_reduce(torch.ones(1))
    for server in servers:
        server.close()
    return states


FLOODED = """
    import os, pathlib, resource, sys
    from rankwise.strategies import DDPStrategy
    import torch

    def job(strategy):
        total = strategy.all_reduce(torch.ones(1), reduce_op="sum")
        print("up", flush=True)
        while strategy.broadcast(not pathlib.Path("stop").exists()):
            with open(os.devnull):
                total = strategy.all_reduce(torch.ones(1), reduce_op="sum")
        return float(total)

    if __name__ == "__main__":
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        print(DDPStrategy(start_method=sys.argv[1], accelerator="cpu", devices=2).launch(job))
"""


@pytest.mark.parametrize("start_method", first(1, ["fork", "popen", "spawn", "forkserver"]))
def test_more_connections_than_a_rank_may_open_files(start_method: str, run_script: ScriptRunner) -> None:
    """Whoever makes them, to all that the job listens at, does not harm it."""
    running = run_script.start(FLOODED, start_method, siblings=1)
    running.wait_for("up", count=2)
    ports = [port for process in running.processes() for port in listening_ports(process)]
    assert len(ports) == 2
    with ExitStack() as opened:
        for port in ports * 300:
            connection = opened.enter_context(socket.socket())
            connection.setblocking(False)
            connection.connect_ex(("127.0.0.1", port))
        time.sleep(0.5)  # the job goes on meanwhile
        (run_script.folder / "stop").touch()
        result = running.finish().check_returncode()
    assert result.stdout.count("2.0") == (2 if start_method == "popen" else 1), result


def listening_ports(process: psutil.Process | None = None) -> list[int]:
    """Return the ports at which a process listens; this one by default."""
    connections = (process or psutil.Process()).net_connections("tcp")
    return [each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN]


def can_connect(port: int) -> bool:
    """Return whether a port takes a connection."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=0.5).close()
    except TimeoutError:
        return False
    return True
