"""A full disk or SIGKILL while a checkpoint is written: the previous checkpoint always loads."""

import itertools
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from rankwise.checkpoint import AsyncCheckpointIO, CheckpointIO, TorchCheckpointIO
from rankwise.errors import CheckpointError
from rankwise.strategies import Strategy
from tests.helpers.scripts import ScriptRunner

SOAK = pytest.param(50, marks=pytest.mark.soak)
MEBIBYTE = 1 << 20


def save_for_ever(io: CheckpointIO, path: Path, connection: Connection) -> None:
    """Save one checkpoint after the other, and send the number of each."""
    torch.set_num_threads(1)  # this process is forked
    for step in itertools.count(1):
        io.save_checkpoint({"step": step, "weights": torch.full((200_000,), float(step))}, path)
        connection.send(step)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of one mebibyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or (made := subprocess.run(command, capture_output=True)).returncode:
        pytest.skip(f"no small file system can be mounted here: {made.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("io", [TorchCheckpointIO(), AsyncCheckpointIO()], ids=["torch", "async"])
@pytest.mark.parametrize("times", [2, SOAK])
def test_disk_full(io: CheckpointIO, times: int, small_disk: Path) -> None:
    """The error names the path; the previous file is complete, and there is no other file."""
    path = small_disk / "last.ckpt"
    io.save_checkpoint({"step": 1}, path)
    chance = random.Random(5)
    for _ in range(times):
        size = chance.randrange(MEBIBYTE, 2 * MEBIBYTE)
        with pytest.raises(
            CheckpointError, match=r"last\.ckpt.*could not be written: OSError.*No space left"
        ):
            io.save_checkpoint({"step": 2, "weights": torch.ones(size // 4)}, path)
            io.teardown()
        assert io.load_checkpoint(path) == {"step": 1}
        assert list(small_disk.iterdir()) == [path]


@pytest.mark.parametrize("io", [TorchCheckpointIO(), AsyncCheckpointIO()], ids=["torch", "async"])
@pytest.mark.parametrize("times", [5, SOAK])
def test_killed_while_saving(io: CheckpointIO, times: int, tmp_path: Path) -> None:
    """The last saved checkpoint or a newer one loads; the next save removes the incomplete file."""
    path, chance, context = tmp_path / "last.ckpt", random.Random(6), multiprocessing.get_context("fork")
    pending = 3 if isinstance(io, AsyncCheckpointIO) else 0  # one in hand, two waiting
    for _ in range(times):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=save_for_ever, args=(io, path, theirs))
        process.start()
        theirs.close()
        steps = [ours.recv() for _ in range(pending + 2)]
        time.sleep(chance.random() / 50)
        process.kill()
        process.join()
        while ours.poll():
            try:
                steps.append(ours.recv())
            except EOFError:
                break
        ours.close()
        loaded = TorchCheckpointIO().load_checkpoint(path)
        assert loaded["step"] >= steps[-1] - pending
        assert torch.equal(loaded["weights"], torch.full((200_000,), float(loaded["step"])))
    TorchCheckpointIO().save_checkpoint({}, path)
    assert list(tmp_path.iterdir()) == [path]


def save_and_be_killed(path: Path) -> None:
    """Be killed when the whole file has a name of its own, and not the target's."""
    torch.set_num_threads(1)  # this process is forked
    Path.replace = lambda self, target: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign,assignment,return-value]  # that is the point
    TorchCheckpointIO().save_checkpoint({"step": 2}, path)


@pytest.mark.parametrize("has_unnamed_files", [True, False])
def test_killed_before_the_previous_file_is_replaced(
    has_unnamed_files: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No system call replaces a file by one without a name: the next save to the folder removes the file."""
    if not has_unnamed_files:
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    path, other = tmp_path / "last.ckpt", tmp_path / "other.ckpt"
    TorchCheckpointIO().save_checkpoint({"step": 1}, path)
    process = multiprocessing.get_context("fork").Process(target=save_and_be_killed, args=(path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert TorchCheckpointIO().load_checkpoint(path) == {"step": 1}
    assert len(list(tmp_path.iterdir())) == 2
    TorchCheckpointIO().save_checkpoint({}, other)
    assert sorted(tmp_path.iterdir()) == [path, other]


@pytest.mark.parametrize("has_unnamed_files", [True, False])
@pytest.mark.parametrize("times", [100, SOAK])
def test_several_processes_save_to_one_path(
    has_unnamed_files: bool, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every save succeeds, the file is whole, and nothing else is left."""
    if not has_unnamed_files:  # as on network file systems
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    path, context = tmp_path / "last.ckpt", multiprocessing.get_context("fork")
    processes = [context.Process(target=save_often, args=(path, times)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    loaded = TorchCheckpointIO().load_checkpoint(path)
    assert torch.equal(loaded["weights"], torch.full((2000,), float(loaded["step"])))
    assert list(tmp_path.iterdir()) == [path]


def save_often(path: Path, times: int) -> None:
    """Save to the path."""
    for step in range(times):
        weights = torch.full((2000,), float(step))
        TorchCheckpointIO().save_checkpoint({"step": step, "weights": weights}, path)


SAVE_AS_ANOTHER = """
    import os, sys, torch
    from rankwise.checkpoint import TorchCheckpointIO

    torch.save({}, os.devnull)
    os.setuid(65534)
    TorchCheckpointIO().save_checkpoint({"step": 2}, sys.argv[1])
"""


def test_no_permission(run_script: ScriptRunner) -> None:
    """A folder without write permission is an error with its path; the file in it stays."""
    if os.getuid() != 0:
        pytest.skip("needs root, to become another user")
    path = run_script.folder / "last.ckpt"
    TorchCheckpointIO().save_checkpoint({"step": 1}, path)
    result = run_script(SAVE_AS_ANOTHER, str(path))
    assert "could not be written: PermissionError" in result.stderr, result
    assert str(path) in result.stderr
    assert TorchCheckpointIO().load_checkpoint(path) == {"step": 1}


def save(strategy: Strategy, path: Path) -> str:
    """Return the error's text."""
    with pytest.raises(CheckpointError) as caught:
        strategy.save_checkpoint({}, path)
    return str(caught.value)
