"""`RankInfo`: the ranks of this process. Also the rank of `rank_zero_only`, and warnings."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, ParamSpec, TypeVar

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn

from rankwise.checks import check_value

__all__ = ["RankInfo", "rank_zero_info", "rank_zero_only", "rank_zero_warn", "warn"]

_RANK_ZERO = rank_zero_only.__module__
# Packages whose lines a user does not change, so that no warning names them.
_LIBRARIES = frozenset(
    ("rankwise", "lightning_utilities", "lightning", "pytorch_lightning", "torch", *sys.stdlib_module_names)
)
# The code of functions that run a rank. Frames further out, as those around a fork, are not the rank's own.
# By identity, as Python 3.12 hashes all instructions of a code object.
_entries: dict[int, CodeType] = {}
P = ParamSpec("P")
T = TypeVar("T")

# Used until a strategy is bound. mpirun's variables take precedence over the batch job's around it.
_RANK_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "JSM_NAMESPACE_RANK",
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "PALS_RANKID",
    "SLURM_PROCID",
)


@dataclass(frozen=True)
class RankInfo:
    """The ranks of one process in a job.

    Attributes:
        global_rank: number of the process in the job, `0 <= global_rank < world_size`.
        local_rank: number of the process on its node, `0 <= local_rank < local_world_size`.
        node_rank: number of the node, `0 <= node_rank < num_nodes`.
        world_size: number of processes in the job.
        local_world_size: number of processes on this node.
        num_nodes: number of nodes in the job.

    Raises:
        InvalidArgumentError: if the numbers contradict each other.
    """

    global_rank: int = 0
    local_rank: int = 0
    node_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    num_nodes: int = 1

    def __post_init__(self) -> None:
        for name, count in (
            ("global_rank", self.world_size),
            ("local_rank", self.local_world_size),
            ("node_rank", self.num_nodes),
        ):
            value = getattr(self, name)
            check_value(name, value, 0 <= value < count, f"a number from 0 to {count - 1}, in {self!r}")
        expected = f"at least local_world_size and num_nodes, in {self!r}"
        least = max(self.local_world_size, self.num_nodes)
        check_value("world_size", self.world_size, self.world_size >= least, expected)

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the first process of the job."""
        return self.global_rank == 0

    @property
    def is_one_node(self) -> bool:
        """Whether all processes of the job are on this node."""
        return self.num_nodes == 1

    def __repr__(self) -> str:
        return (
            f"RankInfo(global_rank {self.global_rank} of {self.world_size}, local_rank {self.local_rank} "
            f"of {self.local_world_size}, node {self.node_rank} of {self.num_nodes})"
        )


def _rank_from(environ: Mapping[str, str]) -> int:
    for name in _RANK_VARIABLES:
        if re.fullmatch("[0-9]{1,9}", environ.get(name, "")):
            return int(environ[name])
    return 0


if getattr(rank_zero_only, "rank", None) is None:  # the program may call it before there is a job
    rank_zero_only.rank = _rank_from(os.environ)  # type: ignore[attr-defined]  # its documented place


def set_rank_zero_only(global_rank: int | None) -> int:
    """Set the rank of `rank_zero_only`, for None the one in the environment; return the previous one."""
    function: Any = rank_zero_only
    before: int = function.rank
    function.rank = _rank_from(os.environ) if global_rank is None else global_rank
    return before


def job_entry(function: Callable[P, T]) -> Callable[P, T]:
    """Mark a function that runs a rank: `is_in_rank_zero_section` looks no further out."""
    _entries[id(function.__code__)] = function.__code__
    return function


def is_in_rank_zero_section() -> bool:
    """Return whether the caller is inside a `rank_zero_only` function of the same job."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and id(frame.f_code) not in _entries:
        if frame.f_code.co_name == "wrapped_fn" and frame.f_globals.get("__name__") == _RANK_ZERO:
            return True
        frame = frame.f_back
    return False


def warn(text: str) -> None:
    """Emit a `UserWarning` at the innermost line outside of libraries: the one that its reader can change."""
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES and frame.f_back is not None:
        frame = frame.f_back
    place = frame.f_globals
    registry = place.setdefault("__warningregistry__", {})
    warnings.warn_explicit(
        text, UserWarning, frame.f_code.co_filename, frame.f_lineno, place.get("__name__"), registry
    )
