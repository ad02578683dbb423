"""`DDPElasticStrategy`: DDP whose processes are started again after a failure."""

from __future__ import annotations

from typing import Any, ClassVar

from rankwise.environments.network import listening_address
from rankwise.errors import ConfigurationError, InvalidArgumentError, LaunchRefusedError
from rankwise.launchers import Launcher
from rankwise.launchers.elastic import ElasticLauncher, Nodes
from rankwise.launchers.script import script_place
from rankwise.strategies.ddp import DDPStrategy
from rankwise.strategies.placement import Placement


class DDPElasticStrategy(DDPStrategy):
    """`DDPStrategy` on torch's elastic agent: after a failure all ranks start again.

    The launched function then runs from its beginning; `Trainer.fit` continues from the last checkpoint that
    a `ModelCheckpoint` of the same run has written. The calling process is the agent. For a whole script use
    torchrun: `torchrun --max-restarts=3 train.py`, with strategy `"ddp"`.

    Args:
        max_restarts: after how many failures the ranks are started again.
        node_range: the number of nodes, or the smallest and largest number, as in `"1:4"`. Start the same
            program on each of them.
        endpoint: the rendezvous address of the nodes' agents: the first node's `"host:port"`.
        run_id: identifies the job; required with several nodes.

    The other arguments are `DDPStrategy`'s; `start_method` is `"spawn"`, `"fork"` or `"forkserver"`.

    Raises:
        InvalidArgumentError, ConfigurationError: for impossible values.
    """

    default_start_method: ClassVar[str] = "forkserver"

    def __init__(
        self,
        *,
        max_restarts: Any = 3,
        node_range: int | str = 1,
        endpoint: str = "",
        run_id: str = "",
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        if self.start_method == "popen":
            raise ConfigurationError(
                message="ddp_elastic runs a function, not the script again: not start_method='popen'.",
                remedy='"spawn", "fork" or "forkserver"; for a script: torchrun --max-restarts=3 train.py',
            )
        if self.rendezvous == "private":
            raise ConfigurationError(
                message="ddp_elastic cannot use a private rendezvous: torch's agent has a TCP store.",
                remedy='leave rendezvous at "auto"; on one node that store listens on loopback only.',
            )
        if isinstance(max_restarts, bool) or not isinstance(max_restarts, int) or max_restarts < 0:
            raise InvalidArgumentError(argument="max_restarts", value=max_restarts, expected="0 or more")
        fewest, most = _parse_node_range(node_range)
        if most > 1 and not (endpoint and run_id):
            raise ConfigurationError(
                message=f"node_range={node_range!r} needs an endpoint and a run_id.",
                remedy='DDPElasticStrategy(endpoint="first-node:29400", run_id="a name for the job", ...)',
            )
        self.max_restarts = max_restarts
        self._nodes = Nodes(fewest, most, endpoint, run_id, listening_address)

    def _create_launcher(self, placement: Placement) -> Launcher:
        if placement.environment.creates_processes_externally:
            return super()._create_launcher(placement)
        if (existing := script_place()) is not None:
            raise LaunchRefusedError(
                message="ddp_elastic cannot start processes: this script runs as "
                f"{existing.local_world_size} processes "
                'already, under strategy "ddp", and each of them would start ranks of its own.',
                remedy='use "ddp_spawn" or "ddp_fork" before it; for a script as a whole: '
                "torchrun --max-restarts=3 train.py",
            )
        return ElasticLauncher(
            self.start_method,
            placement.ranks.local_world_size,
            self._nodes,
            max_restarts=self.max_restarts,
            grace_period_s=self.grace_period_s,
            init_timeout=self.init_timeout,
        )


def _parse_node_range(node_range: int | str) -> tuple[int, int]:
    words = str(node_range).split(":")
    numbers = [int(word) if word.isdecimal() else 0 for word in words]
    fewest, most = (numbers[0], numbers[-1]) if len(numbers) <= 2 else (0, 0)
    if not 1 <= fewest <= most:
        raise InvalidArgumentError(argument="node_range", value=node_range, expected='a number or "min:max"')
    return fewest, most
