"""torchrun, and other launchers that use torch's elastic agent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, final

from rankwise.environments.base import ClusterEnvironment


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
