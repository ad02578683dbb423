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
from tests.helpers.scripts import ScriptRunner
from tests.process.helpers import ddp

JOB = """
    import sys, time, pathlib
    import rankwise
    from rankwise.strategies import DDPStrategy
    import torch, torch.distributed as dist

    def job(strategy, stop):
        dist.new_group([0, 1]).rank()
        strategy.all_reduce(torch.ones(1))
        sys.stdout.write("up\\n")
        sys.stdout.flush()
        while not pathlib.Path(stop).exists():
            time.sleep(0.02)
        strategy.barrier()

    if __name__ == "__main__":
        start_method, rendezvous, stop = sys.argv[1:]
        strategy = DDPStrategy(
            start_method=start_method, rendezvous=rendezvous, accelerator="cpu", devices=2
        )
        strategy.launch(job, stop)
"""


FIT = """
    import sys, time, pathlib
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    from rankwise import Trainer, TrainingModule
    import torch.distributed as dist

    class Line(TrainingModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch, batch_idx):
            if batch_idx == 1:
                dist.new_group([0, 1]).rank()
                sys.stdout.write("up\\n")
                sys.stdout.flush()
                while not pathlib.Path(sys.argv[2]).exists():
                    time.sleep(0.02)
            return self.layer(batch[0]).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    if __name__ == "__main__":
        trainer = Trainer(strategy=sys.argv[1], accelerator="cpu", devices=2, max_epochs=1, logger=False,
                          enable_checkpointing=False, enable_progress_bar=False)
        trainer.fit(Line(), DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2))
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
    ("start_method", "rendezvous"),
    [
        ("popen", "private"),
        ("fork", "tcp"),
        pytest.param("popen", "tcp", marks=pytest.mark.soak),
        pytest.param("fork", "private", marks=pytest.mark.soak),
        pytest.param("spawn", "private", marks=pytest.mark.soak),
        pytest.param("forkserver", "tcp", marks=pytest.mark.soak),
    ],
)
def test_a_job_listens_on_loopback_only(
    start_method: str, rendezvous: str, namespace: str, run_script: ScriptRunner, tmp_path: Path
) -> None:
    """Every listening socket is on 127.0.0.1; a store has one only with `rendezvous="tcp"`."""
    stop = tmp_path / "stop"
    running = run_script.start(JOB, start_method, rendezvous, str(stop), namespace=namespace, siblings=1)
    running.wait_for("up", count=2)
    listeners = _listeners(namespace)
    stop.touch()
    assert running.finish().returncode == 0
    assert set(listeners) == {"127.0.0.1"}
    of_gloo = 2 * 2  # one socket for each rank and group
    assert len(listeners) == of_gloo + (rendezvous == "tcp")


@pytest.mark.parametrize("strategy", ["ddp_notebook", pytest.param("ddp", marks=pytest.mark.soak)])
def test_a_fit_listens_on_loopback_only(
    strategy: str, namespace: str, run_script: ScriptRunner, tmp_path: Path
) -> None:
    """During `fit`, after `new_group`: each rank's two gloo sockets are all that listens, on 127.0.0.1."""
    stop = tmp_path / "stop"
    running = run_script.start(FIT, strategy, str(stop), namespace=namespace)
    running.wait_for("up", count=2)
    listeners = _listeners(namespace)
    stop.touch()
    assert running.finish().returncode == 0
    assert listeners == ["127.0.0.1"] * 4


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


@pytest.mark.parametrize("jobs", [15, pytest.param(150, marks=pytest.mark.soak)])
@pytest.mark.parametrize("rendezvous", ["private", "tcp"])
def test_jobs_from_threads(rendezvous: str, jobs: int) -> None:
    """Jobs of one process, five side by side at any time, each from a thread of its own."""
    assert _side_by_side(jobs, 5, rendezvous) == [2.0] * jobs


def test_gloo_takes_no_connections_of_strangers(tmp_path: Path) -> None:
    """It listens only from when all ranks are there until they are connected; the program's servers go on."""
    before = socket.create_server(("127.0.0.1", 0))
    with before:
        states = ddp("fork").launch(connect_to_all, before.getsockname()[1], tmp_path / "serves")
    assert states.pop("gloo") == [False, False]  # of the default group and of the further one
    assert states == {
        "opened while a rank was missing": [],
        "before": [True],
        "meanwhile": [True],
        "after": [True],
    }


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
        names |= {
            server.getsockname()[1]: name
            for server, name in zip(servers, ("meanwhile", "after"), strict=True)
        }
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

    def job(strategy, stop):
        total = strategy.all_reduce(torch.ones(1), reduce_op="sum")
        sys.stdout.write("up\\n")
        sys.stdout.flush()
        while strategy.broadcast(not pathlib.Path(stop).exists()):
            with open(os.devnull):
                total = strategy.all_reduce(torch.ones(1), reduce_op="sum")
        return float(total)

    if __name__ == "__main__":
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        print(DDPStrategy(start_method=sys.argv[1], accelerator="cpu", devices=2).launch(job, sys.argv[2]))
"""


@pytest.mark.parametrize(
    "start_method",
    ["fork", "popen", *(pytest.param(each, marks=pytest.mark.soak) for each in ("spawn", "forkserver"))],
)
def test_more_connections_than_a_rank_may_open_files(
    start_method: str, run_script: ScriptRunner, tmp_path: Path
) -> None:
    """Whoever makes them, to all that the job listens at, does not harm it."""
    running = run_script.start(FLOODED, start_method, str(tmp_path / "stop"))
    running.wait_for("up", count=2)
    ports = [port for process in running.processes() for port in listening_ports(process)]
    assert len(ports) == 2
    with ExitStack() as opened:
        for port in ports * 300:
            connection = opened.enter_context(socket.socket())
            connection.setblocking(False)
            connection.connect_ex(("127.0.0.1", port))
        time.sleep(0.5)  # the job goes on meanwhile
        (tmp_path / "stop").touch()
        result = running.finish()
    assert result.returncode == 0, result
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
