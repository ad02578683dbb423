"""`TorchCheckpointIO`: files of `torch.save`, written atomically and read without running code."""

from __future__ import annotations

import io
import itertools
import os
import pickle
import pickletools
import re
import sys
import zipfile
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, final

import torch
from torch.serialization import get_crc32_options, get_unsafe_globals_in_checkpoint

from rankwise.checkpoint.atomic_file import check_regular_file, link_file, replacing
from rankwise.checkpoint.base import CheckpointIO, as_checkpoint_error, reason_for
from rankwise.errors import CheckpointError
from rankwise.nested import walked
from rankwise.paths import expanded_path
from rankwise.processes.signals import reraise_from_handler

_MAX_NAMED = 5
_MAX_PLACES = 1 << 24  # beside the places of values that occur once
_MAX_REPEATED = 1 << 30  # bytes, as of a mask that is expanded over a batch
_SCALARS = {bool, int, float, complex, str, bytes, type(None)}
# Loaded in addition to what torch loads. They only hold values, and are among Lightning's hyperparameters.
_SAFE: list[Any] = [
    Namespace,
    (dict, "lightning.fabric.utilities.data.AttributeDict"),
    (dict, "lightning.pytorch.utilities.parsing.AttributeDict"),
    (dict, "lightning_fabric.utilities.data.AttributeDict"),
    (dict, "pytorch_lightning.utilities.parsing.AttributeDict"),
    *((Path, f"pathlib.{name}") for name in ("PosixPath", "WindowsPath")),
    *((Path, f"pathlib._local.{name}") for name in ("PosixPath", "WindowsPath")),
]
_INTACT_FILE = "pass the path of an intact file that Trainer.save_checkpoint or ModelCheckpoint wrote."


@final
class TorchCheckpointIO(CheckpointIO):
    """Stores checkpoints as files of `torch.save`, on a local or shared file system.

    Writing is atomic, so that a reader gets the previous file or the new one: the data is written to a
    temporary file in the same folder, flushed to the disk, and renamed to the target. Files are read with
    `weights_only=True`: tensors and plain types load, also namespaces and paths; objects that could run code
    raise an error.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> None:
        """Write `checkpoint` to `path`, creating its folder; raise too if it could not be loaded."""
        with as_checkpoint_error(path), replacing(path) as file:
            _write(checkpoint, file, path)

    def check_checkpoint(self, part: dict[str, Any], path: str | os.PathLike[str]) -> None:
        """Write `part` to memory, and check that it can be loaded."""
        super().check_checkpoint(part, path)
        with as_checkpoint_error(path):
            _write(part, io.BytesIO(), path)

    def load_checkpoint(self, path: str | os.PathLike[str], map_location: Any = "cpu") -> dict[str, Any]:
        """Return the checkpoint at `path`, its tensors on `map_location`."""
        handled, file = sys.exc_info()[1], expanded_path(path)
        try:
            _check_file(file)
            registered = torch.serialization.get_safe_globals()  # the context would remove these
            with torch.serialization.safe_globals([each for each in _SAFE if each not in registered]):
                checkpoint = torch.load(file, map_location=map_location, weights_only=True)
            _check_size(checkpoint, path, "holds")
        except CheckpointError:
            raise
        except pickle.UnpicklingError as error:
            reraise_from_handler(error, handled)
            found = re.search(r"(?:GLOBAL|global|class) ([\w.]+)", str(error))
            what = found[1] if found else "what torch does not name"
            problem = f"holds {what}, which weights_only=True does not load: it could run code"
            remedy = "keep plain types and tensors in a checkpoint; load untrusted files in no other way."
            if found:
                name = what.rpartition(".")[2]
                remedy += f" If you trust file and class: torch.serialization.add_safe_globals([{name}])."
            raise _error(path, problem, remedy) from error
        except Exception as error:
            reraise_from_handler(error, handled)
            raise _error(path, f"could not be read: {reason_for(error, handled)}") from error
        if not isinstance(checkpoint, dict):
            kind = type(checkpoint).__name__
            raise _error(path, f"holds a {kind}, but a checkpoint is a dictionary")
        return checkpoint

    def link_checkpoint(self, path: str | os.PathLike[str], link: str | os.PathLike[str]) -> None:
        """Make `link` a hard link to the file at `path`, or a copy if hard links are not supported."""
        with as_checkpoint_error(link):
            link_file(expanded_path(path), link)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove the file at `path`, if it exists."""
        expanded_path(path).unlink(missing_ok=True)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def _write(checkpoint: dict[str, Any], file: IO[bytes], path: str | os.PathLike[str]) -> None:
    """Write a checkpoint to a file; raise if it cannot be loaded with `weights_only=True`."""
    _check_size(checkpoint, path, "cannot be written, as it holds")
    torch.save(checkpoint, file)
    file.seek(0)
    refused = set(get_unsafe_globals_in_checkpoint(file))  # torch reads the names, not the data of tensors
    if not refused:
        return
    places = ", ".join(itertools.islice(_places(checkpoint, "checkpoint", refused, {}), _MAX_NAMED))
    names = ", ".join(sorted(refused)[:_MAX_NAMED])
    raise _error(
        path,
        f"cannot be written, as weights_only=True does not load {places or names}",
        "keep tensors, numbers, strings, lists and dictionaries of them, such as array.tolist(), "
        f"member.name, str(date) or vars(namespace); or, if you trust {names}: "
        "torch.serialization.add_safe_globals([...]), here and wherever it is loaded.",
    )


