"""Lightning's own `Trainer` and `Fabric` on rankwise's strategies."""

from __future__ import annotations

import json
import signal
import sys
from typing import Any

import pytest

from tests.helpers.load import slowdown
from tests.helpers.scripts import WITHOUT_COVERAGE, ScriptResult, ScriptRunner

SOAK = pytest.mark.soak
STRATEGIES = [
    "rankwise_ddp_fork",
    pytest.param("rankwise_ddp", marks=SOAK),
    pytest.param("rankwise_ddp_spawn", marks=SOAK),
    pytest.param("rankwise_ddp_forkserver", marks=SOAK),
]

MODULE = """
import json, os, signal, sys, time, warnings
from pathlib import Path

sys.modules["mpi4py.MPI"] = None  # Lightning's detection starts MPI, where it is installed

import torch
from lightning import pytorch as pl
from torch.utils.data import DataLoader, TensorDataset

import rankwise.integrations.lightning

warnings.filterwarnings("ignore")
QUIET = dict(accelerator="cpu", enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1)

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
        self.steps_seen = 0

    def training_step(self, batch, batch_idx):
        self.steps_seen += 1
        loss = (self.net(batch[0]) - 1).pow(2).mean()
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.net(batch[0]).mean(), sync_dist=True)

    def predict_step(self, batch, batch_idx):
        return [batch[0][:, 0]]

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.1)

def loader(batch_size):
    return DataLoader(TensorDataset(torch.arange(32.0).view(8, 4) / 32), batch_size=batch_size)
"""

STAGES = (
    MODULE
    + """
class Ends(pl.Callback):
    epochs = 0

    def on_train_epoch_end(self, trainer, pl_module):
        self.epochs += 1

def run(batch_size, folder, **arguments):
    pl.seed_everything(1, workers=True, verbose=False)
    module, ends = Module(), Ends()
    best = pl.callbacks.ModelCheckpoint(monitor="val", save_top_k=1, dirpath=folder)
    logger = pl.loggers.CSVLogger(folder)
    trainer = pl.Trainer(max_epochs=3, callbacks=[ends, best], logger=logger, **arguments, **QUIET)
    trainer.fit(module, loader(batch_size), loader(batch_size))
    first = module.net.weight.tolist()
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    trainer.fit_loop.max_epochs = 5
    trainer.fit(module, loader(batch_size), loader(batch_size))
    (validated,) = trainer.validate(module, loader(batch_size), verbose=False)
    predicted = trainer.predict(module, loader(batch_size))
    saved = torch.load(best.best_model_path, weights_only=False)
    return trainer.is_global_zero, {
        "weights": [first, module.net.weight.tolist(), saved["state_dict"]["net.weight"].tolist()],
        "metrics": metrics,
        "validated": validated,
        "predicted": [float(value) for (batch,) in predicted for value in batch],
        "counters": [trainer.global_step, trainer.current_epoch, ends.epochs, module.steps_seen],
        "state": str(trainer.state),
        "best": Path(best.best_model_path).name,
        "logged": sorted(os.listdir(f"{folder}/lightning_logs")),
    }

if __name__ == "__main__":
    strategy = sys.argv[1]
    _, alone = run(8, f"alone-{os.environ.get('LOCAL_RANK', 0)}", strategy="auto", devices=1)
    is_zero, together = run(4, "together", strategy=strategy, devices=2)
    if is_zero:
        print(json.dumps([alone, together]))
"""
)


def last_line(result: ScriptResult) -> Any:
    """Return the JSON that a program has printed at its end."""
    assert result.returncode == 0, result
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "strategy", [*STRATEGIES, pytest.param("rankwise_ddp_find_unused_parameters_true", marks=SOAK)]
)
def test_two_ranks_are_one(run_script: ScriptRunner, strategy: str) -> None:
    """Two fits, validation and prediction leave what Lightning leaves after them in one process."""
    alone, together = last_line(run_script(STAGES, strategy, timeout=180))
    for name in ("metrics", "validated"):
        assert together[name] == pytest.approx(alone[name], abs=1e-6)
    for own, expected in zip(together["weights"], alone["weights"], strict=True):
        assert own == [pytest.approx(row, abs=1e-6) for row in expected]
    for name in ("counters", "state", "best", "logged"):
        assert together[name] == alone[name]
    first_ranks, predicted = [0.0, 0.25, 0.5, 0.75], together["predicted"]
    if strategy.startswith(("rankwise_ddp_fork", "rankwise_ddp_spawn")):  # all ranks' predictions come back
        assert predicted[:4] == first_ranks
        assert sorted(predicted) == sorted(alone["predicted"])
    else:
        assert predicted == first_ranks


