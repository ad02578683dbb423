"""A fit on two processes that continues from a checkpoint which somebody else has changed."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rankwise.callbacks import ModelCheckpoint
from rankwise.errors import WorkerRaisedError
from tests.helpers.parameters import first
from tests.helpers.scripts import ScriptRunner
from tests.process.helpers import in_scripts
from tests.process.training_tasks import Regression, loader, quiet_trainer

SOAK = pytest.mark.soak
STRATEGIES = first(1, ["ddp_fork", "ddp", "ddp_spawn", "ddp_forkserver"])

SCRIPT = """
    import sys
    from tests.process.test_foreign_checkpoints import train

    train("ddp", sys.argv[1], 2, ckpt_path=sys.argv[2])
"""


def train(strategy: str, folder: str | Path, epochs: int, **options: Any) -> ModelCheckpoint:
    saving = ModelCheckpoint(folder, save_last=True)
    trainer = quiet_trainer(strategy, 2, max_epochs=epochs, enable_checkpointing=True, callbacks=saving)
    trainer.fit(Regression(), loader(16, 4), **options)
    return saving


def resume(strategy: str, folder: Path, path: Path, run_script: ScriptRunner) -> str:
    if strategy == "ddp":
        return run_script(SCRIPT, str(folder), str(path), env=in_scripts()).stderr
    try:
        train(strategy, folder, 2, ckpt_path=path)
    except WorkerRaisedError as error:
        return str(error)
    return ""


@pytest.mark.quick
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_no_fit_has_written(strategy: str, tmp_path: Path, run_script: ScriptRunner) -> None:
    """A part that only rank 1 uses is an error of the job, and so is another version."""
    train("ddp_fork", tmp_path, 1)
    path = tmp_path / "changed.pt"
    for name, problem in (("version", "has version 2"), ("ranks", "its random state cannot")):
        checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)
        if name == "version":
            checkpoint["version"] = 2
        else:
            checkpoint["ranks"][1]["random"] = {}
        torch.save(checkpoint, path)
        error = resume(strategy, tmp_path, path, run_script)
        assert f"CheckpointError: Checkpoint '{path}': {problem}" in error, error


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_only_the_runs_own_files_are_removed(strategy: str, tmp_path: Path, run_script: ScriptRunner) -> None:
    """The superseded file of the run goes; another run's file, which a checkpoint names, stays."""
    run, other = tmp_path / "run", tmp_path / "other"
    first = train("ddp_fork", run, 1).best_model_path
    precious = Path(train("ddp_fork", other, 1).best_model_path).rename(run / "precious.ckpt")
    checkpoint = torch.load(run / "last.ckpt", weights_only=True)
    (state,) = checkpoint["callbacks"].values()
    torch.save(checkpoint, tmp_path / "sent.pt")
    state["best_model_path"] = state["kth_best_model_path"] = str(precious)
    state["best_k_models"] = {str(precious): torch.tensor(-1.0)}
    torch.save(checkpoint, tmp_path / "changed.pt")
    assert "Error" not in resume(strategy, run, tmp_path / "changed.pt", run_script)
    assert precious.exists()
    assert Path(first).exists()
    assert "Error" not in resume(strategy, run, tmp_path / "sent.pt", run_script)
    assert precious.exists()
    assert not Path(first).exists()
