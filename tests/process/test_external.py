"""Processes that another launcher has started: torchrun, or two shells with variables set by hand."""

import pickle
import socket
import sys
from pathlib import Path

import pytest

from tests.helpers.ports import free_port
from tests.helpers.scripts import ScriptResult, ScriptRunner
from tests.process import external_cases
from tests.process.helpers import Cases, cases_of, with_tests

cases = cases_of(external_cases)

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")

# Several strategies in one run: starting torchrun is what takes time.
SCRIPT = """
import gc, os
import rankwise
from rankwise.registry import StrategyRegistry
import torch

def job(strategy, pid, number):
    total = strategy.all_reduce(torch.tensor(float(strategy.global_rank + 1)), reduce_op="sum")
    return float(total), os.getpid() == pid, number

if __name__ == "__main__":
    before = dict(os.environ)
    for name in ("ddp", "ddp_spawn", "ddp_fork", "ddp_notebook", "auto"):
        strategy = StrategyRegistry.create(name, accelerator="cpu")
        value = strategy.launch(job, os.getpid(), 1)
        again = strategy.launch(job, os.getpid(), 2)
        print(name, strategy.global_rank, strategy.world_size, value, again, strategy.environment.name)
    for name, options in (("ddp", {"devices": 3}), ("single_device", {})):
        try:
            StrategyRegistry.create(name, accelerator="cpu", **options).bind()
        except ValueError as error:
            print(type(error).__name__, error)
    assert dict(os.environ) == before, set(os.environ.items()) ^ set(before.items())
    print("end")
"""
OWN_GROUP = """
def job_of_bound(strategy, plain):
    strategy.no_backward_sync(plain)  # prepared before the launch
    return float(strategy.all_reduce(torch.tensor(1.0), reduce_op="sum"))

def train_without_a_launch(strategy):
    torch.manual_seed(strategy.global_rank)
    model = torch.nn.Linear(1, 1, bias=False)
    wrapped = strategy.setup_module(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = float(model.weight)
    for number, is_final in enumerate((False, True)):
        with strategy.gradient_sync_context(wrapped, [optimizer], is_final):
            strategy.backward(wrapped(torch.full((1, 1), float(strategy.global_rank + number))).sum())
    strategy.optimizer_step(optimizer)
    strategy.barrier()
    weights = {float(weight) for weight in strategy.all_gather(model.weight)}
    compiled = strategy.setup_module(torch.compile(torch.nn.Linear(1, 1), backend="eager"))
    assert isinstance(wrapped, wrapper) and isinstance(compiled, wrapper)
    keys, last = [*strategy.get_module_state_dict(wrapped)], strategy.broadcast(strategy.global_rank, src=1)
    return [round(before - float(model.weight), 5), len(weights), keys, last]

wrapper = torch.nn.parallel.DistributedDataParallel
strategy = rankwise.DDPStrategy(accelerator="cpu")
rank = strategy.bind().global_rank
plain = strategy.setup_module(torch.nn.Linear(1, 1).requires_grad_(False))
torch.distributed.init_process_group("gloo")
facts = [*train_without_a_launch(strategy), strategy.launch(job_of_bound, plain)]
gc.collect()  # a wrapper that outlives its group may abort the process at exit
assert not [each for each in gc.get_objects() if isinstance(each, wrapper)]
print("own group", rank, facts)
torch.distributed.destroy_process_group()
"""
NAMES = ("ddp", "ddp_spawn", "ddp_fork", "ddp_notebook", "auto")


def _torchrun(run_script: ScriptRunner, script: Path, *args: str) -> ScriptResult:
    # torchrun's own default is one fixed port, which another run on this machine may have
    options = ["--master-port", str(free_port()), "--no-python", sys.executable]
    command = [*TORCHRUN, *options, str(script), *args]
    return run_script.command(command, env=with_tests(), timeout=120, siblings=2)


