"""File names."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankwise import Trainer
from rankwise.errors import ConfigurationError
from rankwise.paths import absolute_path


def test_a_relative_path_without_a_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an error that says so; an absolute path needs none."""
    folder = tmp_path / "removed"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert absolute_path(tmp_path) == str(tmp_path)
    with pytest.raises(ConfigurationError, match="'logs' is relative, but the working directory has"):
        absolute_path("logs")
    with pytest.raises(ConfigurationError, match="the working directory has been removed"):
        Trainer(strategy="single_device")
