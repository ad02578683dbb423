"""Forking a process that has used several threads; what a rank forks ends with it."""

import gc
import os
import signal

import psutil
import pytest
import torch

from rankwise.testing import run_distributed
from tests.helpers.load import slowdown
from tests.helpers.parameters import first
from tests.helpers.processes import wait_until_gone
from tests.helpers.scripts import ScriptRunner
from tests.process.helpers import METHODS, combinations, ddp, in_scripts, with_tests

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


@pytest.mark.soak
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


@pytest.mark.soak
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


@pytest.mark.parametrize("start_method", first(2, ["popen", "fork", "spawn", "forkserver"]))
def test_data_workers_leave_with_the_main_process(start_method: str, run_script: ScriptRunner) -> None:
    """After SIGKILL of the main process the ranks and their sleeping loader workers end at once."""
    running = run_script.start(MAIN_KILLED, start_method, env=in_scripts(), siblings=1)
    running.wait_for("loading", count=2)
    assert len(running.processes()) >= 6
    running.send_signal(signal.SIGKILL)
    assert running.finish(leftover_grace_s=GONE_S).returncode == -signal.SIGKILL


def test_the_callers_own_data_workers_do_not_hold_ranks(run_script: ScriptRunner) -> None:
    """Loader workers that the main process has forked do not keep the ranks alive when it is killed."""
    loader = "DataLoader([0, 1], num_workers=1, persistent_workers=True)"
    begin = f"        iterator = iter({loader})\n        next(iterator)\n"
    source = MAIN_KILLED.replace("        DDPStrategy(", f"{begin}        DDPStrategy(")
    running = run_script.start(source, "fork", env=in_scripts())
    running.wait_for("loading", count=2)
    ranks = [p for p in psutil.Process(running.pid).children() if len(p.children()) == 2]
    assert len(ranks) == 2
    running.send_signal(signal.SIGKILL)
    running.popen.wait(20)
    assert wait_until_gone(lambda: ranks, GONE_S * slowdown()) == []
    # the loader worker that is the user's own notices by itself, some seconds later: torch's way
    running.finish(leftover_grace_s=30.0)


FORKS = """
    import os, signal, sys, time
    from pathlib import Path
    from rankwise.errors import WorkerKilledError
    from rankwise.strategies import DDPStrategy

    PID = Path("pid")

    def fork(state):
        if os.fork() == 0:
            PID.write_text(str(os.getpid()))
            if state == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            sum(range(10**12))  # in one call of C code, with the interpreter's lock
        while not PID.exists() or not PID.read_text():
            time.sleep(0.01)

    def is_gone():
        try:
            return Path(f"/proc/{PID.read_text()}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            return True

    def job(strategy, state, end):
        strategy.barrier()
        if strategy.global_rank == 1:
            fork(state)
        if end == "killed":
            os.kill(os.getpid(), signal.SIGKILL) if strategy.global_rank == 1 else time.sleep(60)
        return time.monotonic()

    if __name__ == "__main__":
        strategy = DDPStrategy(accelerator="cpu", devices=2, start_method=sys.argv[1])
        try:
            ended_s = strategy.launch(job, *sys.argv[2:])
            result = time.monotonic() - ended_s
        except WorkerKilledError as error:
            result = error.global_rank
        if strategy.is_global_zero:
            print(result, flush=True)
            while not is_gone():
                time.sleep(0.01)
            print("gone")
"""


KILLED = [("busy", "fork", "killed"), ("stopped", "popen", "killed")]
LEFT = [("busy", "popen", "left"), ("stopped", "fork", "left")]


# By default these are all pairs of two of the values.
@pytest.mark.parametrize(
    ("state", "method", "end"),
    combinations(("busy", "stopped"), (*METHODS, "popen"), ("killed", "left"), quick=[*KILLED, *LEFT]),
)
def test_a_process_that_a_rank_has_forked(
    state: str, method: str, end: str, run_script: ScriptRunner
) -> None:
    """It ends with the rank, also while C code holds its interpreter's lock, or while it is suspended.

    A launch whose ranks have returned does not wait for it.
    """
    result = run_script(FORKS, method, state, end, siblings=1)
    found, gone = result.stdout.split()
    assert (result.returncode, gone) == (0, "gone"), result
    assert found == "1" if end == "killed" else float(found) < 4 * slowdown(), result
