"""`Placement`: the ranks, devices, environment and launcher that a strategy is bound to."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, final

import torch

from rankwise.checks import check_overrides, check_value
from rankwise.compatibility.lightning_environments import (
    GivenEnvironment,
    LightningClusterEnvironment,
    adapted_environment,
)
from rankwise.compatibility.names import MISSING_HOOKS
from rankwise.environments import (
    ClusterEnvironment,
    Detection,
    LocalEnvironment,
    NodesEnvironment,
    TorchElasticEnvironment,
    create_environment,
    detect_environment,
)
from rankwise.environments.network import LOOPBACK, listening_address, rendezvous_address
from rankwise.environments.slurm import warn_of_unused_tasks
from rankwise.errors import ConfigurationError, EnvironmentVariableError, WorldSizeMismatchError
from rankwise.launchers import Launcher
from rankwise.launchers.inline import InlineLauncher
from rankwise.launchers.script_place import script_place
from rankwise.process_group import check_interface, default_backend
from rankwise.ranks import RankInfo
from rankwise.stores.rendezvous import mig_slices
from rankwise.stores.sealed import job_key_of_environment
from rankwise.stores.tcp import RendezvousEndpoint
from rankwise.strategies.config import GroupConfig, ProcessConfig, check_devices, check_num_nodes, device_type
from rankwise.torch_internals import JOB, check_torch

if TYPE_CHECKING:
    from rankwise.launchers.supervisor import SupervisionOptions


@final
@dataclass(frozen=True)
class Placement:
    """Where the ranks of a job run."""

    ranks: RankInfo  # of this process; in a main process that is not a rank, local rank 0's
    devices: tuple[torch.device, ...]  # of the local ranks
    environment: ClusterEnvironment  # which launcher started this process
    launcher: Launcher | None = None  # None in a process to which the strategy was sent as a pickle

    def __post_init__(self) -> None:
        if self.launcher is not None:
            check_overrides(self.launcher, MISSING_HOOKS["launcher"])

    @cached_property
    def root_device(self) -> torch.device:
        """The device of this process."""
        return self.devices[self.ranks.local_rank]

    @property
    def is_permanent(self) -> bool:
        """Whether this process has its global rank outside of jobs too."""
        is_rerun = self.ranks.global_rank > 0 and script_place() is not None
        return is_rerun or self.environment.creates_processes_externally or self.ranks.node_rank > 0

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the launcher: its processes and sockets belong to the launching process."""
        return {**self.__dict__, "launcher": None}


def find_placement(
    config: ProcessConfig, place_locally: Callable[[ClusterEnvironment, int, int | None], RankInfo]
) -> Placement:
    """Return the placement that a config has in this process, without a launcher."""
    kind = device_type(config.accelerator)
    devices, num_nodes = check_devices(config.devices), check_num_nodes(config.num_nodes)
    count = len(devices) if isinstance(devices, tuple) else devices
    detection = _find_environment(config.cluster_environment, count, num_nodes)
    environment = detection.environment
    check_overrides(environment, MISSING_HOOKS["environment"])
    found = local_devices(kind, devices, environment.processes_per_node)
    if environment.creates_processes_externally:
        ranks = environment.ranks
        _check_world(environment, str(detection), None if devices is None else len(found), num_nodes)
    else:
        if script_place() is None:  # else these variables are our own
            _check_is_alone(environment)
        ranks = place_locally(environment, len(found), num_nodes)
        if "slurm" in detection.rejected:
            warn_of_unused_tasks(os.environ, ranks.world_size)
    environment.validate_settings(ranks.local_world_size, ranks.num_nodes)
    if kind == "cuda" and config.start_method == "fork" and not environment.creates_processes_externally:
        _refuse_fork_beside_slices()
    if ranks.world_size > 1:
        check_torch(JOB)
    return Placement(ranks, tuple(found), environment)


def _refuse_fork_beside_slices() -> None:
    """Raise where torch has to initialise CUDA to count the devices, after which no fork can use them."""
    if visible := mig_slices(os.environ):
        raise ConfigurationError(
            message="start_method='fork' cannot use slices of a GPU (MIG) that are named by their uuid.",
            facts=f"CUDA_VISIBLE_DEVICES={','.join(visible)}; torch initialises CUDA to count them.",
            remedy='use strategy="ddp", "ddp_spawn" or "ddp_forkserver".',
        )


