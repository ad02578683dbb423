"""Checkpoint files: written atomically, and errors for damaged or hostile ones."""

import argparse
import collections
import datetime as dt
import enum
import os
import pickle
import signal
import time
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rankwise.checkpoint import AsyncCheckpointIO, TorchCheckpointIO
from rankwise.errors import CheckpointError
from rankwise.processes.signals import JobStopped
from tests.helpers.own_process import signal_handled
from tests.helpers.raising import raises


class Own(torch.Tensor):
    """A tensor of the user's."""


class Hostile:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/rankwise-was-here",)


def save(checkpoint: Any, path: Path) -> None:
    TorchCheckpointIO().save_checkpoint(checkpoint, path)


def load(path: Path) -> Any:
    return TorchCheckpointIO().load_checkpoint(path)


def assert_untouched(path: Path) -> None:
    """Expect the previous file, and no temporary one."""
    assert load(path)["epoch"] == 3
    assert list(path.parent.iterdir()) == [path]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The path of a saved checkpoint."""
    path = tmp_path / "some" / "model.ckpt"
    save({"weights": torch.ones(1000), "epoch": 3}, path)
    return path


def test_round_trip(path: Path) -> None:
    """A saved checkpoint loads, and its folder is created."""
    loaded = load(path)
    assert loaded["epoch"] == 3
    assert torch.equal(loaded["weights"], torch.ones(1000))


def test_failure_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed save, or Ctrl-C while writing, leaves the previous file intact, and no temporary file."""
    with pytest.raises(CheckpointError, match="could not be written") as caught:
        save({"epoch": 4, "bad": lambda: None}, path)
    assert caught.value.path == str(path)
    assert_untouched(path)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    raises(KeyboardInterrupt, None, save, {"epoch": 4}, path)
    assert_untouched(path)


def test_reasons(path: Path, tmp_path: Path) -> None:
    """They are the save's own, not the exception during which it was called; what cannot be read is said."""
    with pytest.raises(CheckpointError, match=r"could not be written: (FileExists|NotADirectory)Error"):
        try:
            raise ValueError("the loss is infinite")
        except ValueError:
            save({}, path / "below.ckpt")
    raises(CheckpointError, r"no\.ckpt.*does not exist", load, tmp_path / "no.ckpt")
    raises(CheckpointError, "is a folder", load, tmp_path)
    torch.save([1, 2], path)
    raises(CheckpointError, "holds a list", load, path)
    torch.save({"weights": Hostile()}, path)
    raises(CheckpointError, r"holds posix\.system, which weights_only=True does not load", load, path)


class Colour(enum.Enum):
    """Not a plain type."""

    RED = 1


NOT_LOADED: dict[str, Any] = {
    "array": np.zeros(3),
    "member": Colour.RED,
    "date": dt.date(2020, 1, 2),
    "range": range(3),
    "slice": slice(1),
    "namespace": argparse.Namespace(lr=0.1),
    "defaultdict": collections.defaultdict(int, a=1),
    "class": np.float32,
}


@pytest.mark.parametrize("kind", NOT_LOADED)
def test_what_could_not_be_loaded_is_not_written(path: Path, kind: str) -> None:
    """A value that could not be loaded is an error with its path; the previous file stays."""
    checkpoint = {"weights": torch.ones(1000), "own": [{"fine": 1}, {kind: NOT_LOADED[kind]}]}
    with pytest.raises(CheckpointError, match=rf"checkpoint\['own'\]\[1\]\['{kind}'\] \(") as caught:
        save(checkpoint, path)
    assert caught.value.path == str(path)
    assert_untouched(path)


def test_every_value_that_cannot_be_loaded_is_named(path: Path) -> None:
    """Keys, members of a set, and tensors of an own class are found too."""
    checkpoint = {"a": {Colour.RED: 1}, "b": {Colour.RED}, "c": OrderedDict(d=torch.ones(2).as_subclass(Own))}
    with pytest.raises(CheckpointError) as caught:
        save(checkpoint, path)
    where = __name__
    assert caught.value.problem.endswith(
        f"the key {Colour.RED!r} of checkpoint['a'] ({where}.Colour), checkpoint['b'] (set), "
        f"checkpoint['c']['d'] ({where}.Own)"
    )
    assert f"{where}.Colour, {where}.Own" in caught.value.remedy


def test_what_is_written(path: Path) -> None:
    """Everything that `weights_only=True` loads; and classes registered with torch, which stay registered."""
    checkpoint = {
        "plain": [None, True, 1, 2**100, 0.5, "text", b"bytes", {1, 2}, (1, (2,))],
        "ordered": OrderedDict(a=1),
        "counter": collections.Counter("aab"),
        "torch": [torch.float32, torch.device("cpu"), torch.Size([1, 2]), nn.Parameter(torch.ones(2))],
        "sparse": torch.eye(2).to_sparse(),
        "bfloat16": torch.ones(2, dtype=torch.bfloat16),
        "state_dict": nn.BatchNorm1d(2).state_dict(),
    }
    save(checkpoint, path)
    assert str(load(path)) == str(checkpoint)
    with torch.serialization.safe_globals([Colour]):
        save({"colour": Colour.RED}, path)
        assert load(path) == {"colour": Colour.RED}
    with torch.serialization.safe_globals([Colour, argparse.Namespace]):  # one of them loads anyway
        load(path)
        assert set(torch.serialization.get_safe_globals()) >= {Colour, argparse.Namespace}


