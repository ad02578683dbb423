"""`rankwise.lightning`: Lightning's names are importable as from Lightning, and missing ones are refused."""

import importlib
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import rankwise
from rankwise import process_group
from rankwise.compatibility.names import MISSING_NAMES
from rankwise.environments import SlurmEnvironment
from rankwise.errors import InvalidArgumentError, MissingNameError
from rankwise.lightning.utilities import grad_norm, isolate_rng
from rankwise.trainer.state import TrainerFn
from tests.helpers.raising import raises

PACKAGE = "rankwise.lightning"
COLLECTIVES = "AllGatherGrad all_gather_ddp_if_available gather_all_tensors sync_ddp sync_ddp_if_available"

SAME_NAMES = [
    *(("", "Trainer"), ("", "Fabric"), ("", "Callback"), ("", "seed_everything")),
    *((".pytorch", "Trainer"), (".fabric", "Fabric"), (".fabric.strategies", "DDPStrategy")),
    *((".utilities.rank_zero", "rank_zero_only"), (".utilities", "rank_zero_info")),
    *((".fabric", "seed_everything"), (".fabric.utilities.seed", "seed_everything")),
    (".plugins.environments", "ClusterEnvironment"),
]


@pytest.mark.parametrize(
    ("module", "name", "own"),
    [
        ("", "LightningModule", rankwise.TrainingModule),
        ("", "LightningDataModule", rankwise.DataModule),
        (".core.datamodule", "LightningDataModule", rankwise.DataModule),
        (".pytorch.utilities.combined_loader", "CombinedLoader", rankwise.data.CombinedLoader),
        (".pytorch.callbacks", "Timer", rankwise.callbacks.Timer),
        (".callbacks.early_stopping", "EarlyStopping", rankwise.callbacks.EarlyStopping),
        (".callbacks.progress.tqdm_progress", "TQDMProgressBar", rankwise.callbacks.TQDMProgressBar),
        (".core.module", "LightningModule", rankwise.TrainingModule),
        (".callbacks.lr_finder", "LearningRateFinder", rankwise.callbacks.LearningRateFinder),
        (".loggers", "WandbLogger", rankwise.loggers.WandbLogger),
        (".loggers.tensorboard", "TensorBoardLogger", rankwise.loggers.TensorBoardLogger),
        (".pytorch.trainer.states", "TrainerFn", TrainerFn),
        (".plugins.environments.slurm_environment", "SLURMEnvironment", SlurmEnvironment),
        (".fabric.plugins.io.checkpoint_io", "CheckpointIO", rankwise.checkpoint.CheckpointIO),
        *(
            ("", name, getattr(rankwise, name))
            for name in ("Trainer", "Fabric", "Callback", "seed_everything")
        ),
        *((module, name, getattr(rankwise, name)) for module, name in SAME_NAMES),
        *((".utilities.distributed", name, getattr(process_group, name)) for name in COLLECTIVES.split()),
        (".utilities.distributed", "register_ddp_comm_hook", rankwise.gradient_sync.register_ddp_comm_hook),
    ],
)
def test_names_are_rankwises(module: str, name: str, own: object) -> None:
    """A name of Lightning's is rankwise's own object, from every module that Lightning has it in."""
    assert getattr(importlib.import_module(PACKAGE + module), name) is own


def test_names_of_the_modules() -> None:
    """Submodules need no import; special and private names are missing as Python's own tools expect."""
    pl: Any = importlib.import_module(PACKAGE)
    assert pl.callbacks.Timer is pl.pytorch.callbacks.timer.Timer is rankwise.callbacks.Timer
    assert pl.__version__ == rankwise.__version__
    missing = importlib.import_module(f"{PACKAGE}.serve")
    for module in (pl, pl.callbacks, missing):
        assert getattr(module, "__wrapped__", None) is None
        assert getattr(module, "_private", None) is None


def test_importing_is_cheap() -> None:
    """Importing the namespace does not import torch, nor does a type for user functions."""
    imports = f"import sys, {PACKAGE}; from rankwise.launchers.commands import CommandProcess"
    code = f"{imports}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=200).returncode == 0


@pytest.mark.parametrize(
    ("statement", "remedy"),
    [
        ("from rankwise.lightning.cli import LightningCLI", "build the Trainer in code"),
        ("from rankwise.lightning import cli", "build the Trainer in code"),
        ("from rankwise.lightning.strategies import FSDPStrategy", "out of scope"),
        ("from rankwise.lightning.callbacks import BatchSizeFinder", "in short fits"),
        ("from rankwise.lightning.tuner import Tuner", "lr_find"),
        ("from rankwise.lightning.pytorch.tuner.tuning import Tuner", "lr_find"),
        ("from rankwise.lightning.pytorch.demos.boring_classes import BoringModel", "in your script"),
        ("import rankwise.lightning as pl; pl.Unheard", "docs/from_lightning.md"),
        ("from rankwise.lightning.plugins.ddp_plugin import DDPPlugin", "derive from DDPStrategy"),
        ("from rankwise.lightning.plugins.native_amp import NativeAMPPlugin", "MixedPrecision"),
        ("from rankwise.lightning.plugins import ApexPlugin", "MasterWeightsPrecision"),
        ("from rankwise.lightning.utilities.rank_zero import unheard", "docs/from_lightning.md"),
    ],
)
def test_missing_names(statement: str, remedy: str) -> None:
    """A name that does not exist here is an error of its own, with what to do, in every form of import."""
    with pytest.raises(MissingNameError, match=remedy):
        exec(statement)


def test_nothing_that_exists_is_listed_as_missing() -> None:
    """The table of missing names has no name that exists."""
    for name in ("core", "callbacks", "fabric", "loggers", "plugins", "strategies", "utilities"):
        module = importlib.import_module(f"{PACKAGE}.{name}")
        assert set(module.__all__) & set(MISSING_NAMES) == set(), name


def test_utilities() -> None:
    """Norms of gradients have Lightning's names; numbers drawn in a block do not change those after it."""
    layer = nn.Linear(2, 1)
    assert grad_norm(layer, 2) == {}
    layer(torch.tensor([[3.0, 0.0]])).sum().backward()
    norms = {name: value.item() for name, value in grad_norm(layer, 2).items()}
    assert norms == pytest.approx(
        {"grad_2.0_norm/weight": 3.0, "grad_2.0_norm/bias": 1.0, "grad_2.0_norm_total": 10**0.5}
    )
    assert grad_norm(layer, "inf")["grad_inf_norm_total"].item() == 3.0
    raises(InvalidArgumentError, "more than 0", grad_norm, layer, 0)
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    with isolate_rng():
        torch.rand(5)
    assert torch.equal(torch.rand(3), expected)