def _find_environment(
    given: GivenEnvironment | None, devices: int | None, num_nodes: int | None
) -> Detection:
    """Return the environment and the reason for choosing it."""
    is_rerun = script_place() is not None
    if isinstance(given, LightningClusterEnvironment):
        given = adapted_environment(given, devices, num_nodes, is_rerun=is_rerun)
    if isinstance(given, ClusterEnvironment):
        return Detection(given, "it was given", {})
    if isinstance(given, str):
        return Detection(create_environment(given), "it was named", {})
    if is_rerun:
        return Detection(LocalEnvironment(), "this script runs under strategy 'ddp' already", {})
    return detect_environment()


def _check_is_alone(environment: ClusterEnvironment) -> None:
    """Refuse an environment that starts nothing, but describes one of several processes."""
    names = ["local_rank", "local_world_size", "world_size"]
    if isinstance(environment, NodesEnvironment):
        names.remove("world_size")  # the number of nodes
    facts: dict[str, int] = {}
    for name in names:
        with suppress(EnvironmentVariableError):  # it need not know
            facts[name] = getattr(environment, name)
    if any(value > (0 if name == "local_rank" else 1) for name, value in facts.items()):
        seen = ", ".join(f"{name}={value}" for name, value in facts.items())
        raise ConfigurationError(
            message=f"The environment {environment.name!r} starts no processes, but this is one of several.",
            facts=f"creates_processes_externally is False; {seen}.",
            remedy="creates_processes_externally must be True if each process is a rank; with one process on "
            "each node, derive it from NodesEnvironment; Trainer(devices=...) says how many to start.",
        )


def _check_world(
    environment: ClusterEnvironment, reason: str, devices: int | None, num_nodes: int | None
) -> None:
    ranks = environment.ranks
    if devices not in (None, ranks.local_world_size) or num_nodes not in (None, ranks.num_nodes):
        raise WorldSizeMismatchError(
            devices=devices or ranks.local_world_size,
            num_nodes=num_nodes or ranks.num_nodes,
            launched_by=environment.name,
            world_size=ranks.world_size,
            variables=environment.seen(),
            detection=reason,
        )


def local_devices(
    kind: str, devices: int | tuple[int, ...] | None, started: int | None
) -> list[torch.device]:
    """Return the device of each local rank; an outer launcher may have `started` some."""
    if kind == "cpu":
        count = len(devices) if isinstance(devices, tuple) else devices
        return [torch.device("cpu")] * (count or started or 1)
    available = torch.cuda.device_count()
    if isinstance(devices, tuple):
        indices = devices
    elif started is not None and available < started:
        indices = (0,) * (devices or started)  # each rank sees one device of its own
    else:
        indices = tuple(range(devices or started or available))
    check_value("devices", devices, max(indices) < available, f"devices that exist: torch sees {available}")
    return [torch.device("cuda", index) for index in indices]


def place_on_node(environment: ClusterEnvironment, local_world_size: int, num_nodes: int | None) -> RankInfo:
    """Return this process's ranks if the strategy starts the processes: as the first process of its node."""
    running = script_place()  # the ranks with which it was started to run the script again
    if running is not None and running.local_world_size == local_world_size:
        return running
    if running is not None:  # the launch will refuse this number of devices
        node_rank, nodes = running.node_rank, running.num_nodes
    elif isinstance(environment, NodesEnvironment):
        node_rank, nodes = environment.node_rank, _number_of_nodes(environment, local_world_size, num_nodes)
    elif num_nodes in (None, 1):
        node_rank, nodes = 0, 1
    else:
        missing = ", ".join(NodesEnvironment.missing(os.environ))
        raise ConfigurationError(
            message=f"num_nodes={num_nodes} is not possible here: no launcher has started the other nodes.",
            facts=f"the environment is {environment.name!r}, which is one node; {missing or 'nothing'} not "
            f"set on {socket.gethostname()!r}.",
            remedy=f"start it on every node: torchrun --nnodes={num_nodes} --nproc-per-node="
            f"{local_world_size} train.py; or by hand: NODE_RANK=0 MASTER_ADDR=<node 0's address> "
            "MASTER_PORT=29500 python train.py",
        )
    first = node_rank * local_world_size
    return RankInfo(first, 0, node_rank, nodes * local_world_size, local_world_size, nodes)


