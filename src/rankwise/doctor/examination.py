"""Examine everything, in the order of a report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from rankwise.doctor.environment import examine_environment
from rankwise.doctor.job import Job, run_rendezvous, spec
from rankwise.doctor.machine import examine_backends, examine_devices, examine_versions
from rankwise.doctor.measure import describe_measurements, describe_ranks
from rankwise.doctor.network import examine_network, lookup_seconds
from rankwise.doctor.report import Finding, Report, Section
from rankwise.doctor.start_methods import examine_start_methods
from rankwise.environments import Detection
from rankwise.errors import RankwiseError
from rankwise.ranks import RankInfo, rank_zero_only


@final
@dataclass(frozen=True)
class Wanted:
    """What the user asked for.

    Attributes:
        devices: processes on each node, or `"auto"`.
        num_nodes: nodes, None for as many as there are.
        timeout_s: how long the ranks may take to meet, and a collective to end.
        connects: False to start nothing and connect to nobody.
        tries: whether every start method is tried, where nobody has started ranks.
    """

    devices: str = "auto"
    num_nodes: int | None = None
    timeout_s: float = 60.0
    connects: bool = True
    tries: bool = True


def examine(wanted: Wanted, environ: Mapping[str, str]) -> tuple[Report, bool]:
    """Return the report, and whether it is this process that prints it: rank 0, as far as that can be told.

    Collective: where an outer launcher has started ranks, every one must call this, but for `connects=False`.
    """
    who, detection = examine_environment(environ)
    report = Report([examine_versions(), who])
    if detection is None:
        report.sections += _machine(environ)
        return report, getattr(rank_zero_only, "rank", 0) == 0
    try:
        job = _spec(wanted, detection)
    except RankwiseError as error:
        problem = Finding(error.summary(), error.fix())
        report.sections += [_unknown_ranks(problem), *_machine(environ)]
        return report, detection.environment.global_rank == 0
    if wanted.connects:
        job = run_rendezvous(job)
    if not job.strategy.is_global_zero:
        report.sections += [_unknown_ranks(job.problem)] if job.problem else []
        return report, False
    report.sections += [*_examine_job(job, environ), *_examine_starting(job, wanted), *_machine(environ)]
    report.next_step = _next_step(job)
    return report, True


def _spec(wanted: Wanted, detection: Detection) -> Job:
    return spec(detection, wanted.devices, wanted.num_nodes, wanted.timeout_s)


def _machine(environ: Mapping[str, str]) -> list[Section]:
    return [examine_devices(environ), examine_backends(environ)]


def _unknown_ranks(problem: Finding) -> Section:
    return Section("ranks", "Ranks", None, ["they did not meet: see below"], [problem])


def _examine_job(job: Job, environ: Mapping[str, str]) -> list[Section]:
    strategy, endpoint = job.strategy, job.endpoint
    main_address = None if strategy.ranks.is_one_node else strategy.environment.main_address
    other_node = strategy.environment.other_node
    if endpoint is None:
        ranks = _unknown_ranks(job.problem) if job.problem else _only_mine(job)
        lookups = {"this host": lookup_seconds()}
        return [ranks, examine_network(environ, main_address, lookups, other_node)]
    lookups = {rank.host: rank.lookup_seconds for rank in endpoint.ranks if rank.local_rank == 0}
    sections = [
        describe_ranks(endpoint, job.how),
        examine_network(environ, main_address, lookups, other_node),
    ]
    return [*sections, describe_measurements(endpoint)] if endpoint.measurements else sections


def _only_mine(job: Job) -> Section:
    lines = [_place(job.strategy.ranks), "nothing was started and nobody was asked: --no-collectives"]
    return Section("ranks", "Ranks", None, lines)


def _place(ranks: RankInfo) -> str:
    return (
        f"global_rank {ranks.global_rank} of {ranks.world_size}, local_rank {ranks.local_rank} of "
        f"{ranks.local_world_size}, node_rank {ranks.node_rank} of {ranks.num_nodes}"
    )


def _examine_starting(job: Job, wanted: Wanted) -> list[Section]:
    if not (wanted.connects and wanted.tries and job.is_alone and job.strategy.ranks.is_one_node):
        return []
    return [examine_start_methods(wanted.timeout_s)]


def _next_step(job: Job) -> str:
    count = job.strategy.local_world_size
    if job.is_alone and job.strategy.ranks.is_one_node:
        return (
            f'Trainer(strategy="ddp", devices={count}) in a script starts {count} processes. '
            "To examine a job on a cluster, start this command as you start the job, such as: srun python -m "
            "rankwise doctor."
        )
    return (
        "start your training as you have started this: in the place of -m rankwise doctor comes your script, "
        f'and Trainer(strategy="ddp") in it uses these {job.strategy.world_size} ranks.'
    )
