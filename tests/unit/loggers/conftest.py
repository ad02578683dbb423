"""W&B and MLflow write into the test's folder, and open no connection."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import logger_files


@pytest.fixture(autouse=True)
def _offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("WANDB_MODE", "WANDB_PROJECT", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    for name, value in logger_files.variables(tmp_path).items():
        monkeypatch.setenv(name, value)
    for name in ("excepthook", "exit"):  # W&B replaces them
        monkeypatch.setattr(sys, name, getattr(sys, name))
    yield
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()


@pytest.fixture
def on_rank_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process a rank that does not write."""
    monkeypatch.setattr("rankwise.ranks.rank_zero_only.rank", 1)
