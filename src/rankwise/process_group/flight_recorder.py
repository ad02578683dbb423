"""torch's flight recorder, where the user has turned it on: what collectives this rank has run of late."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from torch._C import _distributed_c10d

__all__ = ["write_flight_record"]

_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")  # the second is the older name
_PREFIXES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


def write_flight_record(global_rank: int) -> str:
    """Write what torch has recorded to a file as `torchfrtrace` reads it; return its path.

    With NCCL torch writes the same by itself. An empty text: nothing is recorded, or this torch cannot say
    it (older ones do not record gloo's collectives).

    Mutates: the file `<prefix><global rank>`, with the prefix that torch's own variables name.
    """
    is_on = any(os.environ.get(name, "0").strip() not in ("", "0") for name in _SIZES)
    dump = getattr(_distributed_c10d, "_dump_fr_trace", None)
    if not is_on or dump is None:
        return ""
    default = str(Path(tempfile.gettempdir(), "rankwise_flight_record_"))
    path = next((os.environ[name] for name in _PREFIXES if os.environ.get(name)), default) + str(global_rank)
    try:
        Path(path).write_bytes(dump())
    except OSError:
        return ""
    return path