def check_given_launcher(placement: Placement, launcher: Launcher, *, is_private: bool) -> None:
    """Make sure that this process is the only one of its job, and that the ranks can meet as they should."""
    if is_private and not launcher.has_channels:
        raise ConfigurationError(
            message="rendezvous='private' is not possible: the ranks of this launcher have no channels.",
            facts=f"launcher={launcher!r}.",
            remedy='leave rendezvous at "auto".',
        )
    environment, ranks = placement.environment, script_place()
    if environment.creates_processes_externally:
        who = f"{environment.name} has started the ranks already"
    elif isinstance(environment, NodesEnvironment):
        who = f"{environment.name} says that this is node {environment.node_rank} of the job"
    elif ranks is not None:
        who = f"this script runs as {ranks.local_world_size} processes already"
    else:
        return
    raise ConfigurationError(
        message=f"launcher= would start all ranks of the job, but {who}.",
        facts=f"launcher={launcher!r}, {environment!r}.",
        remedy="leave launcher= out, or start one process, without that.",
    )


def _ranks_on_all_nodes(first: RankInfo) -> tuple[RankInfo, ...]:
    """Return all ranks of the job, given the first."""
    count = first.local_world_size
    nodes = (replace(first, global_rank=node * count, node_rank=node) for node in range(first.num_nodes))
    return tuple(ranks for node in nodes for ranks in ranks_on_node(node))


def ranks_on_node(own: RankInfo) -> tuple[RankInfo, ...]:
    """Return the ranks of all processes of this node, given the ranks of one."""
    first = own.global_rank - own.local_rank
    count = own.local_world_size
    return tuple(replace(own, global_rank=first + local, local_rank=local) for local in range(count))


def check_private_rendezvous(placement: Placement) -> None:
    """Make sure that this process starts all ranks: others have no channel to a private store."""
    environment, ranks = placement.environment, placement.ranks
    is_external = environment.creates_processes_externally
    if ranks.world_size > 1 and (is_external or not ranks.is_one_node):
        who = f"{environment.name} has started the ranks" if is_external else "the job has several nodes"
        raise ConfigurationError(
            message=f"rendezvous='private' is not possible here: {who}, so they meet in a TCP store.",
            facts=f"{environment!r}, {ranks!r}.",
            remedy='leave rendezvous at "auto"; what listens then, and where, is in docs/security.md. On one '
            'node "private" works where the strategy starts the ranks: run the script without a launcher.',
        )


def launcher_of(placement: Placement, processes: ProcessConfig, group: GroupConfig) -> Launcher:
    """Return a placement's launcher: the given one, as the start method says, or for existing processes."""
    if group.sync_batchnorm and placement.ranks.world_size > 1 and placement.root_device.type == "cpu":
        raise ConfigurationError(
            message="sync_batchnorm=True is not possible on the CPU: torch has no SyncBatchNorm there.",
            remedy="leave it out, or train on CUDA devices.",
        )
    check_variables(placement, group)
    if (launcher := processes.launcher) is not None:
        check_given_launcher(placement, launcher, is_private=processes.rendezvous == "private")
        options = _supervision_options(placement, processes, group, None)
        return launcher.bound_to(_ranks_on_all_nodes(placement.ranks), options)
    if processes.rendezvous == "private":
        check_private_rendezvous(placement)
    is_alone_here = placement.ranks.local_world_size == 1 and not placement.ranks.is_one_node
    is_rank_already = is_alone_here and processes.start_method == "popen"
    if is_rank_already or placement.environment.creates_processes_externally:
        refuse_time_limit(processes)
        return inline_launcher(placement)
    return _supervised_launcher(placement, processes, group)


def refuse_time_limit(processes: ProcessConfig) -> None:
    """Raise where nothing would keep the limit: no supervisor of ours starts the ranks."""
    if processes.time_limit is not None:
        raise ConfigurationError(
            message=f"time_limit={processes.time_limit} is not possible: no supervisor starts these ranks.",
            remedy="leave it out, or use a strategy that starts its ranks itself, other than ddp_elastic.",
        )


