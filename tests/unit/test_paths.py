"""File names."""

import json
from pathlib import Path
from typing import Any

import pytest

import rankwise.errors
from rankwise import Trainer
from rankwise.errors import ConfigurationError
from rankwise.failures.record import FailureRecord
from rankwise.paths import absolute_path, checkpoint_path, is_path_below, join_path, path_in_package
from rankwise.process_group.interception import call_from_here
from rankwise.ranks import RankInfo
from tests.helpers.raising import raises


@pytest.mark.usefixtures("removed_directory")
def test_a_relative_path_without_a_working_directory(tmp_path: Path) -> None:
    """It is an error that says so; an absolute path needs none."""
    assert absolute_path(tmp_path) == str(tmp_path)
    raises(ConfigurationError, "'logs' is relative, but the working directory has", absolute_path, "logs")
    raises(ConfigurationError, "the working directory has been removed", Trainer, strategy="single_device")


@pytest.mark.parametrize(
    ("folder", "joined"),
    [
        ("s3://bucket/run", "s3://bucket/run/last.ckpt"),
        ("s3://bucket/run/", "s3://bucket/run/last.ckpt"),
        ("memory://", "memory://last.ckpt"),
        ("simplecache::s3://bucket", "simplecache::s3://bucket/last.ckpt"),
        ("/runs/a:/b//c/", "/runs/a:/b/c/last.ckpt"),
    ],
)
def test_paths_of_checkpoints(folder: str, joined: str) -> None:
    """A path with a scheme keeps its form, and a file in it is below it."""
    assert join_path(checkpoint_path(folder), "last.ckpt") == joined
    assert checkpoint_path(joined) == joined
    assert is_path_below(joined, folder)
    assert not is_path_below(join_path(folder, "../last.ckpt"), folder)
    assert not is_path_below(folder, joined)


def test_a_users_folder_called_rankwise(tmp_path: Path) -> None:
    """It is not the package: where a collective is called, and a traceback, name the user's file."""
    names: dict[str, Any] = {"__name__": "rankwise.train", "call": call_from_here, "loads": json.loads}
    program = "def place(): return call(None, 'barrier')\ndef fail(): loads('{')\n"
    exec(compile(program, str(tmp_path / "rankwise" / "train.py"), "exec"), names)
    assert names["place"]().where == "at train.py:1 in place"
    with pytest.raises(ValueError, match="Expecting") as caught:
        names["fail"]()
    error = caught.value.with_traceback(caught.tb.tb_next)  # without this function
    first = FailureRecord.of_exception(RankInfo(0, 0, 0, 1, 1, 1), error).traceback_text.splitlines()[1]
    assert first.endswith('rankwise/train.py", line 2, in fail')
    assert path_in_package(rankwise.errors.__file__) == "rankwise/errors.py"
