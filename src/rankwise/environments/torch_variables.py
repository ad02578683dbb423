"""Environments of torch's own variables, torchrun's or set by hand for each rank; or of none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, final

from rankwise.environments.base import ClusterEnvironment, is_set
from rankwise.environments.network import LOOPBACK, is_loopback
from rankwise.errors import ConfigurationError


@final
class TorchElasticEnvironment(ClusterEnvironment):
    """A worker of torchrun.

    Source: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
    """

    name = "torchelastic"
    markers = ("TORCHELASTIC_RUN_ID",)
    variables: ClassVar[Mapping[str, str]] = {
        "global_rank": "RANK",
        "world_size": "WORLD_SIZE",
        "local_rank": "LOCAL_RANK",
        "local_world_size": "LOCAL_WORLD_SIZE",
        "node_rank": "GROUP_RANK",
        "num_nodes": "GROUP_WORLD_SIZE",
        "main_address": "MASTER_ADDR",
        "main_port": "MASTER_PORT",
    }

    @property
    def restart_count(self) -> int:
        """How often this node's agent has started its workers again."""
        name = "TORCHELASTIC_RESTART_COUNT"
        return self._number(name) if self._has(name) else 0


@final
class PlainEnvironment(ClusterEnvironment):
    """One process for each rank, with `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR` and `MASTER_PORT`.

    `LOCAL_WORLD_SIZE` and `NODE_RANK` (or `GROUP_RANK`) are optional. Without `LOCAL_WORLD_SIZE`,
    `LOCAL_RANK` must equal `RANK`, which means one node. `LOCAL_RANK` is optional if the job is on one node:
    `MASTER_ADDR` is a loopback address, or `LOCAL_WORLD_SIZE` is the world size.

    Several processes without one of the two ranks are an error; a set of one process is ignored. So is
    `LOCAL_RANK=0` alone, which images preset; a higher rank alone, and `LOCAL_RANK` with `MASTER_ADDR`, are
    an error, because each process would start a whole job.
    """

    name = "plain"
    variables: ClassVar[Mapping[str, str]] = {
        "global_rank": "RANK",
        "world_size": "WORLD_SIZE",
        "local_rank": "LOCAL_RANK",
        "main_address": "MASTER_ADDR",
        "main_port": "MASTER_PORT",
    }
    optional = ("LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK")
    remedy = (
        "set RANK, WORLD_SIZE, LOCAL_RANK (LOCAL_WORLD_SIZE too on several nodes), MASTER_ADDR and "
        "MASTER_PORT for each process, as torchrun does; or NODE_RANK and no RANK or LOCAL_RANK for one "
        "process on each node, which starts the others; or RANKWISE_ENVIRONMENT=local to ignore them."
    )

    @classmethod
    def table(cls, environ: Mapping[str, str]) -> Mapping[str, str]:
        """Return the names; without `LOCAL_RANK` if it is not set and the job is on one node."""
        if is_set("LOCAL_RANK", environ) or not _is_on_one_node(environ):
            return cls.variables
        return {fact: name for fact, name in cls.variables.items() if fact != "local_rank"}

    @classmethod
    def detected_markers(cls, environ: Mapping[str, str]) -> tuple[str, ...]:
        """Return the rank that is set, if this is one of several processes."""
        has_address = is_set("MASTER_ADDR", environ)
        is_one_of_several = is_set("RANK", environ) and _world_size(environ) not in ("", "1")
        marks = {
            "RANK": is_one_of_several
            and ((has_address and is_set("MASTER_PORT", environ)) or _is_later("RANK", environ)),
            "LOCAL_RANK": is_set("LOCAL_RANK", environ) and (has_address or _is_later("LOCAL_RANK", environ)),
        }
        return tuple(name for name, is_marker in marks.items() if is_marker)

    @property
    def local_rank(self) -> int:
        """`LOCAL_RANK`; without it the global rank, as the job is on one node."""
        return super().local_rank if "local_rank" in self._table else self.global_rank

    @property
    def local_world_size(self) -> int:
        """`LOCAL_WORLD_SIZE`, or the world size if rank and local rank are equal."""
        if self._has("LOCAL_WORLD_SIZE"):
            return self._number("LOCAL_WORLD_SIZE")
        if self.local_rank != self.global_rank:
            raise self._error(
                "LOCAL_RANK differs from RANK, so there are several nodes, but LOCAL_WORLD_SIZE is not set"
            )
        return self.world_size

    @property
    def node_rank(self) -> int:
        """`NODE_RANK` or `GROUP_RANK`, or derived from nodes of equal size."""
        for variable in ("NODE_RANK", "GROUP_RANK"):
            if self._has(variable):
                return self._number(variable)
        return super().node_rank


def _is_later(name: str, environ: Mapping[str, str]) -> bool:
    """Return whether a rank is not the first one."""
    text = environ.get(name, "").strip()
    return text.isdecimal() and bool(text.strip("0"))


def _world_size(environ: Mapping[str, str]) -> str:
    return environ.get("WORLD_SIZE", "").strip()


def _is_on_one_node(environ: Mapping[str, str]) -> bool:
    """Return whether these variables say that several processes are all on one node."""
    world_size, here = _world_size(environ), environ.get("LOCAL_WORLD_SIZE", "").strip()
    is_one_host = here == world_size if here else is_loopback(environ.get("MASTER_ADDR", "").strip())
    return is_one_host and world_size not in ("", "1")


@final
class LocalEnvironment(ClusterEnvironment):
    """A terminal, a notebook or a test: one process, from which the strategy starts the others."""

    name = "local"
    constants: ClassVar[Mapping[str, int]] = {
        "global_rank": 0,
        "world_size": 1,
        "local_rank": 0,
        "local_world_size": 1,
    }
    optional_variables: ClassVar[Mapping[str, str]] = {"main_port": "MASTER_PORT"}
    creates_processes_externally = False
    main_address = LOOPBACK

    @property
    def main_port(self) -> int:
        """`MASTER_PORT`, if it is set: otherwise the strategy takes a free port when it starts the ranks.

        Raises:
            ConfigurationError: when it is not set.
        """
        if self._knows("main_port"):
            return super().main_port
        raise ConfigurationError(
            message="A local job has no main_port that could be known beforehand.",
            facts="no launcher has started this process. The strategy takes a free port when it starts the "
            'ranks; and none with rendezvous="private", which "auto" is on gloo.',
            remedy='read os.environ["MASTER_PORT"] within a rank, of a strategy with rendezvous="tcp".',
        )
