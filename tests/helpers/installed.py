"""A tiny package with entry points, in a folder as pip installs it."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rankwise import StrategyRegistry
from rankwise.environments import detect
from rankwise.gradient_sync import CommHookRegistry
from rankwise.loggers import LoggerRegistry
from rankwise.named_options import NameTable

TABLES: dict[str, NameTable[Any]] = {
    "strategies": StrategyRegistry,
    "environments": detect._ENVIRONMENTS,
    "comm_hooks": CommHookRegistry,
    "loggers": LoggerRegistry,
}

MODULE = """
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from rankwise import ClusterEnvironment, DDPStrategy
from rankwise.gradient_sync import NamedHook
from rankwise.loggers import Logger
from rankwise.registry import RegisteredStrategy


class Plug(DDPStrategy):
    registered_names = {"ddp_plug_small": ("small buckets", {"bucket_cap_mb": 1})}


def aliases():
    return {"ddp_brief": RegisteredStrategy(Plug, "a short timeout", {"timeout": 40})}


def no_aliases(**arguments):
    return Plug(**arguments)


class PlugEnvironment(ClusterEnvironment):
    name = "plugenv"
    markers = ("PLUG_RANK",)
    variables = {
        "global_rank": "PLUG_RANK", "world_size": "PLUG_SIZE", "local_rank": "PLUG_RANK",
        "local_world_size": "PLUG_SIZE", "main_address": "PLUG_HEAD", "main_port": "PLUG_PORT",
    }


def halve(state, bucket):
    return allreduce_hook(state, bucket).then(lambda done: done.value() / 2)


halve_named = NamedHook(halve, description="half of the average")


class PlugLogger(Logger):
    def __init__(self, suffix=""):
        self.suffix = suffix

    def log_metrics(self, metrics, step=None):
        print(f"plug{self.suffix}", *metrics, flush=True)

    def log_hyperparams(self, params, metrics=None):
        pass
"""


def entry_points(**groups: str) -> str:
    """Return the text of a file of entry points, which are `name=target` with spaces between them."""
    lines = [f"[rankwise.{group}]\n{entries}\n" for group, entries in groups.items()]
    return "".join(lines).replace(" ", "\n").replace("=", " = ")


WORKING = entry_points(
    strategies="DDP_Plug=plug:Plug more=plug:aliases",
    environments="plugenv=plug:PlugEnvironment",
    comm_hooks="Halve=plug:halve halve_named=plug:halve_named",
    loggers="plug_log=plug:PlugLogger",
)
BROKEN = entry_points(
    strategies="ddp_gone=plug:Gone ddp_licence=plug_licence:Plug ddp_factory=plug:no_aliases",
    environments="gone=plug:Gone other_name=plug:PlugEnvironment number=plug:__name__",
    comm_hooks="gone=plug:Gone no_hook=plug:aliases",
    loggers="gone=plug:Gone no_logger=plug:__name__",
)
SHADOWED = entry_points(
    strategies="DDP_Spawn=plug:Plug",
    environments="slurm=plug:PlugEnvironment",
    comm_hooks="noop=plug:halve",
    loggers="csv=plug:PlugLogger",
)


def install(folder: Path, entry_points: str) -> None:
    """Write package plug 1.2 with these entry points into a folder that is, or will be, on `sys.path`."""
    metadata = folder / "plug-1.2.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: plug\nVersion: 1.2\n")
    (metadata / "entry_points.txt").write_text(entry_points)
    (folder / "plug.py").write_text(MODULE)
    (folder / "plug_licence.py").write_text("raise SystemExit('the licence has expired')\n")


@contextmanager
def installed_here(folder: Path, entry_points: str) -> Iterator[None]:
    """Install package plug for this process, for the time of the block; the tables are then as before."""
    install(folder, entry_points)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        for table in TABLES.values():
            patch.setattr(table, "_entries", dict(table._entries))
            patch.setattr(table, "_tried", set())
            patch.setattr(table, "_broken", {})
        yield
    for name in ("plug", "plug_licence"):
        sys.modules.pop(name, None)