def check_variables(placement: Placement, group: GroupConfig) -> None:
    """Refuse a key that can be guessed, and an interface that this host does not have."""
    job_key_of_environment()
    if "gloo" in (group.process_group_backend or default_backend(placement.root_device.type)):
        check_interface()


def _supervision_options(
    placement: Placement, processes: ProcessConfig, group: GroupConfig, endpoint: RendezvousEndpoint | None
) -> SupervisionOptions:
    # Modules that start and supervise processes are imported where they are needed.
    from rankwise.launchers.supervisor import SupervisionOptions

    requeue_signal = placement.environment.requeue_signal
    return SupervisionOptions(
        processes.grace_period_s,
        group.init_timeout,
        stop_signals=[signal.SIGTERM, *filter(None, [requeue_signal])],
        stall_warning_s=processes.stall_warning.total_seconds(),
        teardown_timeout_s=group.timeout.total_seconds(),
        endpoint=endpoint,
        time_limit_s=None if (limit := processes.time_limit) is None else limit.total_seconds(),
    )


def _supervised_launcher(placement: Placement, processes: ProcessConfig, group: GroupConfig) -> Launcher:
    environment = placement.environment
    hosts = placement.ranks.node_rank == 0
    endpoint = None
    if not placement.ranks.is_one_node and script_place() is None:  # else the launcher chooses the address
        endpoint = RendezvousEndpoint((_store_address(environment, hosts), environment.main_port), hosts)
    options = _supervision_options(placement, processes, group, endpoint)
    ranks = ranks_on_node(placement.ranks)
    if processes.start_method == "popen" or script_place() is not None:
        from rankwise.launchers.script import ScriptLauncher

        return ScriptLauncher(ranks, options, processes.command)
    from rankwise.launchers.multiprocess import MultiprocessLauncher

    return MultiprocessLauncher(processes.start_method, ranks, options)


def inline_launcher(placement: Placement) -> InlineLauncher:
    """Return the launcher of a process that is its rank already."""
    environment, ranks = placement.environment, placement.ranks
    is_hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if ranks.world_size == 1 and not (is_hosted and isinstance(environment, TorchElasticEnvironment)):
        return InlineLauncher(ranks)
    hosts = ranks.is_global_zero and not is_hosted
    if is_hosted:
        address = environment.main_address
    else:
        address = LOOPBACK if ranks.is_one_node else _store_address(environment, hosts)
    endpoint = (address, environment.main_port)
    return InlineLauncher(ranks, endpoint, hosts_store=hosts, store_outlives=is_hosted)


def _store_address(environment: ClusterEnvironment, hosts: bool) -> str:
    find_address = listening_address if hosts else rendezvous_address
    return find_address(environment.main_address, environment.other_node)


def _number_of_nodes(environment: NodesEnvironment, local_world_size: int, given: int | None) -> int:
    per_node = environment.processes_per_node
    is_other = environment.has_num_nodes and given not in (None, environment.num_nodes)
    if is_other or per_node not in (None, local_world_size):
        raise WorldSizeMismatchError(
            devices=local_world_size,
            num_nodes=given or environment.num_nodes,
            launched_by=environment.name,
            world_size=environment.num_nodes * (per_node or local_world_size),
            variables=environment.seen(),
        )
    nodes = environment.num_nodes if environment.has_num_nodes else given
    if nodes is None and environment.node_rank == 0:
        return 1  # NODE_RANK=0 alone does not ask for several nodes
    if nodes is None or environment.node_rank >= nodes:
        variable = environment.full_table(os.environ).get("num_nodes")
        raise ConfigurationError(
            message=f"This is node {environment.node_rank}, but "
            + ("the number of nodes is unknown." if nodes is None else f"there are only {nodes}, from 0 up."),
            facts=", ".join(f"{name}={value}" for name, value in environment.seen().items()),
            remedy=f"Trainer(num_nodes=...){f', or {variable}' if variable else ''}, with the number of "
            "nodes, which are counted from 0.",
        )
    return nodes
