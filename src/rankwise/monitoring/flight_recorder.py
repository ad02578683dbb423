"""Write torch's flight record, the latest collectives of this rank, where the user has turned it on."""

from __future__ import annotations

import os
from pathlib import Path

from torch._C import _distributed_c10d

_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")  # the second is the older name
_PREFIXES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


def write_flight_record(global_rank: int) -> str:
    """Write what torch has recorded to a file that `torchfrtrace` reads; return its path.

    With NCCL torch writes the same file itself.

    Returns:
        The path; empty where nothing is recorded, as by an older torch with gloo, or cannot be written.

    Mutates: the file `<prefix><global rank>`. Torch's own variables name the prefix. The default is in
    torch's folder in the user's cache, where no other user can have put a link in its place.
    """
    is_on = any(os.environ.get(name, "0").strip() not in ("", "0") for name in _SIZES)
    dump = getattr(_distributed_c10d, "_dump_fr_trace", None)
    if not is_on or dump is None:
        return ""
    try:
        path = _prefix() + str(global_rank)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(dump())
    except (OSError, RuntimeError):  # no permission; no home directory
        return ""
    return path


def _prefix() -> str:
    for name in _PREFIXES:
        if named := os.environ.get(name):
            return named
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "torch"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return str(folder / "rankwise_flight_record_")
