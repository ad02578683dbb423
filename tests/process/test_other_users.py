"""Another user of the machine cannot access a job: no listener, file, descriptor or memory."""

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from rankwise.strategies import Strategy
from tests.process.helpers import ddp

NOBODY = 65534

# Prints each path that it could open.
TRY_TO_OPEN = """
    for path in "$@"; do
        if (exec 3<"$path") 2>/dev/null || (exec 3>>"$path") 2>/dev/null; then echo "$path"; fi
    done
"""


def opened(paths: list[str], user: int) -> list[str]:
    """Try to open files as a user; return those that could be."""
    command = ["sh", "-c", TRY_TO_OPEN, "sh", *paths]
    done = subprocess.run(command, user=user, group=user, extra_groups=[], capture_output=True, text=True)
    return done.stdout.split()


def descriptors_of(pid: int) -> dict[str, str]:
    """Return a process's descriptors, as paths, and what each is."""
    found = {}
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one through which this is read is gone by now
            found[str(path)] = os.readlink(path)  # noqa: PTH115  "socket:[1]" is no path
    return found


def look_around(strategy: Strategy) -> dict[str, list[str]]:
    """Try, as another user, to access the store's table or a rank's data."""
    strategy.all_reduce(torch.ones(1))
    if strategy.global_rank:
        strategy.barrier()
        return {}
    pids = [os.getppid(), os.getpid()]
    descriptors = {path: target for pid in pids for path, target in descriptors_of(pid).items()}
    memory_files = [path for path, target in descriptors.items() if "memfd:rankwise" in target]
    private = [f"/proc/{pid}/{name}" for pid in pids for name in ("mem", "environ", "maps")]
    listening = subprocess.run(["ss", "-H", "-l", "-x", "-t", "-p"], capture_output=True, text=True).stdout
    found = {
        "sockets": [path for path, target in descriptors.items() if target.startswith("socket:")],
        "by root": opened(memory_files, 0),
        "by nobody": opened([*descriptors, *private], NOBODY),
        "listening": [line for line in listening.splitlines() if any(f"pid={pid}," in line for pid in pids)],
    }
    strategy.barrier()
    return found


def test_another_user_is_shut_out_of_a_private_rendezvous() -> None:
    """No key can be read or set: only gloo listens, on loopback, and channel and memory cannot be opened."""
    if os.getuid() != 0 or shutil.which("ss") is None:
        pytest.skip("needs root, to become another user, and the command ss (iproute2)")
    found = ddp("fork", "private").launch(look_around)
    assert found["sockets"], "the channel is a socket pair"
    assert found["by root"], "who may, can open the memory files: the attempt is a real one"
    assert found["by nobody"] == []
    assert all("127.0.0.1:" in line for line in found["listening"])
    of_gloo = 1  # this rank's; the launching process, which has the store, listens nowhere
    assert len(found["listening"]) == of_gloo
