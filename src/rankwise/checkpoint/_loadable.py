"""Whether what was just written can be loaded: known when it is saved, not when it is needed."""

from __future__ import annotations

import io
import itertools
import pickle
import pickletools
from collections import OrderedDict
from collections.abc import Iterator
from typing import IO, Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint

from rankwise.errors import CheckpointError

__all__ = ["check_loadable"]

_SHOWN = 5


def check_loadable(checkpoint: dict[str, Any], file: IO[bytes], path: str) -> None:
    """Raise if `file`, to which `checkpoint` was written, holds what `weights_only=True` does not load.

    torch looks through the names in the pickle; the tensors' data is not read.

    Raises:
        CheckpointError: naming the places of such values in the checkpoint for `path`.
    """
    file.seek(0)
    refused = set(get_unsafe_globals_in_checkpoint(file))
    if not refused:
        return
    places = ", ".join(itertools.islice(_places(checkpoint, "checkpoint", refused), _SHOWN))
    names = ", ".join(sorted(refused)[:_SHOWN])
    raise CheckpointError(
        path=path,
        problem=f"cannot be written, as weights_only=True does not load {places or names}",
        remedy="keep tensors, numbers, strings, lists and dictionaries of them, such as array.tolist(), "
        f"member.name, str(date) or vars(namespace); or, if you trust {names}: "
        "torch.serialization.add_safe_globals([...]), here and wherever it is loaded.",
    )


def _places(value: Any, path: str, refused: set[str]) -> Iterator[str]:
    """Yield where in nested values something `refused` is: `checkpoint['epochs'][0] (range)`."""
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
    """Yield the classes and functions that a pickle of `value` refers to."""
    pickled = io.BytesIO()
    _WithoutData(pickled, protocol=2, fix_imports=False).dump(value)  # torch.save's; as they are called today
    for opcode, argument, _ in pickletools.genops(pickled.getvalue()):
        if opcode.name == "GLOBAL":
            yield str(argument).replace(" ", ".")


class _WithoutData(pickle.Pickler):
    """Leaves tensors' data out, as torch.save does."""

    def persistent_id(self, value: Any) -> str | None:
        return "" if torch.is_storage(value) else None
