"""`ddp_elastic` on two hosts: one ends, the other continues from the last checkpoint, the first rejoins."""

import signal
import sys
from pathlib import Path

import pytest

from tests.cluster.hosts import TwoHosts
from tests.helpers.scripts import RunningScript, ScriptResult, ScriptRunner
from tests.process.helpers import with_tests

pytestmark = [pytest.mark.cluster, pytest.mark.soak, pytest.mark.timeout(300)]

SCRIPT = """
import os, socket, sys, time
from pathlib import Path
from torch.utils.data import DataLoader, Subset
from rankwise import Trainer
from rankwise.callbacks import Callback, ModelCheckpoint
from rankwise.seed import seed_everything
from rankwise.strategies import DDPElasticStrategy
from tests.process.resume_tasks import Net, Noisy

class Noting(Callback):
    def __init__(self, folder):
        self.folder = Path(folder)
        self.steps = 0

    def on_train_start(self, trainer, module):
        self.say("begins", trainer)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.steps += 1
        if self.steps == 5:
            self.say("trains", trainer)
        time.sleep(0.05)
        if (self.folder / "enough").exists():
            trainer.should_stop = True

    def on_train_end(self, trainer, module):
        self.say("ends", trainer)

    def say(self, what, trainer):
        rank = f"rank {trainer.global_rank} of {trainer.world_size}"
        sys.stdout.write(f"{what}: {rank} on {socket.gethostname()} at step {trainer.global_step}\\n")
        sys.stdout.flush()

if __name__ == "__main__":
    folder, nodes = sys.argv[1:]
    strategy = DDPElasticStrategy(
        accelerator="cpu",
        devices=1,
        start_method="fork",
        node_range=nodes,
        endpoint="hosta:29400",
        run_id="a job",
        max_restarts=5,
        timeout=20,
    )
    seed_everything(3)
    saving = ModelCheckpoint(folder, save_last=True, save_top_k=0, every_n_train_steps=1)
    trainer = Trainer(
        strategy=strategy,
        max_epochs=1000,
        callbacks=[Noting(folder), saving],
        logger=False,
        enable_progress_bar=False,
    )
    data = Subset(Noisy(), range(40))  # never leaves a batch of one, which batch norm refuses
    trainer.fit(Net(), DataLoader(data, 4, shuffle=True))
    print("returned at step", trainer.global_step, flush=True)
"""


def start(hosts: TwoHosts, name: str, run_script: ScriptRunner, nodes: str) -> RunningScript:
    command = [sys.executable, str(run_script.write(SCRIPT)), str(run_script.folder), nodes]
    return run_script.start_command(command, place=hosts.place(name), env=with_tests())


def steps(ended: ScriptResult, what: str) -> list[tuple[int, int]]:
    """Return world size and step of each line of a kind, in order."""
    lines = [line.split() for line in ended.stdout.splitlines() if line.startswith(f"{what}:")]
    return [(int(words[4]), int(words[-1])) for words in lines]


def test_a_node_dies_and_comes_back(hosts: TwoHosts, run_script: ScriptRunner, tmp_path: Path) -> None:
    """With `node_range="1:2"` the other node continues alone, and both continue when the first is back."""
    first, second = (start(hosts, name, run_script, "1:2") for name in hosts.names)
    for each in (first, second):
        each.wait_for("trains: ", timeout=60)
    second.send_signal_to_group(signal.SIGKILL)
    second.finish(timeout=30)
    first.wait_for("of 1 on hosta", timeout=120)
    first.wait_for("trains: rank 0 of 1", timeout=60)
    back = start(hosts, "hostb", run_script, "1:2")
    back.wait_for("trains: ", timeout=120)
    (tmp_path / "enough").touch()
    results = [each.finish(timeout=60) for each in (first, back)]
    assert [result.returncode for result in results] == [0, 0], results
    (_, at_first), (_, alone), (_, again) = begun = steps(results[0], "begins")
    assert [world for world, _ in begun] == [2, 1, 2], results
    assert at_first == 0 < alone, results  # each time from the last checkpoint
    assert alone + 5 <= again, results
    assert steps(results[1], "begins") == [(2, again)], results
    assert steps(results[0], "ends") == steps(results[1], "ends"), results
    assert "NodesLostError: Lost global_rank 1 (node 1, host 'hostb'" in results[0].stderr, results
    assert "(restart 2): nodes came or went" in results[0].stderr, results
