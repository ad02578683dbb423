"""`TorchCheckpointIO`: files of `torch.save`, written atomically and read without running code."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import io
import itertools
import os
import pickle
import pickletools
import re
import secrets
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, final

import torch
from torch.serialization import get_crc32_options, get_unsafe_globals_in_checkpoint

from rankwise.checkpoint.base import CheckpointIO, as_checkpoint_error, reason_for
from rankwise.errors import CheckpointError
from rankwise.paths import expanded_path

_MAX_NAMED = 5
_OPEN_FILES = "/proc/self/fd"


@final
class TorchCheckpointIO(CheckpointIO):
    """Stores checkpoints as files of `torch.save`, on a local or shared file system.

    Writing is atomic, so that a reader gets the previous file or the new one: the data is written to a
    temporary file in the same folder, flushed to the disk, and renamed to the target. Files are read with
    `weights_only=True`: tensors and plain types load; objects that could run code raise an error.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> None:
        """Write `checkpoint` to `path`, creating its folder; raise too if it could not be loaded."""
        with as_checkpoint_error(path), _replacing(path) as file:
            _write(checkpoint, file, path)

    def check_checkpoint(self, part: dict[str, Any], path: str | os.PathLike[str]) -> None:
        """Write `part` to memory, and check that it can be loaded."""
        with as_checkpoint_error(path):
            _write(part, io.BytesIO(), path)

    def load_checkpoint(self, path: str | os.PathLike[str], map_location: Any = "cpu") -> dict[str, Any]:
        """Return the checkpoint at `path`, its tensors on `map_location`."""
        handled = sys.exc_info()[1]
        try:
            file = expanded_path(path)
            _check_file(file)
            checkpoint = torch.load(file, map_location=map_location, weights_only=True)
        except CheckpointError:
            raise
        except pickle.UnpicklingError as error:
            found = re.search(r"(?:GLOBAL|global|class) ([\w.]+)", str(error))
            what = found[1] if found else "something"
            problem = f"holds {what}, which weights_only=True does not load: it could run code"
            remedy = "keep plain types and tensors in a checkpoint; load untrusted files in no other way."
            raise _load_error(path, problem, remedy) from error
        except Exception as error:
            raise _load_error(path, f"could not be read: {reason_for(error, handled)}") from error
        if not isinstance(checkpoint, dict):
            kind = type(checkpoint).__name__
            raise _load_error(path, f"holds a {kind}, but a checkpoint is a dictionary")
        return checkpoint

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove the file at `path`, if it exists."""
        expanded_path(path).unlink(missing_ok=True)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def _write(checkpoint: dict[str, Any], file: IO[bytes], path: str | os.PathLike[str]) -> None:
    torch.save(checkpoint, file)
    check_loadable(checkpoint, file, os.fspath(path))


@contextlib.contextmanager
def _replacing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Open a temporary file that replaces `path` if the block succeeds, and is deleted otherwise."""
    target = expanded_path(path).resolve()  # keeps a symbolic link, and uses the file system of its target
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(target)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        file = _open_unnamed(target.parent)
        is_named = file is None
        with temporary.open("x+b") if file is None else file as file:
            _lock(file)
            yield file
            file.flush()
            os.fsync(file.fileno())
            if not is_named:
                os.link(f"{_OPEN_FILES}/{file.fileno()}", temporary, src_dir_fd=file.fileno())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # not supported by some network file systems
            os.fsync(folder)  # flushes the rename to the disk
    finally:
        os.close(folder)


def _open_unnamed(folder: Path) -> IO[bytes] | None:
    """Open a file without a name, which a killed process does not leave behind; None if unsupported."""
    flag = getattr(os, "O_TMPFILE", None)  # Linux has it
    if flag is None or not Path(_OPEN_FILES).exists():
        return None
    try:
        return open(os.open(folder, flag | os.O_RDWR, 0o666), "w+b")  # noqa: PTH123 -- _replacing closes it; a descriptor has no path
    except OSError:
        return None


