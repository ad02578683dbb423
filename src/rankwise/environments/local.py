"""A single process without a launcher: the strategy starts the other processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, final

from rankwise.environments.base import ClusterEnvironment
from rankwise.errors import ConfigurationError


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
    creates_processes_externally = False
    main_address = "127.0.0.1"

    @classmethod
    def rejection(cls, environ: Mapping[str, str]) -> None:
        """Return None: this environment is the last one, and fits every process."""

    @property
    def main_port(self) -> int:
        """`MASTER_PORT`, if it is set: otherwise the strategy takes a free port when it starts the ranks.

        Raises:
            ConfigurationError: when it is not set.
        """
        if self._values.has("MASTER_PORT"):
            return super().main_port
        raise ConfigurationError(
            message="A local job has no main_port that could be known beforehand.",
            facts="no launcher has started this process. The strategy takes a free port when it starts the "
            'ranks; and none with rendezvous="private", which "auto" is on gloo.',
            remedy='read os.environ["MASTER_PORT"] within a rank, of a strategy with rendezvous="tcp".',
        )