def test_link_stays_a_link(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save through a link replaces its target; one that is being made survives a save into its folder."""
    link = path.with_name("last.ckpt")
    link.symlink_to(path)
    save({"epoch": 4}, link)
    assert link.is_symlink()
    assert load(path)["epoch"] == 4
    link.unlink()

    io, replace = TorchCheckpointIO(), Path.replace

    def after_another_save(temporary: Path, target: Path) -> Path:
        monkeypatch.undo()
        io.save_checkpoint({}, path.with_name("other.ckpt"))
        return replace(temporary, target)

    monkeypatch.setattr(Path, "replace", after_another_save)
    io.link_checkpoint(path, link)  # others remove what killed saves have left
    assert link.samefile(path)


def someone_elses(path: Path, user: int = 65534) -> Path:
    """Give a file, or a link itself, to another user."""
    if os.getuid() != 0:
        pytest.skip("needs root, to give files to another user")
    os.chown(path, user, user, follow_symlinks=False)
    return path


@pytest.mark.parametrize("mode", [0o1777, 0o777, 0o775])
@pytest.mark.parametrize("place", ["file", "folder", "second", "chain"])
def test_a_link_of_another_user(path: Path, mode: int, place: str) -> None:
    """Where others may write, nothing is written through links that somebody else has placed there."""
    shared, own = path.parent / "shared", path.parent / "own"
    shared.mkdir()
    own.mkdir()
    shared.chmod(mode)
    target, below = {"folder": (path.parent, path.name), "second": (own, "new")}.get(place, (path, ""))
    link = shared / "link"
    link.symlink_to(target)
    given = someone_elses(link) / below
    if place == "chain":  # by an own link
        given = own / "link"
        given.symlink_to(link)
    io = TorchCheckpointIO()
    for write in (io.save_checkpoint, lambda value, to: io.link_checkpoint(path, to)):
        with pytest.raises(CheckpointError, match="is a symbolic link of another user") as caught:
            write({"epoch": 4}, given)
        assert str(link) in str(caught.value)
    assert link.is_symlink()
    assert io.load_checkpoint(path)["epoch"] == 3
    assert list(own.iterdir()) == [own / "link"] * (place == "chain")


@pytest.mark.parametrize("mode", [0o1777, 0o755])
def test_a_link_that_nobody_else_could_place(path: Path, mode: int) -> None:
    """Own links work in shared folders, and a folder's owner decides about links in it."""
    folder, user = path.parent / "other", 65534
    folder.mkdir()
    folder.chmod(mode)
    link = folder / "link"
    link.symlink_to(path)
    for owner in (0, user):
        someone_elses(link, owner)
        someone_elses(folder, owner)
        save({"epoch": owner}, link)
        assert load(path)["epoch"] == owner


def test_permissions_of_another_users_file(path: Path) -> None:
    """The permissions of a file that somebody else has put there are not those of the checkpoint."""
    usual = path.stat().st_mode
    path.chmod(0o666)
    someone_elses(path)
    save({"epoch": 4}, path)
    assert (path.stat().st_mode, path.stat().st_uid) == (usual, os.getuid())


def test_permissions(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of other new files, or of the old file, whether or not it has a name meanwhile."""
    other = path.with_name("other")
    other.touch()
    assert path.stat().st_mode == other.stat().st_mode
    for folder in ("/proc/self/fd", "/nowhere"):  # a temporary file without a name, and one with a name
        monkeypatch.setattr("rankwise.checkpoint.atomic_file._OPEN_FILES", folder)
        path.chmod(0o600)
        save({"value": folder}, path)
        assert path.stat().st_mode & 0o777 == 0o600
        assert load(path)["value"] == folder


def test_a_pipe(tmp_path: Path) -> None:
    """What is no file is neither replaced nor read; any name that the file system takes is."""
    pipe = tmp_path / "pipe.ckpt"
    os.mkfifo(pipe)
    for use in (partial(save, {}), load):
        raises(CheckpointError, "is a device, pipe or socket, not a file", use, pipe)
    assert pipe.is_fifo()
    path = tmp_path / ("n" * 250 + ".ckpt")
    for epoch in range(2):
        save({"epoch": epoch}, path)
    assert load(path) == {"epoch": 1}


def test_other_files_are_kept(path: Path) -> None:
    """Files beside a checkpoint are kept, whatever they are called, but for those of killed saves."""
    own, pipe = path.with_name(".model.ckpt.notes.tmp"), path.with_name(".rankwise-00000000.tmp")
    abandoned = path.with_name(".rankwise-00000001.tmp")
    own.touch()
    os.mkfifo(pipe)
    abandoned.touch()
    save({}, path)
    assert set(path.parent.iterdir()) == {path, own, pipe}
    for _ in range(2):  # removing works without a file, too
        TorchCheckpointIO().remove_checkpoint(path)
    assert set(path.parent.iterdir()) == {own, pipe}


def test_foreign_files(path: Path) -> None:
    """Files that torch.save did not write are errors before unpickling."""
    for contents in (b"", b"hello, this is text", pickle.dumps({"epoch": 3}), pickle.dumps(Hostile())):
        path.write_bytes(contents)
        raises(CheckpointError, "is not a file of torch.save" if contents else "is empty", load, path)


def test_damaged_files(path: Path) -> None:
    """A truncated file is an error, and so is a changed byte in a tensor, which torch does not detect."""
    whole = bytearray(path.read_bytes())
    for kept in (0.01, 0.5, 0.99):
        path.write_bytes(whole[: int(len(whole) * kept)])
        raises(CheckpointError, "is cut off", load, path)
    whole[len(whole) // 2] ^= 0xFF
    path.write_bytes(whole)
    raises(CheckpointError, "is damaged: the checksum of its record 'archive/data/0'", load, path)


class Acts:
    """Calls a function when it is pickled."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.act = act

    def __reduce__(self) -> tuple[type[OrderedDict[str, int]], tuple[()]]:
        self.act()
        return OrderedDict, ()


def test_unfinished_file_has_no_name(tmp_path: Path) -> None:
    """A process that is killed while writing leaves no file, if the file system supports it."""
    try:
        os.close(os.open(tmp_path, os.O_TMPFILE | os.O_RDWR))
    except (AttributeError, OSError):
        pytest.skip("no files without a name here")
    seen: list[list[Path]] = []
    save({"looks": Acts(lambda: seen.append([*tmp_path.iterdir()]))}, tmp_path / "last.ckpt")
    assert seen
    assert not any(seen)
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


def test_small_files_stay_small(path: Path) -> None:
    """What would take far more than the file is refused unread or uncopied; an expanded mask is not."""
    torch.save({"weights": torch.zeros(1 << 20)}, path)
    with zipfile.ZipFile(path) as archive:
        records = {each.filename: archive.read(each) for each in archive.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in records.items():
            archive.writestr(name, content)
    raises(CheckpointError, "its records are larger than the file", load, path)
    torch.save({"mask": torch.ones(1).expand(1000)}, path)
    assert load(path)["mask"].shape == (1000,)
    torch.save({"state": [torch.zeros(1).expand(1 << 40)]}, path)
    raises(CheckpointError, "repeat their data to 4398046511100 bytes more than it has", load, path)


def doubled(depth: int, kind: Callable[[Any], Any] = list) -> Any:
    """Return containers each of which holds the previous one twice."""
    value: Any = 1
    for _ in range(depth):
        value = kind([value, value])
    return value


KINDS: dict[str, Callable[[Any], Any]] = {
    "list": list,
    "tuple": tuple,
    "dict": lambda pair: dict(enumerate(pair)),
    "namespace": lambda pair: argparse.Namespace(a=pair[0], b=pair[1]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_containers_at_many_places(path: Path, kind: str) -> None:
    """At 2^60 places they are refused at once, as comparing or printing would not end; at some they load."""
    value = doubled(60, KINDS[kind])
    torch.save({"own": value}, path)
    start = time.process_time()
    raises(CheckpointError, r"holds values at \d{19} places", load, path)
    raises(CheckpointError, "cannot be written", save, {"own": value}, path.with_name("new"))
    assert time.process_time() - start < 1
    value = doubled(12)
    save({"own": value}, path)
    loaded = load(path)["own"]
    assert loaded == value
    assert loaded[0] is loaded[1]
    bad = [range(3)]  # what cannot be loaded is named once
    with pytest.raises(CheckpointError) as caught:
        save({"a": bad, "b": bad}, path)
    assert caught.value.problem.endswith("does not load checkpoint['a'][0] (range)")


@pytest.mark.parametrize("error", [TimeoutError, RuntimeError, JobStopped, pickle.UnpicklingError])
@pytest.mark.parametrize("action", ["load", "save", "save later"])
def test_an_error_of_a_signal_handler(path: Path, error: type[BaseException], action: str) -> None:
    """What the handler of a signal raises during a load or a save is raised as it is."""

    def stop(*_: object) -> None:
        raise error("from the handler")

    def signalled(*_: object) -> None:
        signal.raise_signal(signal.SIGUSR1)

    io = AsyncCheckpointIO() if action == "save later" else TorchCheckpointIO()
    with signal_handled(signal.SIGUSR1, stop), pytest.raises(error, match="from the handler") as caught:
        if action == "load":
            io.load_checkpoint(path, signalled)
        else:
            io.save_checkpoint({"own": Acts(signalled)}, path)
    assert type(caught.value) is error
    assert io.load_checkpoint(path)["epoch"] == 3
