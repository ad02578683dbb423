"""`ClusterEnvironment`: reads the variables of a launcher that started this process."""

from __future__ import annotations

import os
import signal
from abc import ABC
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from rankwise.environments.network import port_of_job
from rankwise.errors import EnvironmentVariableError, InvalidArgumentError
from rankwise.ranks import RankInfo

_MAX_COUNT = 10_000_000
_MAX_FILE_BYTES = 16_000_000


def whole_number(text: str, lowest: int = 0, highest: int = _MAX_COUNT) -> int | None:
    """Return the number in a variable's text; None unless it is a whole number from `lowest` to `highest`."""
    # isdecimal excludes signs, spaces, underscores and fractions; isascii excludes other scripts' digits
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(highest))
    return int(text) if is_number and lowest <= int(text) <= highest else None


def is_set(name: str, environ: Mapping[str, str]) -> bool:
    """Return whether a variable is set to more than blanks."""
    return bool(environ.get(name, "").strip())


class ClusterEnvironment(ABC):  # noqa: B024  a table of names may be all that a subclass adds
    """Reads a launcher's variables.

    A subclass is a table of variable names. It sets the class attributes below, and overrides the property
    of a fact that is not simply a number in a variable.

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
        name: the environment's name, for `Trainer(plugins=["name"])` and messages.
        variables: fact to variable name. The facts are `global_rank`, `world_size`, `local_rank`,
            `local_world_size`, `node_rank`, `num_nodes`, `main_address` and `main_port`. All must be set.
        optional_variables: fact to variable name, for variables that need not be set.
        constants: fact to number, for facts that are the same in every process.
        required: further variables that must be set, which other launchers may set too.
        optional: further variables to show in messages.
        markers: variables that only this launcher sets. If one of them is set, an incomplete or contradictory
            set is an error; otherwise an incomplete set means that it is another environment.
        requeue_signal: a signal that announces the job's time limit: training stops on all ranks after the
            same step, saves, and calls `requeue`; None if the scheduler sends none.
        job_variables: variables whose values differ between jobs on one node; if no variable contains the
            main port, it is computed from the ones that are set.
        node_file: the variable with the path of a file that names the job's nodes, rank 0's first.
        remedy: what an error about the variables advises, if that is not to start the job with the launcher.
    """

    name: ClassVar[str] = ""
    variables: ClassVar[Mapping[str, str]] = {}
    optional_variables: ClassVar[Mapping[str, str]] = {
        "main_address": "MASTER_ADDR",
        "main_port": "MASTER_PORT",
    }
    constants: ClassVar[Mapping[str, int]] = {}
    required: ClassVar[tuple[str, ...]] = ()
    optional: ClassVar[tuple[str, ...]] = ()
    markers: ClassVar[tuple[str, ...]] = ()
    job_variables: ClassVar[tuple[str, ...]] = ()
    node_file: ClassVar[str] = ""
    remedy: ClassVar[str] = ""
    requeue_signal: signal.Signals | None = None

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        """Read `environ`, by default a copy of `os.environ`."""
        self._environ = dict(os.environ if environ is None else environ)
        self._table = self.full_table(self._environ)

    @classmethod
    def table(cls, environ: Mapping[str, str]) -> Mapping[str, str]:
        """Return fact to variable name; override it for a launcher with several sets of names."""
        return cls.variables

    @classmethod
    def full_table(cls, environ: Mapping[str, str]) -> Mapping[str, str]:
        """Return fact to variable name, of required and optional variables."""
        return {**cls.optional_variables, **cls.table(environ)}

    @classmethod
    def missing(cls, environ: Mapping[str, str]) -> tuple[str, ...]:
        """Return the required variables that are not set."""
        return tuple(name for name in cls._needed(environ) if not is_set(name, environ))

    @classmethod
    def detected_markers(cls, environ: Mapping[str, str]) -> tuple[str, ...]:
        """Return the variables that are set and that only this launcher sets."""
        return tuple(name for name in cls.markers if is_set(name, environ))

    @classmethod
    def rejection(cls, environ: Mapping[str, str]) -> str | None:
        """Return why this environment has not started the process; None if it has.

        Raises:
            EnvironmentVariableError: when the launcher has started it (a marker or every variable is set),
                but the variables are incomplete or contradict each other. Training as a job of one process
                would be a silent mistake.
        """
        missing = cls.missing(environ)
        if missing and not cls.detected_markers(environ):
            is_none_set = len(missing) == len(cls._needed(environ))
            return "none of its variables is set" if is_none_set else f"{', '.join(missing)} not set"
        environment = cls(environ)
        if missing:
            raise environment.error_of_missing()
        environment.ranks  # noqa: B018  reading the ranks validates them
        return None

    @classmethod
    def detect(cls, environ: Mapping[str, str] | None = None) -> bool:
        """Return whether this environment has started the process; `os.environ` is the default.

        Raises:
            EnvironmentVariableError: as `rejection`.
        """
        return cls.rejection(os.environ if environ is None else environ) is None

    @property
    def creates_processes_externally(self) -> bool:
        """Whether the launcher starts all processes; otherwise the strategy starts this node's."""
        return True

    @property
    def processes_per_node(self) -> int | None:
        """The number of processes on this node, existing or requested; None if it is not specified."""
        return self.local_world_size if self.creates_processes_externally else None

    @property
    def other_node(self) -> str | None:
        """The name of a node other than rank 0's, if known; it determines the network interface."""
        with suppress(EnvironmentVariableError):
            return next(iter(self._node_names()[1:]), None)
        return None

    @property
    def global_rank(self) -> int:
        """This process's id in the whole job."""
        return self._fact("global_rank")

    @property
    def world_size(self) -> int:
        """The number of processes in the job."""
        return self._fact("world_size")

    @property
    def local_rank(self) -> int:
        """This process's id on its node."""
        return self._fact("local_rank")

    @property
    def local_world_size(self) -> int:
        """The number of processes on this node."""
        return self._fact("local_world_size")

    @property
    def node_rank(self) -> int:
        """The id of this node; without a variable derived from nodes of equal size."""
        if self._knows("node_rank"):
            return self._fact("node_rank")
        return self.global_rank // max(1, self.local_world_size)

    @property
    def num_nodes(self) -> int:
        """The number of nodes; without a variable derived from nodes of equal size."""
        if self._knows("num_nodes"):
            return self._fact("num_nodes")
        return max(1, -(-self.world_size // max(1, self.local_world_size)))

    @property
    def main_address(self) -> str:
        """The address at which rank 0's node listens; by default the name of the job's first node.

        Raises:
            EnvironmentVariableError: when neither is known.
        """
        variable = self.variable_of("main_address")
        names = [] if self._has(variable) else self._node_names()
        return names[0] if names else self._text(variable)

    @property
    def main_port(self) -> int:
        """The port at which rank 0's node listens; without a variable computed from the job's ids.

        Raises:
            EnvironmentVariableError: when it is not a port, or no id of the job is set.
        """
        variable = self.variable_of("main_port")
        ids = [self._text(name) for name in self.job_variables if self._has(name)]
        if ids and not self._has(variable):
            return port_of_job(ids)
        return self._number(variable, highest=65535, lowest=1)

    @property
    def ranks(self) -> RankInfo:
        """All ranks, validated against each other.

        Raises:
            EnvironmentVariableError: when a variable is missing, not a number, or contradicts another.
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
            raise self._error(error.summary()) from None

    def variable_of(self, fact: str) -> str:
        """Return the name of the variable that contains a fact, whether it is set or not.

        Raises:
            EnvironmentVariableError: when no variable is known for it.
        """
        if fact not in self._table:
            raise EnvironmentVariableError(environment=self.name, problem=f"no variable is known for {fact}")
        return self._table[fact]

    def error_of_missing(self) -> EnvironmentVariableError:
        """Return the error about variables that are not set."""
        return self._error(f"{', '.join(self.missing(self._environ))} is not set")

    def seen(self) -> dict[str, str]:
        """Return the variables of this environment that are set, for messages."""
        optional = [*self.job_variables, self.node_file, *self.optional]
        names = dict.fromkeys([*self.markers, *self.required, *self._table.values(), *optional])
        return {name: self._environ[name] for name in names if name in self._environ}

    def requeue(self) -> None:
        """Put the job back into the scheduler's queue, if requested. Runs on: global rank 0."""

    def validate_settings(self, devices: int, num_nodes: int) -> None:
        """Check the user's settings against this environment; override to raise for invalid ones."""

    def teardown(self) -> None:
        """Clean up at the end of a job, on every rank; override it where something is left."""

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value}" for name, value in self.seen().items())
        return f"{type(self).__name__}({shown})"

    @classmethod
    def _needed(cls, environ: Mapping[str, str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*cls.markers, *cls.required, *cls.table(environ).values()]))

    def _fact(self, fact: str) -> int:
        return self.constants[fact] if fact in self.constants else self._number(self.variable_of(fact))

    def _knows(self, fact: str) -> bool:
        """Return whether the variable of a fact is set, or must be."""
        return fact in self.table(self._environ) or self._has(self._table.get(fact, ""))

    def _node_names(self) -> list[str]:
        """Return the different names of the job's nodes, rank 0's first, if the launcher provides them."""
        if not self.node_file:
            return []
        path, names = self._text(self.node_file), list[str]()
        try:
            if Path(path).is_file():  # opening a named pipe may block
                with Path(path).open(encoding="utf-8") as file:
                    names = list(dict.fromkeys(file.read(_MAX_FILE_BYTES).split()))
        except (OSError, ValueError) as error:
            raise self._error(f"{self.node_file} cannot be read: {error}", {self.node_file: path}) from None
        if not names:
            raise self._error(f"{self.node_file} names no node")
        return names

    def _has(self, name: str) -> bool:
        return is_set(name, self._environ)

    def _text(self, name: str) -> str:
        """Return a variable that must be set to more than blanks."""
        if not self._has(name):
            raise self._error(f"{name} is not set", {})
        return self._environ[name].strip()

    def _number(self, name: str, highest: int = _MAX_COUNT, lowest: int = 0) -> int:
        """Return a variable that must be a whole number from `lowest` to `highest`."""
        text = self._text(name)
        if (number := whole_number(text, lowest, highest)) is None:
            raise self._error(f"{name} is not a number from {lowest} to {highest}", {name: text})
        return number

    def _error(self, problem: str, variables: Mapping[str, str] | None = None) -> EnvironmentVariableError:
        """Return an error with these variables, by default all that this environment reads."""
        return EnvironmentVariableError(
            environment=self.name,
            problem=problem.rstrip("."),
            remedy=self.remedy,
            variables=self.seen() if variables is None else dict(variables),
        )