def _places(value: Any, path: str, refused: set[str], known: dict[int, Any]) -> Iterator[str]:
    """Yield the paths of `refused` classes in nested values, such as `checkpoint['epochs'][0] (range)`."""
    if id(value) in known:
        return
    if type(value) in (dict, OrderedDict, list, tuple):
        known[id(value)] = value
    if type(value) in (dict, OrderedDict):
        for key, item in value.items():
            yield from _places(key, f"the key {key!r} of {path}", refused, known)
            yield from _places(item, f"{path}[{key!r}]", refused, known)
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            yield from _places(item, f"{path}[{index}]", refused, known)
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


def _error(path: str | os.PathLike[str], problem: str, remedy: str = _INTACT_FILE) -> CheckpointError:
    return CheckpointError(path=os.fspath(path), problem=problem, remedy=remedy)


def _check_size(checkpoint: Any, path: str | os.PathLike[str], verb: str) -> None:
    """Raise if values or data of tensors repeat so often that to compare, print or copy them would hang."""
    places, repeated = _size(checkpoint, {})
    if places > _MAX_PLACES and places > _MAX_PLACES + sum(1 for _ in walked(checkpoint, _parts)):
        raise _error(path, f"{verb} values at {places} places, as containers occur in it repeatedly")
    if repeated > _MAX_REPEATED:
        raise _error(path, f"{verb} tensors that repeat their data to {repeated} bytes more than it has")


def _size(value: Any, known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Return at how many places there are values, and how many bytes of tensors repeat others."""
    if id(value) in known:
        return known[id(value)]
    parts = _parts(value)
    if parts is None:
        has_data = isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_meta
        return 1, max(0, value.nbytes - value.untyped_storage().nbytes()) if has_data else 0
    places, repeated = 1 + len(parts), 0
    for part in parts:
        if type(part) not in _SCALARS:
            of_part = _size(part, known)
            places += of_part[0] - 1
            repeated += of_part[1]
    known[id(value)] = places, repeated
    return places, repeated


def _parts(value: Any) -> list[Any] | None:
    """Return the items of a container that `weights_only=True` loads; None for other values."""
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    return list(vars(value).values()) if isinstance(value, Namespace) else None


def _check_file(path: Path) -> None:
    """Raise unless `path` is an intact archive; torch itself does not detect changed bytes in a tensor."""
    check_regular_file(path, _INTACT_FILE)
    if not path.exists():
        raise _error(path, "does not exist; a relative path starts at the working directory")
    with path.open("rb") as file:
        start = file.read(2)
    if start != b"PK":
        raise _error(path, "is not a file of torch.save" if start else "is empty")
    if not zipfile.is_zipfile(path):
        raise _error(path, "is cut off")
    try:
        with zipfile.ZipFile(path) as archive:
            # torch compresses nothing: a small file must not become large in memory.
            if sum(record.file_size for record in archive.infolist()) > path.stat().st_size:
                raise _error(path, "is damaged: its records are larger than the file")
            damaged = archive.testzip() if get_crc32_options() else None
    except zipfile.BadZipFile:
        damaged = "table of contents"
    if damaged:
        raise _error(path, f"is damaged: the checksum of its record {damaged!r} does not match")
