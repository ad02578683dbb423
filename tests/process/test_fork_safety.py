"""Forking a process that has used several threads; what a rank forks ends with it."""

import gc
import os
import signal

import psutil
import pytest
import torch

from rankwise.testing import run_distributed
from tests.helpers.load import slowdown
from tests.helpers.processes import wait_until_gone
from tests.helpers.scripts import ScriptRunner
from tests.process.helpers import ddp, with_tests

SOAK = pytest.mark.soak
HEAVY = """
    import sys, threading
    import torch
    from rankwise.strategies import DDPStrategy
    from torch import nn

    def work():
        model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
        for _ in range(5):
            model(torch.randn(512, 256)).sum().backward()

    def job(strategy):
        work()
        model = strategy.setup_module(nn.Linear(512, 512))
        for _ in range(3):
            model(torch.randn(512, 512)).square().mean().backward()
        return torch.get_num_threads()

    if __name__ == "__main__":
        torch.set_num_threads(2)
        work()
        threads = [threading.Thread(target=work) for _ in range(2)]  # pools of other threads' own
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        for _ in range(2):
            work()
            strategy = DDPStrategy(start_method=sys.argv[1], accelerator="cpu", devices=2)
            print("threads", strategy.launch(job), flush=True)
            work()  # the caller's own pool is whole again
        print(torch.get_num_threads())
"""


@pytest.mark.parametrize("start_method", ["fork", pytest.param("forkserver", marks=SOAK)])
def test_forking_after_parallel_work_trains(start_method: str, run_script: ScriptRunner) -> None:
    """After parallel work on two threads, forked ranks train on two threads each, in two launches."""
    result = run_script(HEAVY, start_method, env={"OMP_NUM_THREADS": "2"}, timeout=90)
    assert (result.returncode, result.stdout) == (0, "threads 2\nthreads 2\n2\n"), result


@pytest.mark.parametrize("is_frozen", [False, True], ids=["as_usual", "by_the_program"])
def test_a_forks_collections_leave_out_what_it_inherits(is_frozen: bool) -> None:
    """They would copy its memory. The caller's objects stay frozen only if the program froze them."""
    if is_frozen:
        gc.freeze()
    try:
        strategy = ddp("fork")
        strategy.launch(lambda _: gc.get_freeze_count())
        assert min(strategy.results.values()) > 10_000
        assert (gc.get_freeze_count() > 0) == is_frozen
    finally:
        gc.unfreeze()


IMPORTS = """
    import sys
    from pathlib import Path
    from tests.process.training_tasks import Regression, loader, quiet_trainer

    class Listing(Regression):
        def on_train_end(self):
            Path(f"rank{self.global_rank}").write_text(" ".join(sys.modules))

    quiet_trainer("ddp_fork", 2, max_epochs=1).fit(Listing(), loader(8, 4))
    for rank in range(2):
        added = {*Path(f"rank{rank}").read_text().split()} - {*sys.modules}
        print(sorted(name for name in added if not name.startswith("torch.")))
"""


def test_forked_ranks_import_nothing(run_script: ScriptRunner) -> None:
    """What a fit needs beside torch is imported in the main process: once, and in memory that ranks share."""
    assert run_script(IMPORTS, env=with_tests(), fresh=True).stdout == "[]\n[]\n"


def test_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `OMP_NUM_THREADS` the ranks do not take more threads together than there are cores."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    threads = run_distributed(lambda _: torch.get_num_threads())
    assert sum(threads) <= max(2, len(os.sched_getaffinity(0)))


GONE_S = 4.0
"""The limit for processes that were told to end. A loader's worker that notices itself takes over 5 s."""


MAIN_KILLED = """
    import sys
    from rankwise.strategies import DDPStrategy
    from tests.process.test_loader_workers import Busy
    from torch.utils.data import DataLoader

    def job(strategy):
        for _ in DataLoader(Busy("."), num_workers=2):
            print("loading", flush=True)

    if __name__ == "__main__":
        DDPStrategy(start_method=sys.argv[1], accelerator="cpu", devices=2).launch(job)
"""
ENVIRONMENT = with_tests({"PYTEST_CURRENT_TEST": None})  # the program imports pytest, and is not run by it


@pytest.mark.parametrize(
    "start_method", ["popen", "fork", *(pytest.param(m, marks=SOAK) for m in ("spawn", "forkserver"))]
)
def test_data_workers_leave_with_the_main_process(start_method: str, run_script: ScriptRunner) -> None:
    """After SIGKILL of the main process the ranks and their sleeping loader workers end at once."""
    running = run_script.start(MAIN_KILLED, start_method, env=ENVIRONMENT, siblings=1)
    running.wait_for("loading", count=2)
    assert len(running.processes()) >= 6
    running.send_signal(signal.SIGKILL)
    assert running.finish(leftover_grace_s=GONE_S).returncode == -signal.SIGKILL


def test_the_callers_own_data_workers_do_not_hold_ranks(run_script: ScriptRunner) -> None:
    """Loader workers that the main process has forked do not keep the ranks alive when it is killed."""
    loader = "DataLoader([0, 1], num_workers=1, persistent_workers=True)"
    begin = f"        iterator = iter({loader})\n        next(iterator)\n"
    source = MAIN_KILLED.replace("        DDPStrategy(", f"{begin}        DDPStrategy(")
    running = run_script.start(source, "fork", env=ENVIRONMENT)
    running.wait_for("loading", count=2)
    ranks = [p for p in psutil.Process(running.pid).children() if len(p.children()) == 2]
    assert len(ranks) == 2
    running.send_signal(signal.SIGKILL)
    running.popen.wait(20)
    assert wait_until_gone(lambda: ranks, GONE_S * slowdown()) == []
    # the loader worker that is the user's own notices by itself, some seconds later: torch's way
    running.finish(leftover_grace_s=30.0)