def test_torchruns_processes_are_the_ranks(run_script: ScriptRunner) -> None:
    """Torchrun's processes are the ranks of every strategy, which starts no others; other numbers are errors.

    In the user's process group a strategy that is only bound works, too, and can be launched after that.
    """
    result = _torchrun(run_script, run_script.write(SCRIPT + OWN_GROUP))
    assert result.returncode == 0, result
    lines = result.stdout.splitlines()
    for rank in range(2):
        for name in NAMES:
            assert lines.count(f"{name} {rank} 2 (3.0, True, 1) (3.0, True, 2) torchelastic") == 1, result
        facts = [1.0, 1, ["weight"], 1, 2.0]  # gradients are 1 and 3, so 0.5 * 2
        assert lines.count(f"own group {rank} {facts}") == 1, result
    another = "3 processes were asked for (devices=3 x num_nodes=1), but torchelastic started 2."
    assert result.stdout.count(f"WorldSizeMismatchError {another}") == 2, result
    assert result.stdout.count("torchelastic has started 2 processes") == lines.count("end") == 2, result


@pytest.mark.parametrize("how", ["fit", pytest.param("launch", marks=pytest.mark.soak)])
def test_a_failure_is_in_torchruns_summary(how: str, run_script: ScriptRunner) -> None:
    """The launcher's own report names the rank and its exception, from the error file that it asks for.

    With the Trainer the other rank fails too, by a connection that its peer has closed: a consequence.
    """
    result = _torchrun(run_script, Path(external_cases.__file__), f"fail_in_{how}")
    assert result.returncode == 1, result
    summary = result.stderr.partition("Root Cause")[2]
    assert "rank      : 1 " in summary, result
    assert "ValueError: the first failure" in summary, result


def _variables(*ranks: str, **more: str) -> list[dict[str, str]]:
    """Return each process's variables; `ranks` are the names of those that hold its rank."""
    common = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), **more}
    return [{**common, **dict.fromkeys(ranks, str(rank))} for rank in range(2)]


@pytest.mark.quick
def test_variables_set_by_hand(run_script: ScriptRunner) -> None:
    """Two shells with `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR`, `MASTER_PORT` are a job."""
    path = run_script.write(SCRIPT)
    variables = _variables("RANK", "LOCAL_RANK", WORLD_SIZE="2")
    running = [run_script.start(path, env=each) for each in variables]
    for rank, program in enumerate(running):
        result = program.finish(timeout=80)
        assert result.returncode == 0, result
        for name in NAMES:
            assert f"{name} {rank} 2 (3.0, True, 1) (3.0, True, 2) plain" in result.stdout, result
        assert "(devices=3 x num_nodes=1), but plain started 2." in result.stdout


AS_IN_LIGHTNING = """
    import os, sys, time
    import torch
    import rankwise.lightning as pl
    from rankwise.lightning.plugins import CheckpointIO, ClusterEnvironment
    from tests.process.training_tasks import Regression, loader

    class Shells(ClusterEnvironment):
        main_address = "127.0.0.1"
        creates_processes_externally = True

        ended = 0
        main_port = property(lambda self: int(os.environ["OUR_PORT"]))

        @staticmethod
        def detect():
            return "OUR_RANK" in os.environ

        def world_size(self):
            return 2

        def set_world_size(self, size):
            assert size == 2

        def global_rank(self):
            return int(os.environ["OUR_RANK"])

        def set_global_rank(self, rank):
            assert rank == self.global_rank()

        def local_rank(self):
            return self.global_rank()

        def node_rank(self):
            return 0

        def teardown(self):
            self.ended += 1

    class PlainFiles(CheckpointIO):
        def save_checkpoint(self, checkpoint, path, storage_options=None):
            torch.save({"by": "PlainFiles", "checkpoint": checkpoint}, path)

        def load_checkpoint(self, path, map_location=None, weights_only=None):
            loaded = torch.load(path, map_location=map_location, weights_only=True)
            assert loaded["by"] == "PlainFiles"
            return loaded["checkpoint"]

        def remove_checkpoint(self, path):
            os.remove(path)

    class Module(Regression, pl.LightningModule):
        pass

    if __name__ == "__main__":
        facts = []
        for epochs, path in ((1, None), (2, sys.argv[1])):
            shells, module = Shells(), Module()
            trainer = pl.Trainer(
                strategy="ddp", devices=2, accelerator="cpu", max_epochs=epochs, logger=False,
                enable_checkpointing=False, enable_progress_bar=False, plugins=[shells, PlainFiles()],
            )
            trainer.fit(module, loader(8, 1), ckpt_path=path)
            time.sleep(trainer.global_rank * (epochs - 1))  # the second time, rank 0 has ended
            trainer.save_checkpoint(sys.argv[1])
            facts += [trainer.global_step, shells.ended]
        print(trainer.global_rank, trainer.world_size, facts, module.net[0].weight.sum().item())
"""


