"""Makes this process cheap to fork: in huge pages, its memory has less to copy at each fork."""

import ctypes
import re
from pathlib import Path

_COLLAPSE = 25  # MADV_COLLAPSE of madvise(2), since Linux 6.1; an older kernel refuses it, without harm
_ANONYMOUS = re.compile(r"^(\w+)-(\w+) rw-p 0+ 00:00 0\s*(?:\[heap\])?$", re.MULTILINE)


def use() -> None:
    """Move the memory that this process has allocated into huge pages."""
    madvise = ctypes.CDLL(None).madvise
    for start, end in _ANONYMOUS.findall(Path("/proc/self/maps").read_text()):
        address = int(start, 16)
        madvise(ctypes.c_void_p(address), ctypes.c_size_t(int(end, 16) - address), _COLLAPSE)