FAILURE = (
    MODULE
    + """
class Failing(Module):
    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == 2 and self.global_rank == 1:
            Path("failed_s").write_text(str(time.monotonic()))
            if sys.argv[2] == "raise":
                raise ValueError("loss is nan")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)

class Report(pl.Callback):
    def on_exception(self, trainer, pl_module, exception):
        print("on_exception", type(exception).__name__, flush=True)

if __name__ == "__main__":
    is_main = "LOCAL_RANK" not in os.environ
    trainer = pl.Trainer(strategy=sys.argv[1], devices=2, logger=False, callbacks=[Report()], **QUIET)
    try:
        trainer.fit(Failing(), loader(2))
    except BaseException as error:
        if is_main:
            took_s = time.monotonic() - float(Path("failed_s").read_text())
            has_group = torch.distributed.is_initialized()
            print(json.dumps([type(error).__name__, str(error), took_s, has_group, trainer.interrupted]))
        raise
"""
)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("how", "expected", "text", "exit_code"),
    [
        ("raise", "WorkerRaisedError", "raised ValueError: loss is nan", 1),
        pytest.param("kill", "WorkerKilledError", "was killed by SIGKILL", 137, marks=SOAK),
    ],
)
def test_a_rank_that_fails(
    run_script: ScriptRunner, strategy: str, how: str, expected: str, text: str, exit_code: int
) -> None:
    """The failure of another rank is rankwise's exception within two seconds; callbacks learn of it."""
    result = run_script(FAILURE, strategy, how, env=WITHOUT_COVERAGE)
    assert result.returncode == exit_code, result
    reported, *_, last = [line for line in result.stdout.splitlines() if line.startswith(("on_exc", "["))]
    assert reported == f"on_exception {expected}", result
    name, message, took_s, has_group, is_interrupted = json.loads(last)
    assert (name, has_group, is_interrupted) == (expected, False, True)
    assert "global_rank=1" in message
    assert text in message
    assert took_s < 2 * slowdown()


SLOW = (
    MODULE
    + """
class Slow(Module):
    def training_step(self, batch, batch_idx):
        print("training", self.global_rank, flush=True)
        time.sleep(60 if self.trainer.global_step == 1 and self.global_rank == 1 else 0)
        return super().training_step(batch, batch_idx)

if __name__ == "__main__":
    trainer = pl.Trainer(strategy=sys.argv[1], devices=2, logger=False, **QUIET)
    trainer.fit(Slow(), loader(2))
"""
)


@pytest.mark.parametrize(
    ("number", "exit_code"), [(signal.SIGINT, 1), pytest.param(signal.SIGTERM, 143, marks=SOAK)]
)
@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("rankwise_ddp_fork", marks=SOAK),
        "rankwise_ddp",
        pytest.param("rankwise_ddp_spawn", marks=SOAK),
        pytest.param("rankwise_ddp_forkserver", marks=SOAK),
    ],
)
def test_a_signal_ends_all_ranks(
    run_script: ScriptRunner, strategy: str, number: signal.Signals, exit_code: int
) -> None:
    """Ctrl-C, and SIGTERM, end every rank, also one that sleeps and one that waits in a collective."""
    running = run_script.start(SLOW, strategy)
    running.wait_for("training", count=4, timeout=120)
    running.send_signal_to_group(number) if number == signal.SIGINT else running.send_signal(number)
    result = running.finish(timeout=30)
    assert result.returncode == exit_code, result


FABRIC = """
import json, sys

sys.modules["mpi4py.MPI"] = None

import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset

import rankwise.integrations.lightning
from rankwise.errors import LaunchRefusedError

def main(fabric):
    fabric.seed_everything(1, workers=True, verbose=False)
    model = torch.nn.Linear(4, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
    data = TensorDataset(torch.arange(32.0).view(8, 4) / 32)
    for batch, in fabric.setup_dataloaders(DataLoader(data, batch_size=8 // fabric.world_size)):
        optimizer.zero_grad()
        fabric.backward((model(batch) - 1).pow(2).mean())
        optimizer.step()
    ranks = fabric.all_gather(torch.tensor(fabric.global_rank)).tolist()
    return model.module.weight.tolist(), ranks

if __name__ == "__main__":
    alone, _ = Fabric(accelerator="cpu", devices=1).launch(main)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=sys.argv[1])
    together, ranks = fabric.launch(main)
    try:
        fabric.launch()
    except LaunchRefusedError as error:
        refusal = str(error)
    if fabric.is_global_zero:
        print(json.dumps([alone[0], together[0], ranks, refusal]))
"""


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fabric(run_script: ScriptRunner, strategy: str) -> None:
    """Two ranks of Fabric train as one; `launch` without a function is refused."""
    alone, together, ranks, refusal = last_line(run_script(FABRIC, strategy, timeout=180))
    assert together == pytest.approx(alone, abs=1e-6)
    assert ranks == [0, 1]
    assert "fabric.launch(main)" in refusal


@SOAK
def test_under_torchrun(run_script: ScriptRunner) -> None:
    """Processes that torchrun has started are used."""
    path = run_script.write(STAGES)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    alone, together = last_line(run_script.command([*torchrun, str(path), "rankwise_ddp"], timeout=240))
    assert together["counters"] == alone["counters"]
    assert together["weights"][1][0] == pytest.approx(alone["weights"][1][0], abs=1e-6)