def test_plugins_as_in_lightning(run_script: ScriptRunner, tmp_path: Path) -> None:
    """An environment and a `CheckpointIO` in Lightning's form, with other imports, train and resume."""
    path, port = run_script.write(AS_IN_LIGHTNING), str(free_port())
    file = str(tmp_path / "last.ckpt")
    ranks = [with_tests({"OUR_RANK": str(rank), "OUR_PORT": port}) for rank in range(2)]
    results = [each.finish() for each in [run_script.start(path, file, env=each) for each in ranks]]
    assert [result.returncode for result in results] == [0, 0], results
    lines = [result.stdout.splitlines()[-1] for result in results]
    weight = lines[0].rpartition(" ")[2]
    assert lines == [f"{rank} 2 [4, 1, 8, 1] {weight}" for rank in range(2)], results


@pytest.mark.soak
def test_what_env_needs_is_a_job_on_one_node(cases: Cases) -> None:
    """`RANK`, `WORLD_SIZE` and `MASTER_*` on loopback are one job, not two that train on all data."""
    results = cases.on_each("fit", variables=_variables("RANK", WORLD_SIZE="2"))
    assert [result.stdout for result in results] == ["0 2 4\n", "1 2 4\n"], results


def test_a_trainer_in_a_process_group_by_env(cases: Cases) -> None:
    """It uses the user's group and its store, leaves the group, and trains when that is gone, too."""
    results = cases.on_each("fit_in_own_group", variables=_variables("RANK", "LOCAL_RANK", WORLD_SIZE="2"))
    assert [result.returncode for result in results] == [0, 0], results
    assert [result.stdout for result in results] == ["[(4, 2), (4, 2), (4, 2)] 2.0 False\n"] * 2, results


def test_local_ranks_without_ranks_are_refused(cases: Cases) -> None:
    """`LOCAL_RANK` and `MASTER_*` without `RANK` were two whole jobs: an error, in every process."""
    for result in cases.on_each("fit", variables=_variables("LOCAL_RANK")):
        assert result.stdout.startswith("EnvironmentVariableError: The variables of plain"), result
        assert "RANK, WORLD_SIZE is not set" in result.stdout


@pytest.mark.soak
def test_a_timeout_says_where_the_others_are(cases: Cases, tmp_path: Path) -> None:
    """With no supervisor, ranks ask each other: step, phase, host, stacks, torch's flight record.

    And rank 0 reports the one that lags while it does.
    """
    variables = {"TORCH_FR_BUFFER_SIZE": "50", "TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "record")}
    variables["RES_OPTIONS"] = "timeout:1"  # a name that nobody looks up in time is given up before the ranks
    ranks = _variables("RANK", "LOCAL_RANK", WORLD_SIZE="2", **variables)
    waiting, late = cases.on_each("late", variables=ranks)
    assert waiting.returncode == late.returncode == 1
    assert "WorkerTimedOutError: Worker global_rank=0 " in waiting.stderr, waiting
    assert "waited too long for global_rank=1" in waiting.stderr
    host = socket.gethostname()
    seen = [line for line in waiting.stderr.splitlines() if " was last in " in line]
    lags = [line for line in seen if line.startswith("rankwise: global_rank 1 (node 0, ")]
    late_there = [
        line for line in lags if ") was last in step 2, data loading, " in line.partition(". The others")[0]
    ]
    assert late_there, lags  # before it, a slow start may have been reported
    assert "The others wait: global_rank 0" in late_there[0]
    [line] = [line for line in seen if line not in lags]
    assert line.strip().startswith(f"global_rank 1 (node 0, host {host!r}, pid ")
    assert ") was last in step 2, data loading, " in line
    assert "stacks of global_rank 1" in late.stderr
    assert "in __getitem__" in late.stderr.partition("stacks of global_rank 1")[2]
    assert f"the flight record of global_rank=0 is {tmp_path / 'record0'}" in waiting.stderr
    recorded = pickle.loads((tmp_path / "record0").read_bytes())["entries"]
    assert any(entry["profiling_name"].startswith("gloo:") for entry in recorded), recorded
