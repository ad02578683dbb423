"""A full disk or SIGKILL while a checkpoint is written: the previous checkpoint always loads."""

import contextlib
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

SOAK = pytest.param(50, marks=pytest.mark.soak)
MEBIBYTE = 1 << 20
FORK = multiprocessing.get_context("fork")
IO = TorchCheckpointIO()

both_kinds = pytest.mark.parametrize("io", [IO, AsyncCheckpointIO()], ids=["torch", "async"])
with_and_without_unnamed_files = pytest.mark.parametrize("unnamed_files", [True, False], indirect=True)


@pytest.fixture
def unnamed_files(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take away files without a name, which network file systems lack."""
    if not request.param:
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)


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


@both_kinds
@pytest.mark.parametrize("times", [2, SOAK])
def test_disk_full(io: CheckpointIO, times: int, small_disk: Path) -> None:
    """The error names the path; the previous file is complete, and there is no other file."""
    path = small_disk / "last.ckpt"
    io.save_checkpoint({"step": 1}, path)
    chance = random.Random(5)
    for _ in range(times):
        size = chance.randrange(MEBIBYTE, 2 * MEBIBYTE)
        problem = r"last\.ckpt.*could not be written: OSError.*No space left"
        with pytest.raises(CheckpointError, match=problem):
            io.save_checkpoint({"step": 2, "weights": torch.ones(size // 4)}, path)
            io.teardown()
        assert io.load_checkpoint(path) == {"step": 1}
        assert list(small_disk.iterdir()) == [path]


@both_kinds
@pytest.mark.parametrize("times", [5, SOAK])
def test_killed_while_saving(io: CheckpointIO, times: int, tmp_path: Path) -> None:
    """The last saved checkpoint or a newer one loads; the next save removes the incomplete file."""
    path, chance = tmp_path / "last.ckpt", random.Random(6)
    pending = 3 if isinstance(io, AsyncCheckpointIO) else 0  # one in hand, two waiting
    for _ in range(times):
        ours, theirs = FORK.Pipe(duplex=False)
        process = FORK.Process(target=save_for_ever, args=(io, path, theirs))
        process.start()
        theirs.close()
        steps = [ours.recv() for _ in range(pending + 2)]
        time.sleep(chance.random() / 50)
        process.kill()
        process.join()
        with contextlib.suppress(EOFError), ours:
            while True:
                steps.append(ours.recv())
        loaded = IO.load_checkpoint(path)
        assert loaded["step"] >= steps[-1] - pending
        assert torch.equal(loaded["weights"], torch.full((200_000,), float(loaded["step"])))
    IO.save_checkpoint({}, path)
    assert list(tmp_path.iterdir()) == [path]


def save_and_be_killed(path: Path) -> None:
    """Be killed when the whole file has a name of its own, and not the target's."""
    torch.set_num_threads(1)  # this process is forked
    Path.replace = lambda self, target: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign,assignment,return-value]  # that is the point
    IO.save_checkpoint({"step": 2}, path)


@with_and_without_unnamed_files
def test_killed_before_the_previous_file_is_replaced(unnamed_files: None, tmp_path: Path) -> None:
    """No system call replaces a file by one without a name: the next save to the folder removes the file."""
    path, other = tmp_path / "last.ckpt", tmp_path / "other.ckpt"
    IO.save_checkpoint({"step": 1}, path)
    process = FORK.Process(target=save_and_be_killed, args=(path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert IO.load_checkpoint(path) == {"step": 1}
    assert len(list(tmp_path.iterdir())) == 2
    IO.save_checkpoint({}, other)
    assert sorted(tmp_path.iterdir()) == [path, other]


def save_often(path: Path) -> None:
    for step in range(100):
        IO.save_checkpoint({"step": step, "weights": torch.full((2000,), float(step))}, path)


@with_and_without_unnamed_files
def test_several_processes_save_to_one_path(unnamed_files: None, tmp_path: Path) -> None:
    """Every save succeeds, the file is whole, and nothing else is left."""
    path = tmp_path / "last.ckpt"
    processes = [FORK.Process(target=save_often, args=(path,)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    loaded = IO.load_checkpoint(path)
    assert torch.equal(loaded["weights"], torch.full((2000,), float(loaded["step"])))
    assert list(tmp_path.iterdir()) == [path]


def save_as_another_user(path: Path) -> None:
    os.setuid(65534)
    IO.save_checkpoint({"step": 2}, path)


def test_no_permission(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A folder without write permission is an error with its path; the file in it stays."""
    if os.getuid() != 0:
        pytest.skip("needs root, to become another user")
    path = tmp_path / "last.ckpt"
    IO.save_checkpoint({"step": 1}, path)
    process = FORK.Process(target=save_as_another_user, args=(path,))
    process.start()
    process.join()
    printed = capfd.readouterr().err
    assert "could not be written: PermissionError" in printed
    assert str(path) in printed
    assert IO.load_checkpoint(path) == {"step": 1}
