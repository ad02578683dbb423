"""Stuck DataLoader workers end when their rank ends them or exits, and for no other reason."""

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.utils.data import DataLoader, Dataset

from rankwise.data.batches import described_batches
from rankwise.strategies import Strategy
from tests.helpers import processes
from tests.helpers.load import slowdown
from tests.helpers.scripts import ScriptRunner
from tests.process.helpers import combinations, ddp, in_scripts

STUCK = """
    import os, signal, sys, time
    from pathlib import Path
    from torch.utils.data import DataLoader, Dataset
    from rankwise.processes.signals import ROUTER
    from rankwise.strategies import SingleDeviceStrategy

    class Stuck(Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            print("stuck", flush=True)
            time.sleep(600)

    def load(strategy, number):
        global batches  # so that only the interpreter's exit lets go of it
        with ROUTER.subscribe([signal.SIGTERM], print):  # as in a fit
            batches = iter(DataLoader(Stuck(), num_workers=2, multiprocessing_context="fork"))
        while number or not Path("leave").exists():
            time.sleep(0.02)

    for number in range(2):
        if pid := os.fork():
            sys.stdout.write(f"rank {pid}\\n")  # in one piece: others print too
            sys.stdout.flush()
            continue
        SingleDeviceStrategy(accelerator="cpu").launch(load, number)
        sys.exit()
    for _ in range(2):
        pid, status = os.wait()
        print("ended", os.waitstatus_to_exitcode(status), flush=True)
"""


@pytest.mark.quick
def test_a_stuck_worker_ends_with_its_rank(run_script: ScriptRunner) -> None:
    """SIGTERM from outside does not end a worker; the rank's own at its exit, or its death, does."""
    running = run_script.start(STUCK)
    running.wait_for("stuck", count=4)
    ranks = [int(pid) for pid in re.findall(r"rank (\d+)\n", running.stdout)]
    workers = [child for rank in ranks for child in psutil.Process(rank).children()]
    assert len(workers) == 4
    for worker in workers:
        worker.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert all(worker.status() != psutil.STATUS_ZOMBIE for worker in workers)
    (run_script.folder / "leave").touch()
    running.wait_for("ended 0", timeout=30)
    psutil.Process(ranks[1]).kill()
    assert "ended -9" in running.finish(timeout=30).stdout


class Busy(Dataset[int]):
    """Numbers, of which each but the first takes minutes; the worker first writes down its pid."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index > 0:
            Path(self.folder, f"{os.getpid()}").touch()
            time.sleep(600)
        return index


def load_and_die(strategy: Strategy, folder: str, method: str) -> None:
    batches = iter(DataLoader(Busy(folder), num_workers=2, multiprocessing_context=method))
    next(batches)
    while len(list(Path(folder).iterdir())) < 2 * strategy.world_size:
        time.sleep(0.05)
    if strategy.global_rank > 0:
        os.kill(os.getpid(), signal.SIGKILL)
    next(batches)


def alive_after(seconds: float, folder: Path) -> list[psutil.Process]:
    pids = {int(path.name) for path in folder.iterdir()}
    assert len(pids) == 4
    return processes.wait_until_gone(lambda: [p for p in psutil.process_iter() if p.pid in pids], seconds)


SCRIPT = """
    import sys
    from rankwise.errors import WorkerKilledError
    from tests.process.helpers import ddp
    from tests.process.test_loader_workers import load_and_die

    if __name__ == "__main__":
        try:
            ddp(sys.argv[1]).launch(load_and_die, *sys.argv[2:])
        except WorkerKilledError as error:
            print("killed", error.global_rank, flush=True)
"""


@pytest.mark.parametrize(
    ("start_method", "method"),
    combinations(
        ("fork", "forkserver", "popen"),
        ("fork", "forkserver", "spawn"),
        quick=[("fork", "fork"), ("forkserver", "fork")],
    ),
)
def test_a_busy_worker_that_is_no_fork_ends_with_its_rank(
    start_method: str, method: str, tmp_path: Path, run_script: ScriptRunner
) -> None:
    """The rank that is killed takes its worker along; so does the one that is then ended."""
    # In a script: in pytest's own process another test may have started a resource tracker, which then clears
    # up after these ranks only when pytest ends.
    (folder := tmp_path / "pids").mkdir()
    running = run_script.start(SCRIPT, start_method, str(folder), method, env=in_scripts(), siblings=1)
    running.wait_for("killed 1", timeout=90)
    # A fork that notices by itself that its rank is gone takes over 5 s.
    assert not alive_after(slowdown() * (4.0 if method == "fork" else 10.0), folder)
    assert running.finish(timeout=60).returncode == 0


class Blocked(Dataset[bool]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> bool:
        return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def blocked_while_loading(strategy: Strategy, method: str) -> list[bool]:
    with_worker: Any = {"num_workers": 1, "multiprocessing_context": method}
    loaders = (DataLoader(Blocked()), DataLoader(Blocked(), **with_worker))
    return [bool(batch) for loader in loaders for batch, *_ in described_batches(loader)()]


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.soak)])
def test_ctrl_c_does_not_end_a_worker(method: str) -> None:
    """A terminal sends SIGINT to the workers too, whose batches the rank needs until it stops."""
    assert ddp("fork").launch(blocked_while_loading, method) == [False, True]
