"""DataLoader workers that are stuck: they leave when their rank wants it, or is gone, and for nobody else."""

from __future__ import annotations

import signal
import time

import psutil
import pytest

from tests.helpers.scripts import ScriptRunner

pytestmark = pytest.mark.timeout(60)

STUCK = """
    import os, signal, sys, time
    from torch.utils.data import DataLoader, Dataset
    from rankwise.launchers._signals import handled
    from rankwise.strategies import SingleDeviceStrategy

    class Stuck(Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            print("stuck", flush=True)
            time.sleep(600)

    def load(strategy, seconds):
        global batches  # so that only the interpreter's exit lets go of it
        with handled([signal.SIGTERM]):  # as in a fit
            batches = iter(DataLoader(Stuck(), num_workers=2, multiprocessing_context="fork"))
        time.sleep(seconds)

    for seconds in (1.5, 60):
        if pid := os.fork():
            print(f"rank {pid}", flush=True)
            continue
        SingleDeviceStrategy(accelerator="cpu").launch(load, seconds)
        sys.exit()
    for _ in range(2):
        pid, status = os.wait()
        print("ended", os.waitstatus_to_exitcode(status), flush=True)
"""


def test_a_stuck_worker_ends_with_its_rank(run_script: ScriptRunner) -> None:
    """A SIGTERM to all does not end it; the rank's, as it leaves its interpreter, or its death does."""
    running = run_script.start(STUCK)
    running.wait_for("stuck", count=4)
    ranks = [int(line.split()[1]) for line in running.stdout.splitlines() if line.startswith("rank")]
    workers = [child for rank in ranks for child in psutil.Process(rank).children()]
    assert len(workers) == 4
    for worker in workers:
        worker.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert all(worker.status() != psutil.STATUS_ZOMBIE for worker in workers)
    running.wait_for("ended 0", timeout=5)
    psutil.Process(ranks[1]).kill()
    assert "ended -9" in running.finish(timeout=5).stdout
