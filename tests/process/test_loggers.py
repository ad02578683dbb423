"""All loggers at once on two processes: one rank writes, and a failure leaves what was logged."""

import csv
import importlib
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.logger_files import OfflineRun, offline_runs, scalars, variables
from tests.helpers.needs import need_installed
from tests.helpers.preloaded import TORCH
from tests.helpers.scripts import ScriptRunner
from tests.process.helpers import with_tests

need_installed("tensorboard", "wandb", "mlflow")

# On a busy machine the three libraries take minutes to import.
pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]

PROGRAM = """
    import socket, sys
    from pathlib import Path
    from rankwise import Trainer
    from rankwise.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
    from tests.unit.trainer.helpers import Line, loader

    folder, start, failing = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])

    def refuse(event, arguments):
        is_inet = event == "socket.connect" and arguments[0].family in (socket.AF_INET, socket.AF_INET6)
        if is_inet and not arguments[1][0].startswith(("127.", "::1")):
            (folder / "connections").write_text(f"{arguments}")

    sys.addaudithook(refuse)  # also in forked ranks

    class Model(Line):
        def training_step(self, batch, batch_idx):
            for logger in self.trainer.loggers:  # what a module calls on every rank writes on one
                logger.log_metrics({"own": float(self.trainer.global_rank)}, step=batch_idx)
            self.trainer.loggers[1].experiment.add_text("rank", str(self.trainer.global_rank), batch_idx)
            if failing and self.trainer.global_rank == 1 and batch_idx == 1:
                raise ValueError("rank 1 fails")
            return super().training_step(batch, batch_idx)

    if __name__ == "__main__":
        loggers = [
            CSVLogger(folder / "csv"),
            TensorBoardLogger(folder / "tensorboard"),
            WandbLogger(save_dir=folder / "wandb", offline=True),
            MLFlowLogger(save_dir=folder / "mlflow"),
        ]
        model = Model()
        model.hparams = {"optimizer": {"lr": 0.1}}
        trainer = Trainer(
            strategy=f"ddp_{start}:grace_period_s=120", accelerator="cpu", devices=2, max_epochs=1,
            logger=loggers, log_every_n_steps=1, enable_checkpointing=False, enable_progress_bar=False,
        )
        trainer.fit(model, loader(8, 2))
        trainer.test(model, loader(8, 2))
        print(loggers[2].version, loggers[3].run_id)
"""


def lines(folder: Path) -> list[dict[str, str]]:
    with (folder / "csv" / "rankwise_logs" / "version_0" / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def run_of(folder: Path) -> Any:
    from mlflow import MlflowClient

    client = MlflowClient((folder / "mlflow").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("rankwise_logs").experiment_id])
    return run, client


def values(runs: list[OfflineRun], name: str) -> list[float]:
    return [line[name] for run in runs for line in run.history if name in line]


@pytest.fixture(autouse=True, scope="module")
def _imported() -> None:
    """Import W&B before a test: it makes temporary folders, which stay until the process ends."""
    importlib.import_module("wandb")


IMPORTED = (*TORCH, "torch.utils.tensorboard", "wandb", "mlflow")


@pytest.fixture(autouse=True)
def _variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables(tmp_path).items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_one_rank_writes(start: str, run_script: ScriptRunner, tmp_path: Path) -> None:
    """A fit and a test are one run in every logger, with each value once, of rank zero, as is the table."""
    result = run_script(PROGRAM, str(tmp_path), start, "0", env=with_tests(), timeout=200, preload=IMPORTED)
    assert result.returncode == 0, result
    assert not (tmp_path / "connections").exists()
    assert result.stdout.count("Test metric") == 1
    wandb_id, mlflow_id = result.stdout.splitlines()[-1].split()

    assert [line["own"] for line in lines(tmp_path) if line["own"]] == ["0.0", "0.0"]
    assert [sum(bool(line[name]) for line in lines(tmp_path)) for name in ("loss", "test_loss")] == [2, 1]

    read = scalars(tmp_path / "tensorboard" / "rankwise_logs" / "version_0")
    assert read["own"] == [(0, 0.0), (1, 0.0)]
    assert ([step for step, _ in read["loss"]], len(read["test_loss"])) == ([0, 1], 1)

    runs = offline_runs(tmp_path / "wandb")
    assert {run.id for run in runs} == {wandb_id}
    assert {run.exit_code for run in runs} == {0}
    assert runs[0].config["optimizer"] == {"lr": 0.1}
    assert values(runs, "own") == [0.0, 0.0]
    assert (len(values(runs, "loss")), len(values(runs, "test_loss"))) == (2, 1)

    run, client = run_of(tmp_path)
    assert (run.info.run_id, run.info.status) == (mlflow_id, "FINISHED")
    assert run.data.params == {"optimizer/lr": "0.1"}
    names = ("own", "loss", "test_loss")
    histories = [client.get_metric_history(run.info.run_id, name) for name in names]
    assert [len(history) for history in histories] == [2, 2, 1]
    assert [metric.value for metric in histories[0]] == [0.0, 0.0]


def test_a_failing_rank(run_script: ScriptRunner, tmp_path: Path) -> None:
    """What rank zero has logged before another rank failed is in every logger, as a failed run."""
    result = run_script(PROGRAM, str(tmp_path), "fork", "1", env=with_tests(), timeout=200, preload=IMPORTED)
    assert "rank 1 fails" in result.stderr, result

    assert lines(tmp_path)[0]["own"] == "0.0"
    assert (0, 0.0) in scalars(tmp_path / "tensorboard" / "rankwise_logs" / "version_0")["own"]
    [run] = offline_runs(tmp_path / "wandb")
    assert (values([run], "own")[0], run.exit_code) == (0.0, 1)
    mlflow_run, _ = run_of(tmp_path)
    assert (mlflow_run.info.status, mlflow_run.data.metrics["own"]) == ("FAILED", 0.0)