def _lock(file: IO[bytes]) -> bool:
    """Lock a temporary file while it is open; return whether the lock was acquired."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # another process has the lock, or locks are not supported
        return False
    return True


def _remove_abandoned(target: Path) -> None:
    """Remove the temporary files of processes that were killed while they wrote to `target`."""
    for temporary in target.parent.glob(f".{glob.escape(target.name)}.*.tmp"):
        with contextlib.suppress(OSError), temporary.open("rb") as file:
            if _lock(file):
                temporary.unlink()


def check_loadable(checkpoint: dict[str, Any], file: IO[bytes], path: str) -> None:
    """Raise if `file`, which contains `checkpoint`, cannot be loaded with `weights_only=True`.

    torch reads the names in the pickle, not the data of tensors.
    """
    file.seek(0)
    refused = set(get_unsafe_globals_in_checkpoint(file))
    if not refused:
        return
    places = ", ".join(itertools.islice(_places(checkpoint, "checkpoint", refused), _MAX_NAMED))
    names = ", ".join(sorted(refused)[:_MAX_NAMED])
    raise CheckpointError(
        path=path,
        problem=f"cannot be written, as weights_only=True does not load {places or names}",
        remedy="keep tensors, numbers, strings, lists and dictionaries of them, such as array.tolist(), "
        f"member.name, str(date) or vars(namespace); or, if you trust {names}: "
        "torch.serialization.add_safe_globals([...]), here and wherever it is loaded.",
    )


def _places(value: Any, path: str, refused: set[str]) -> Iterator[str]:
    """Yield the paths of `refused` classes in nested values, such as `checkpoint['epochs'][0] (range)`."""
    if type(value) in (dict, OrderedDict):
        for key, item in value.items():
            yield from _places(key, f"the key {key!r} of {path}", refused)
            yield from _places(item, f"{path}[{key!r}]", refused)
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            yield from _places(item, f"{path}[{index}]", refused)
    elif not refused.isdisjoint(_names_in(value)):
        kind = value if isinstance(value, type) else type(value)
        module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
        yield f"{path} ({'the class ' if kind is value else ''}{module}{kind.__qualname__})"


def _names_in(value: Any) -> Iterator[str]:
    """Yield the names of the classes and functions in a pickle of `value`."""
    pickled = io.BytesIO()
    _PicklerWithoutData(pickled, protocol=2, fix_imports=False).dump(value)  # torch.save's protocol
    for opcode, argument, _ in pickletools.genops(pickled.getvalue()):
        if opcode.name == "GLOBAL":
            yield str(argument).replace(" ", ".")


class _PicklerWithoutData(pickle.Pickler):
    """Leaves out the data of tensors, as torch.save does."""

    def persistent_id(self, value: Any) -> str | None:
        return "" if torch.is_storage(value) else None


def _load_error(
    path: str | os.PathLike[str],
    problem: str,
    remedy: str = "pass the path of an intact file that Trainer.save_checkpoint or ModelCheckpoint wrote.",
) -> CheckpointError:
    return CheckpointError(path=os.fspath(path), problem=problem, remedy=remedy)


def _check_file(path: Path) -> None:
    """Raise unless `path` is an intact archive; torch itself does not detect changed bytes in a tensor."""
    if path.is_dir():
        raise _load_error(path, "is a folder, not a file")
    if not path.exists():
        raise _load_error(path, "does not exist; a relative path starts at the working directory")
    with path.open("rb") as file:
        start = file.read(2)
    if start != b"PK":
        raise _load_error(path, "is not a file of torch.save" if start else "is empty")
    if not zipfile.is_zipfile(path):
        raise _load_error(path, "is cut off")
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip() if get_crc32_options() else None
    except zipfile.BadZipFile:
        damaged = "table of contents"
    if damaged:
        raise _load_error(path, f"is damaged: the checksum of its record {damaged!r} does not match")
