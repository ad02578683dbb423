"""Variables of several processes or nodes that belong to no complete set: an error, or a warning."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from rankwise.environments.base import ClusterEnvironment, is_set, whole_number
from rankwise.errors import EnvironmentVariableError
from rankwise.ranks import warn

_SIZES, _RANKS = ("world_size", "num_nodes"), ("global_rank", "node_rank")

# Variables of launchers that have no environment here: how many processes, or which hosts, a job has.
_OTHER_LAUNCHERS = {"SM_HOSTS": "SageMaker", "SUBMITIT_LOCAL_NTASKS": "submitit's local executor"}
_REMEDY = (
    "start the script with torchrun; or set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and "
    "MASTER_PORT for each process, or NODE_RANK, NNODES, MASTER_ADDR and MASTER_PORT for one process on each "
    "node; or RANKWISE_ENVIRONMENT=local if each process shall train alone."
)


def check_is_alone(candidates: Sequence[type[ClusterEnvironment]], environ: Mapping[str, str]) -> None:
    """Check that this process may train alone, for which no environment of `candidates` was found.

    A variable for the number of processes or nodes may be preset: it is a warning. With a rank it means that
    a launcher has started several processes, each of which would train alone.

    Raises:
        EnvironmentVariableError: for such a rank; it names what the most complete set lacks.
    """
    for variable, launcher in _OTHER_LAUNCHERS.items():
        if _count(variable, environ) > 1:
            raise EnvironmentVariableError(
                environment=launcher,
                problem=f"{variable} means several processes, but rankwise has no environment for {launcher}",
                variables={variable: environ[variable]},
                remedy=_REMEDY,
            )
    incomplete = [cls for cls in candidates if cls.missing(environ)]
    sizes = {cls: _above(1, cls, _SIZES, environ) for cls in incomplete}
    of_several = [cls for cls in incomplete if _has_rank_of_several(cls, sizes[cls], environ)]
    if of_several:  # of equally complete sets the later is the more general one
        nearest = min(reversed(of_several), key=lambda cls: len(cls.missing(environ)))
        raise nearest(environ).error_of_missing()
    if names := dict.fromkeys(name for found in sizes.values() for name in found):
        warn(
            f"{', '.join(f'{name}={environ[name]}' for name in names)} is set, which means several processes "
            "or nodes, but no launcher's variables are complete: this process trains alone. If this is "
            "intended, set RANKWISE_ENVIRONMENT=local.",
        )


def _has_rank_of_several(
    cls: type[ClusterEnvironment], sizes: Iterable[str], environ: Mapping[str, str]
) -> bool:
    ranks = _above(-1, cls, _RANKS, environ)
    return bool((ranks and sizes) or _above(0, cls, _RANKS, environ))


def _above(
    lowest: int, cls: type[ClusterEnvironment], facts: Sequence[str], environ: Mapping[str, str]
) -> list[str]:
    """Return the variables of these facts that are set to a greater number."""
    table = cls.full_table(environ)
    names = (table[fact] for fact in facts if fact in table)
    return [name for name in names if is_set(name, environ) and _count(name, environ) > lowest]


def _count(name: str, environ: Mapping[str, str]) -> int:
    """Return a variable's number, or the number of items of a list or a range; 0 without a variable."""
    text = environ.get(name, "").strip()
    number = whole_number(text)
    return len(re.findall(r"[^\s,:]+", text)) if number is None else number
