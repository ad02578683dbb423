"""Let the ranks that are there meet, or two local ones where there are none."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, final

import torch

from rankwise.doctor.measure import Meeting, meet
from rankwise.doctor.report import Finding
from rankwise.environments import Detection, NodesEnvironment
from rankwise.errors import RankwiseError
from rankwise.strategies import DDPStrategy


@final
@dataclass(frozen=True)
class Job:
    """A strategy that is bound, who started its ranks, and what came of their meeting."""

    strategy: DDPStrategy
    how: str
    is_alone: bool
    endpoint: Meeting | None = None
    problem: Finding | None = None


def spec(detection: Detection, devices: str, num_nodes: int | None, timeout_s: float) -> Job:
    """Bind a strategy to the ranks that are there, or to local ones where this process is alone.

    Raises:
        RankwiseError: when what was asked for cannot be.
    """
    is_alone = not detection.environment.creates_processes_externally
    gpus = torch.cuda.device_count()  # asks the driver without initialising CUDA
    wanted: dict[str, Any] = {"devices": devices, "num_nodes": num_nodes or "auto"}
    is_one_of_several = isinstance(detection.environment, NodesEnvironment)
    if is_alone and not is_one_of_several and devices == "auto" and gpus < 2:
        wanted |= {"devices": 2, "accelerator": "cpu"}  # NCCL cannot put two ranks on one device
    method = "spawn" if gpus else "fork"
    strategy = DDPStrategy(
        start_method=method,
        cluster_environment=detection.environment,
        init_timeout=timeout_s,
        timeout=timeout_s,
    )
    strategy.bind(**wanted)
    how = (
        f"started for this report by {method}"
        if is_alone
        else f"started outside of rankwise ({detection.environment.name})"
    )
    return Job(strategy, how, is_alone)


def run_rendezvous(job: Job) -> Job:
    """Let the ranks meet and measure; a failure becomes a finding."""
    try:
        return replace(job, endpoint=job.strategy.launch(meet))
    except RankwiseError as error:
        return replace(job, problem=Finding(error.summary(), error.fix() or _LOOK))
    except RuntimeError as error:  # torch's, in a rank that an outer launcher has started
        return replace(job, problem=Finding(f"The ranks could not work together: {error}", _LOOK))


_LOOK = (
    "see that every rank was started, with the same main address and port, and that the nodes can reach "
    "each other (firewall, interface: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)."
)
