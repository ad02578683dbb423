"""`ClusterEnvironment`: who started this process, and its place in the job; typed access to variables."""

from __future__ import annotations

import os
import signal
from abc import ABC
from collections.abc import Mapping
from typing import ClassVar, final

from rankwise.environments.network import port_of_job
from rankwise.errors import EnvironmentVariableError, InvalidArgumentError
from rankwise.ranks import RankInfo

__all__ = ["ClusterEnvironment"]

_HIGHEST_COUNT = 10_000_000


@final
class Variables:
    """The variables that one environment reads."""

    def __init__(self, environment: str, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self._environment = environment

    def has(self, name: str) -> bool:
        """Return whether a variable is set to more than blanks."""
        return bool(self.environ.get(name, "").strip())

    def text(self, name: str) -> str:
        """Return a variable that must be set and not empty."""
        value = self.environ.get(name, "").strip()
        if not value:
            raise self.error(f"{name} is not set", {})
        return value

    def number(self, name: str, highest: int = _HIGHEST_COUNT, lowest: int = 0) -> int:
        """Return a variable that must hold a whole number from `lowest` to `highest`."""
        text = self.text(name)
        # str.isdecimal keeps signs, spaces, underscores and fractions out; isascii other digits
        if not (text.isascii() and text.isdecimal() and len(text) <= len(str(highest))):
            raise self.error(f"{name} is not a number from {lowest} to {highest}", {name: text})
        if not lowest <= int(text) <= highest:
            raise self.error(f"{name} is not within {lowest} to {highest}", {name: text})
        return int(text)

    def first_set(self, *names: str) -> str | None:
        """Return the first of these variables that is set, None where none is."""
        return next((name for name in names if self.has(name)), None)

    def error(self, problem: str, shown: Mapping[str, str]) -> EnvironmentVariableError:
        """Build the error that names this environment."""
        return EnvironmentVariableError(
            environment=self._environment, problem=problem.rstrip("."), variables=dict(shown)
        )


class ClusterEnvironment(ABC):  # noqa: B024  a table of names may be all that a subclass adds
    """Read a launcher's variables; write nothing, decide nothing.

    A subclass is a table of variable names. It fills in the class attributes below; where a fact is not
    simply a number in a variable, it overrides the property instead.

    Example:
        >>> class MyCluster(ClusterEnvironment):
        ...     name = "mycluster"
        ...     variables = {
        ...         "global_rank": "MY_RANK",
        ...         "world_size": "MY_SIZE",
        ...         "local_rank": "MY_LOCAL_RANK",
        ...         "local_world_size": "MY_LOCAL_SIZE",
        ...         "main_address": "MY_HEAD",
        ...         "main_port": "MY_PORT",
        ...     }
        >>> MyCluster({"MY_RANK": "1", "MY_SIZE": "2", "MY_LOCAL_RANK": "1", "MY_LOCAL_SIZE": "2"}).ranks
        RankInfo(global_rank 1 of 2, local_rank 1 of 2, node 0 of 1)

    Attributes:
        name: what the environment is called, in `Trainer(plugins=["name"])` and in messages.
        variables: fact to variable name. The facts are `global_rank`, `world_size`, `local_rank`,
            `local_world_size`, `node_rank`, `num_nodes`, `main_address` and `main_port`.
        required: further variables that must be set, though others may set them too.
        optional: variables that are read where they are set, for messages.
        markers: variables that only this launcher sets. With one of them present an incomplete or
            contradictory set is an error; without, an incomplete set means "not this environment".
        requeue_signal: a signal that announces the end of the job's time: training stops on all ranks after
            the same step, saves, and `requeue` is called; None where the scheduler has none.
        job_variables: what tells this job from another on the same node; where no variable says the main
            port, it is worked out from the ones that are set.
    """

    name: ClassVar[str] = ""
    variables: ClassVar[Mapping[str, str]] = {}
    required: ClassVar[tuple[str, ...]] = ()
    optional: ClassVar[tuple[str, ...]] = ()
    markers: ClassVar[tuple[str, ...]] = ()
    job_variables: ClassVar[tuple[str, ...]] = ()
    requeue_signal: signal.Signals | None = None

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        """Read from `environ` (default: a copy of `os.environ` as it is now)."""
        self._values = Variables(self.name, dict(os.environ if environ is None else environ))
        self._table = self.table(self._values.environ)

    # ------------------------------------------------------------------ is it this one?

    @classmethod
    def table(cls, environ: Mapping[str, str]) -> Mapping[str, str]:
        """Return fact to variable name; for a launcher that has several dialects, the one spoken here."""
        return cls.variables

    @classmethod
    def missing(cls, environ: Mapping[str, str]) -> tuple[str, ...]:
        """Return the variables that would have to be set for this environment, and are not."""
        return tuple(name for name in cls._needed(environ) if not environ.get(name, "").strip())

    @classmethod
    def detected_markers(cls, environ: Mapping[str, str]) -> tuple[str, ...]:
        """Return the variables that prove this launcher to have been at work."""
        return tuple(name for name in cls.markers if environ.get(name, "").strip())

    @classmethod
    def rejection(cls, environ: Mapping[str, str]) -> str | None:
        """Return why this environment is not the one, None where it is.

        Raises:
            EnvironmentVariableError: where the launcher has surely been at work (a marker is set, or every
                variable is) but the set is incomplete or contradicts itself: training on as a job of one
                would be a silent mistake.
        """
        missing = cls.missing(environ)
        if missing and not cls.detected_markers(environ):
            is_nothing_there = len(missing) == len(cls._needed(environ))
            return "none of its variables is set" if is_nothing_there else f"{', '.join(missing)} not set"
        environment = cls(environ)
        if missing:
            raise environment._values.error(f"{', '.join(missing)} is not set", environment.seen())
        environment.ranks  # noqa: B018  reading the ranks validates them
        return None

    @classmethod
    def detect(cls, environ: Mapping[str, str] | None = None) -> bool:
        """Return whether this environment's whole variable set is there and agrees with itself.

        Raises:
            EnvironmentVariableError: as `rejection`.
        """
        return cls.rejection(os.environ if environ is None else environ) is None

    # ------------------------------------------------------------------ facts

    @property
    def creates_processes_externally(self) -> bool:
        """Whether the job's processes exist already, or else the strategy starts those of this node."""
        return True

    @property
    def processes_per_node(self) -> int | None:
        """How many processes there are, or are wanted, on this node; None where that is open."""
        return self.local_world_size if self.creates_processes_externally else None

    @property
    def other_node(self) -> str | None:
        """The name of a node other than rank 0's, where that is known: which way the others lie."""
        return None

    @property
    def global_rank(self) -> int:
        """This process's id in the whole job."""
        return self._number("global_rank")

    @property
    def world_size(self) -> int:
        """The number of processes in the job."""
        return self._number("world_size")

    @property
    def local_rank(self) -> int:
        """This process's id on its node."""
        return self._number("local_rank")

    @property
    def local_world_size(self) -> int:
        """The number of processes on this node."""
        return self._number("local_world_size")

    @property
    def node_rank(self) -> int:
        """The id of this node; derived from equal nodes where no variable says it."""
        if "node_rank" in self._table:
            return self._number("node_rank")
        return self.global_rank // max(1, self.local_world_size)

    @property
    def num_nodes(self) -> int:
        """The number of nodes; derived from equal nodes where no variable says it."""
        if "num_nodes" in self._table:
            return self._number("num_nodes")
        return max(1, -(-self.world_size // max(1, self.local_world_size)))

    @property
    def main_address(self) -> str:
        """The address at which rank 0's node listens."""
        return self._values.text(self._table.get("main_address", "MASTER_ADDR"))

    @property
    def main_port(self) -> int:
        """The port at which rank 0's node listens; worked out from the job's ids where none is set.

        Raises:
            EnvironmentVariableError: when it is no port, or there is nothing to work it out from.
        """
        variable = self._table.get("main_port", "MASTER_PORT")
        ids = [self._values.text(name) for name in self.job_variables if self._values.has(name)]
        if ids and not self._values.has(variable):
            return port_of_job(ids)
        return self._values.number(variable, highest=65535, lowest=1)

    @property
    def ranks(self) -> RankInfo:
        """All ranks at once, validated against each other.

        Raises:
            EnvironmentVariableError: when a variable is missing, is no number, or contradicts another.
        """
        try:
            return RankInfo(
                global_rank=self.global_rank,
                local_rank=self.local_rank,
                node_rank=self.node_rank,
                world_size=self.world_size,
                local_world_size=self.local_world_size,
                num_nodes=self.num_nodes,
            )
        except InvalidArgumentError as error:
            raise self._values.error(error.summary(), self.seen()) from None

    def seen(self) -> dict[str, str]:
        """Return the variables of this environment that are set, for messages."""
        environ = self._values.environ
        names = dict.fromkeys(
            [*self.markers, *self.required, *self._table.values(), *self.job_variables, *self.optional]
        )
        return {name: environ[name] for name in names if name in environ}

    def requeue(self) -> None:
        """Put the job back into the scheduler's queue, if that was asked for. Runs on: global rank 0."""

    def validate_settings(self, devices: int, num_nodes: int) -> None:
        """Check what the user asked for against this environment; override to refuse more."""

    def teardown(self) -> None:
        """Release what the environment holds; most hold nothing."""

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value}" for name, value in self.seen().items())
        return f"{type(self).__name__}({shown})"

    @classmethod
    def _needed(cls, environ: Mapping[str, str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*cls.markers, *cls.required, *cls.table(environ).values()]))

    def _number(self, fact: str) -> int:
        variable = self._table.get(fact)
        if variable is None:
            raise EnvironmentVariableError(environment=self.name, problem=f"no variable is known for {fact}")
        return self._values.number(variable)
