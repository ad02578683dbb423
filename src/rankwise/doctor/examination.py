"""Examine a job: bind a strategy, connect the ranks, measure, and collect the report's sections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, final

import torch

from rankwise.doctor.machine import (
    examine_backends,
    examine_devices,
    examine_environment,
    examine_start_methods,
    examine_versions,
)
from rankwise.doctor.measure import JobFacts, describe_measurements, describe_ranks, measure
from rankwise.doctor.network import examine_network, lookup_seconds
from rankwise.doctor.report import Finding, Report, Section
from rankwise.environments import Detection, NodesEnvironment
from rankwise.errors import RankwiseError
from rankwise.ranks import rank_zero_only
from rankwise.strategies import DDPStrategy

_CHECK_RANKS = (
    "check that every rank was started, with the same main address and port, and that the nodes can reach "
    "each other (firewall, interface: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)."
)


@final
@dataclass(frozen=True)
class Request:
    """The options of the command line.

    Attributes:
        devices: processes per node, or `"auto"`.
        num_nodes: nodes, or None for as many as there are.
        timeout_s: limit of the rendezvous and of a collective.
        runs_collectives: False to start no process and connect nowhere.
        tries_start_methods: whether each start method is tried, if no launcher started ranks.
    """

    devices: str = "auto"
    num_nodes: int | None = None
    timeout_s: float = 60.0
    runs_collectives: bool = True
    tries_start_methods: bool = True


@final
@dataclass(frozen=True)
class ExaminedJob:
    """A bound strategy, and the result of its run: `facts`, a `problem`, or None if it did not run."""

    strategy: DDPStrategy
    how_started: str
    is_alone: bool
    facts: JobFacts | None = None
    problem: Finding | None = None

    @property
    def is_local(self) -> bool:
        """Whether this process is alone and the job has one node."""
        return self.is_alone and self.strategy.ranks.is_one_node


def examine(request: Request, environ: Mapping[str, str]) -> tuple[Report, bool]:
    """Return the report, and whether this process prints it (rank 0, as far as ranks are known).

    Collective: if an outer launcher has started ranks, every rank must call this, unless
    `runs_collectives=False`.
    """
    environment, detection = examine_environment(environ)
    report = Report([examine_versions(), environment])
    machine = [examine_devices(environ), examine_backends(environ)]
    if detection is None:
        report.sections += machine
        return report, getattr(rank_zero_only, "rank", 0) == 0
    try:
        job = _bind(request, detection)
    except RankwiseError as error:
        problem = Finding(error.summary(), error.fix())
        report.sections += [_unknown_ranks(problem), *machine]
        return report, detection.environment.global_rank == 0
    if request.runs_collectives:
        job = _run(job)
    if not job.strategy.is_global_zero:
        report.sections += [_unknown_ranks(job.problem)] if job.problem else []
        return report, False
    report.sections += _examine_job(job, environ)
    if request.runs_collectives and request.tries_start_methods and job.is_local:
        report.sections.append(examine_start_methods(request.timeout_s))
    report.sections += machine
    report.next_step = _next_step(job)
    return report, True


def _bind(request: Request, detection: Detection) -> ExaminedJob:
    """Bind a strategy to the existing ranks, or to local ones if this process is alone.

    Raises:
        RankwiseError: if the request is not possible.
    """
    environment = detection.environment
    is_alone = not environment.creates_processes_externally
    gpus = torch.cuda.device_count()  # does not initialise CUDA
    options: dict[str, Any] = {"devices": request.devices, "num_nodes": request.num_nodes or "auto"}
    is_one_machine = is_alone and not isinstance(environment, NodesEnvironment)
    if is_one_machine and request.devices == "auto" and gpus < 2:
        options |= {"devices": 2, "accelerator": "cpu"}  # NCCL does not put two ranks on one device
    start_method = "spawn" if gpus else "fork"
    strategy = DDPStrategy(
        start_method=start_method,
        cluster_environment=environment,
        init_timeout=request.timeout_s,
        timeout=request.timeout_s,
    )
    strategy.bind(**options)
    by_us, by_others = f"started for this report by {start_method}", "started outside of rankwise"
    return ExaminedJob(strategy, by_us if is_alone else f"{by_others} ({environment.name})", is_alone)


def _run(job: ExaminedJob) -> ExaminedJob:
    """Connect the ranks and measure; an error becomes a finding."""
    try:
        return replace(job, facts=job.strategy.launch(measure))
    except RankwiseError as error:
        return replace(job, problem=Finding(error.summary(), error.fix() or _CHECK_RANKS))
    except RuntimeError as error:  # torch's, in a rank that an outer launcher has started
        return replace(job, problem=Finding(f"The ranks failed: {error}", _CHECK_RANKS))


def _unknown_ranks(problem: Finding) -> Section:
    return Section("ranks", "Ranks", None, ["not connected: see below"], [problem])


def _examine_job(job: ExaminedJob, environ: Mapping[str, str]) -> list[Section]:
    environment, facts = job.strategy.environment, job.facts
    main_address = None if job.strategy.ranks.is_one_node else environment.main_address
    if facts is None:
        lookups = {"this host": lookup_seconds()}
        ranks = _unknown_ranks(job.problem) if job.problem else _this_rank(job)
    else:
        lookups = {rank.host: rank.lookup_seconds for rank in facts.ranks if rank.local_rank == 0}
        ranks = describe_ranks(facts, job.how_started)
    sections = [ranks, examine_network(environ, main_address, lookups, environment.other_node)]
    return [*sections, describe_measurements(facts)] if facts and facts.measurements else sections


def _this_rank(job: ExaminedJob) -> Section:
    ranks = job.strategy.ranks
    place = (
        f"global_rank {ranks.global_rank} of {ranks.world_size}, local_rank {ranks.local_rank} of "
        f"{ranks.local_world_size}, node_rank {ranks.node_rank} of {ranks.num_nodes}"
    )
    return Section("ranks", "Ranks", None, [place, "no process was started or connected: --no-collectives"])


def _next_step(job: ExaminedJob) -> str:
    if job.is_local:
        count = job.strategy.local_world_size
        return (
            f'Trainer(strategy="ddp", devices={count}) in a script starts {count} processes. '
            "To examine a job on a cluster, start this command as you start the job, such as: srun python -m "
            "rankwise doctor."
        )
    return (
        "start your training as you started this command, with your script in place of -m rankwise doctor; "
        f'Trainer(strategy="ddp") in it uses these {job.strategy.world_size} ranks.'
    )
