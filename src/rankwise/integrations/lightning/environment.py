"""`JobEnvironment`: answers Lightning's questions about ranks from a rankwise strategy."""

from __future__ import annotations

from lightning.fabric.plugins import ClusterEnvironment

from rankwise.errors import LifecycleError
from rankwise.strategies import DDPStrategy


class JobEnvironment(ClusterEnvironment):
    """The ranks of a bound strategy. Setters do nothing: the strategy has determined the ranks."""

    def __init__(self, strategy: DDPStrategy) -> None:
        self._strategy = strategy

    @property
    def creates_processes_externally(self) -> bool:
        """Whether Lightning must not start any process: rankwise does."""
        return True

    @property
    def main_address(self) -> str:
        return self._endpoint[0]

    @property
    def main_port(self) -> int:
        return self._endpoint[1]

    @property
    def _endpoint(self) -> tuple[str, int]:
        address = self._strategy.worker.address
        if address is None:
            raise LifecycleError(
                call="cluster_environment.main_address",
                state="a private rendezvous",
                needed="a TCP store",
                remedy='strategy=RankwiseStrategy(rendezvous="tcp").',
            )
        return address

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self._strategy.world_size

    def set_world_size(self, size: int) -> None:
        pass

    def global_rank(self) -> int:
        return self._strategy.global_rank

    def set_global_rank(self, rank: int) -> None:
        pass

    def local_rank(self) -> int:
        return self._strategy.local_rank

    def node_rank(self) -> int:
        return self._strategy.node_rank
