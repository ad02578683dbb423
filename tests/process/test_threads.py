"""Threads: how many each rank has; and a launch from a thread that the end of the program ends."""

import json
import sys

import pytest

from tests.helpers.ports import free_port
from tests.helpers.scripts import ScriptRunner
from tests.process.helpers import with_tests

SCRIPT = """
    import sys, threading, time
    from pathlib import Path
    from rankwise.strategies import DDPStrategy

    def job(strategy):
        strategy.barrier()
        Path(f"busy{strategy.global_rank}").touch()
        time.sleep(60)

    def launch():
        DDPStrategy(start_method=sys.argv[1], accelerator="cpu", devices=2).launch(job)

    if __name__ == "__main__":
        threading.Thread(target=launch, daemon=True).start()
        while not all(Path(f"busy{rank}").exists() for rank in range(2)):
            time.sleep(0.02)
        print("both busy", flush=True)
        if sys.argv[2] == "raise":
            raise ValueError("in the main thread")
"""


@pytest.mark.parametrize(
    ("method", "how", "code"),
    [
        ("fork", "return", 0),
        pytest.param("fork", "raise", 1, marks=pytest.mark.soak),
        pytest.param("spawn", "return", 0, marks=pytest.mark.soak),
        pytest.param("forkserver", "return", 0, marks=pytest.mark.soak),
        pytest.param("popen", "return", 0, marks=pytest.mark.soak),
    ],
)
def test_a_daemon_thread_that_launched(method: str, how: str, code: int, run_script: ScriptRunner) -> None:
    """The main thread ends the script first: the program ends, and leaves no process."""
    running = run_script.start(SCRIPT, method, how)
    running.wait_for("both busy", timeout=50)
    result = running.finish(timeout=30, leftover_grace_s=20)  # of the time that unloading torch takes
    assert result.returncode == code, result


COUNT = """
    import json, sys, threading
    from torch.utils.data import DataLoader
    from rankwise.callbacks import Callback
    from rankwise.strategies import DDPElasticStrategy, DDPStrategy
    from tests.process.training_tasks import Regression, dataset, quiet_trainer

    class Count(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if batch_idx == 2:
                names = sorted(each.name for each in threading.enumerate() if "rankwise-" in each.name)
                sys.stdout.write(json.dumps([trainer.global_rank, names]) + "\\n")
                sys.stdout.flush()

    if __name__ == "__main__":
        for method in sys.argv[1:]:
            if method == "elastic":
                strategy = DDPElasticStrategy(accelerator="cpu", devices=2)
            else:
                strategy = DDPStrategy(start_method=method, accelerator="cpu", devices=2)
            trainer = quiet_trainer(strategy, 2, max_epochs=1, callbacks=[Count()])
            trainer.fit(Regression(), DataLoader(dataset(64), batch_size=2))
"""
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port")


@pytest.mark.parametrize(
    "methods",
    [
        ("fork",),
        ("popen",),
        *(
            pytest.param(each, marks=pytest.mark.soak)
            for each in (("elastic",), ("forkserver", "spawn"), ("torchrun",))
        ),
    ],
    ids="-".join,
)
def test_a_rank_has_few_threads(methods: tuple[str, ...], run_script: ScriptRunner) -> None:
    """While it trains, a rank has at most two threads of ours beside the main one."""
    if methods == ("torchrun",):
        script = run_script.write(COUNT)
        command = [sys.executable, *TORCHRUN, str(free_port()), str(script), "popen"]
        result = run_script.command(command, env=with_tests())
    else:
        result = run_script(COUNT, *methods, env=with_tests())
    assert result.returncode == 0, result
    counted = sorted(map(json.loads, result.stdout.splitlines()))
    assert [rank for rank, _ in counted] == [0] * len(methods) + [1] * len(methods)
    assert all(1 <= len(names) <= 2 for _, names in counted), counted
