"""File names."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankwise import Trainer
from rankwise.errors import ConfigurationError
from rankwise.paths import absolute_path, unused_checkpoint


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


def test_a_symbolic_link_is_not_our_own(tmp_path: Path) -> None:
    """Another name is chosen, also beside a link to nothing: a file that a link names is not replaced."""
    best, last, version = (tmp_path / name for name in ("best.ckpt", "last.ckpt", "last-v1.ckpt"))
    best.touch()
    last.symlink_to(best)
    version.symlink_to(tmp_path / "removed.ckpt")
    assert unused_checkpoint(tmp_path, "last", own=[str(last)]) == str(tmp_path / "last-v2.ckpt")
    assert unused_checkpoint(tmp_path, "best", own=[str(best)]) == str(best)
