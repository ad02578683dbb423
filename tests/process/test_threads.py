"""Threads: how many each rank has; and a launch from a thread that the end of the program ends."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.helpers.scripts import ScriptRunner
from tests.process.helpers import TORCHRUN, with_tests

SCRIPT = """
    import sys, threading, time
    from pathlib import Path
    from rankwise.strategies import DDPStrategy

    def job(strategy):
        strategy.barrier()
        Path(f"busy{strategy.global_rank}").touch()
        time.sleep(60)

    def launch():
        try:
            DDPStrategy(start_method=sys.argv[1], accelerator="cpu", devices=2).launch(job)
        finally:
            time.sleep(0.2)  # a thread that is late to leave
            Path("left").touch()

    if __name__ == "__main__":
        threading.Thread(target=launch, daemon=True).start()
        while not all(Path(f"busy{rank}").exists() for rank in range(2)):
            time.sleep(0.02)
        print("both busy", flush=True)
        if sys.argv[2] == "raise":
            raise ValueError("in the main thread")
"""


@pytest.mark.parametrize(
    ("method", "how"),
    [
        ("fork", "return"),
        pytest.param("fork", "raise", marks=pytest.mark.soak),
        *(pytest.param(each, "return", marks=pytest.mark.soak) for each in ("spawn", "forkserver", "popen")),
    ],
)
def test_a_daemon_thread_that_launched(method: str, how: str, run_script: ScriptRunner) -> None:
    """The main thread ends the script first: the program ends after `launch`, and leaves no process."""
    running = run_script.start(SCRIPT, method, how)
    running.wait_for("both busy", timeout=50)
    result = running.finish(timeout=30, leftover_grace_s=20)  # of the time that unloading torch takes
    result.check_returncode(int(how == "raise"))
    assert Path(run_script.folder, "left").exists() or method == "popen"  # whose rank 0 is the thread


COUNT = """
    import json, sys, threading
    from rankwise.callbacks import Callback
    from tests.process.training_tasks import Regression, loader, quiet_trainer

    class Count(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if batch_idx == 2:
                names = sorted(each.name for each in threading.enumerate() if "rankwise-" in each.name)
                print(json.dumps([trainer.global_rank, names]), flush=True)

    if __name__ == "__main__":
        for strategy in sys.argv[1:]:
            quiet_trainer(strategy, 2, max_epochs=1, callbacks=Count()).fit(Regression(), loader(64, 2))
"""


@pytest.mark.parametrize(
    ("strategies", "launcher"),
    [
        *(("ddp_fork", ()), ("ddp", ())),
        pytest.param("ddp_elastic", (), marks=pytest.mark.soak),
        pytest.param("ddp_forkserver ddp_spawn", (), marks=pytest.mark.soak),
        pytest.param("ddp", TORCHRUN, marks=pytest.mark.soak),
    ],
)
def test_a_rank_has_few_threads(strategies: str, launcher: Iterable[str], run_script: ScriptRunner) -> None:
    """While it trains, a rank has at most two threads of ours beside the main one."""
    names = strategies.split()
    command = [sys.executable, *launcher, str(run_script.write(COUNT)), *names]
    result = run_script.command(command, env=with_tests(), siblings=1).check_returncode()
    counted = sorted(map(json.loads, result.stdout.splitlines()))
    assert [rank for rank, _ in counted] == [0] * len(names) + [1] * len(names)
    assert all(1 <= len(names) <= 2 for _, names in counted), counted
