"""Placement: the environment, the devices and the ranks that a strategy is bound to."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

import torch

from rankwise.environments import (
    ClusterEnvironment,
    NodesEnvironment,
    TorchElasticEnvironment,
    create_environment,
    detect_environment,
)
from rankwise.environments.local import LocalEnvironment
from rankwise.environments.network import interface_toward, listening_address, meeting_address
from rankwise.errors import (
    ConfigurationError,
    InvalidArgumentError,
    InvalidTypeError,
    UnknownNameError,
    WorldSizeMismatchError,
)
from rankwise.launchers.inline import InlineLauncher
from rankwise.launchers.script import script_place, script_ranks
from rankwise.ranks import RankInfo
from rankwise.stores.endpoint import RendezvousEndpoint
from rankwise.strategies.config import check_choice


def check_environment(given: object) -> ClusterEnvironment | str | None:
    """Return what may name an environment.

    Raises:
        InvalidTypeError: for anything else.
    """
    if given is None or isinstance(given, (str, ClusterEnvironment)):
        return given
    raise InvalidTypeError(
        argument="cluster_environment", value=given, expected="a ClusterEnvironment instance or a name"
    )


def find_environment(wanted: ClusterEnvironment | str | None) -> tuple[ClusterEnvironment, str]:
    """Return the environment, and why it is that one.

    Raises:
        UnknownNameError: for a name that is none.
        EnvironmentVariableError: when a launcher's variables are wrong.
    """
    if isinstance(wanted, ClusterEnvironment):
        return wanted, "it was given"
    if isinstance(wanted, str):
        return create_environment(wanted), "it was named"
    if script_ranks() is not None:
        return LocalEnvironment(), "this script runs under strategy 'ddp' already"
    detection = detect_environment()
    return detection.environment, str(detection)


def check_world(
    environment: ClusterEnvironment, how: str, devices: int | None, num_nodes: int | None
) -> None:
    """Refuse numbers that are not those of the processes that exist.

    Raises:
        WorldSizeMismatchError: says both.
    """
    ranks = environment.ranks
    is_right = devices in (None, ranks.local_world_size) and num_nodes in (None, ranks.num_nodes)
    if not is_right:
        raise WorldSizeMismatchError(
            devices=devices or ranks.local_world_size,
            num_nodes=num_nodes or ranks.num_nodes,
            launched_by=environment.name,
            world_size=ranks.world_size,
            variables=environment.seen(),
            detection=how,
        )


ACCELERATORS = ("auto", "cpu", "cuda", "gpu")
_STRATEGIES = ("ddp", "ddp_spawn", "ddp_cpu", "ddp2", "dp", "horovod")  # accelerators in Lightning before 1.5
_EXPECTED = 'a number of devices from 1 up, "auto" (or -1: all), or a list of different device indices'


def device_type(accelerator: object) -> str:
    """Return `"cpu"` or `"cuda"`.

    Raises:
        UnknownNameError: for an accelerator that is not known.
        ConfigurationError: when it is not there.
    """
    if accelerator in _STRATEGIES:
        raise UnknownNameError(
            kind="accelerator",
            name=str(accelerator),
            known=ACCELERATORS,
            remedy='a strategy is meant: Trainer(strategy="ddp").',
        )
    wanted = check_choice("accelerator", accelerator, ACCELERATORS)
    has_cuda = torch.cuda.device_count() > 0
    if wanted == "auto":
        return "cuda" if has_cuda else "cpu"
    if wanted == "cpu":
        return "cpu"
    if not has_cuda:
        raise ConfigurationError(
            message=f"accelerator={accelerator!r} is not possible: torch sees no CUDA device.",
            facts=f"torch {torch.__version__}, torch.cuda.device_count() is 0.",
            remedy='use accelerator="cpu" or "auto".',
        )
    return "cuda"


def check_devices(devices: object) -> int | tuple[int, ...] | None:
    """Return a count, a tuple of indices, or None for "as many as there are".

    Raises:
        InvalidTypeError: for a value of another kind, such as a float.
        InvalidArgumentError: for a count or an index that cannot be.
    """
    if isinstance(devices, str):
        return _parse(devices)
    if isinstance(devices, bool) or not isinstance(devices, (int, list, tuple)):
        raise InvalidTypeError(argument="devices", value=devices, expected=_EXPECTED)
    if isinstance(devices, int):
        return _check_count(devices)
    return _check_indices(devices)


def check_num_nodes(num_nodes: object) -> int | None:
    """Return a count, or None for "as many as there are".

    Raises:
        InvalidTypeError, InvalidArgumentError: as `check_devices`.
    """
    if num_nodes == "auto":
        return None
    if isinstance(num_nodes, bool) or not isinstance(num_nodes, int):
        raise InvalidTypeError(
            argument="num_nodes", value=num_nodes, expected='a number from 1 up, or "auto"'
        )
    if num_nodes < 1:
        raise InvalidArgumentError(
            argument="num_nodes", value=num_nodes, expected='a number from 1 up, or "auto"'
        )
    return num_nodes


def local_devices(
    kind: str, devices: int | tuple[int, ...] | None, started: int | None
) -> list[torch.device]:
    """Return the device of each local rank, in order.

    Args:
        kind: `"cpu"` or `"cuda"`.
        devices: what `check_devices` returned.
        started: how many local ranks an outer launcher has started, None where nobody has.

    Raises:
        InvalidArgumentError: when more are asked for than there are.
    """
    if kind == "cpu":
        count = len(devices) if isinstance(devices, tuple) else devices
        return [torch.device("cpu")] * (count or started or 1)
    available = torch.cuda.device_count()
    if isinstance(devices, tuple):
        indices = devices
    elif started is not None and available < started:
        indices = (0,) * (devices or started)  # each rank was given one visible device of its own
    else:
        indices = tuple(range(devices or started or available))
    if max(indices) >= available:
        expected = f"devices that exist: torch sees {available}"
        raise InvalidArgumentError(argument="devices", value=devices, expected=expected)
    return [torch.device("cuda", index) for index in indices]


def _parse(text: str) -> int | tuple[int, ...] | None:
    if text == "auto":
        return None
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise InvalidArgumentError(argument="devices", value=text, expected=_EXPECTED) from None
    if not numbers:
        raise InvalidArgumentError(argument="devices", value=text, expected=_EXPECTED)
    return _check_indices(numbers) if "," in text else _check_count(numbers[0])


def _check_count(count: int) -> int | None:
    if count == -1:
        return None
    if count < 1:
        raise InvalidArgumentError(argument="devices", value=count, expected=_EXPECTED)
    return count


def _check_indices(indices: Sequence[object]) -> tuple[int, ...]:
    numbers = tuple(index for index in indices if isinstance(index, int) and not isinstance(index, bool))
    is_whole = len(numbers) == len(indices) > 0
    if not is_whole or min(numbers) < 0 or len(set(numbers)) < len(numbers):
        raise InvalidArgumentError(argument="devices", value=list(indices), expected=_EXPECTED)
    return numbers


# A job on one node keeps to it, whatever address it was given, unless somebody else hosts its store.
LOOPBACK = "127.0.0.1"


def place_on_node(environment: ClusterEnvironment, local_world_size: int, num_nodes: int | None) -> RankInfo:
    """Return the ranks of this node's first process.

    Args:
        environment: one whose processes the strategy starts.
        local_world_size: the number of processes on each node.
        num_nodes: how many nodes were asked for, None where nobody did.

    Raises:
        ConfigurationError: when several nodes are meant, but nobody says which one this is or how many.
        WorldSizeMismatchError: when the environment has another number of nodes, or of processes on each.
    """
    running = script_place()
    if running is not None:
        node_rank, nodes = running.node_rank, running.num_nodes
    elif isinstance(environment, NodesEnvironment):
        node_rank, nodes = environment.node_rank, _number_of(environment, local_world_size, num_nodes)
    elif num_nodes in (None, 1):
        node_rank, nodes = 0, 1
    else:
        raise _nobody_started_the_others(environment, local_world_size, num_nodes)
    first = node_rank * local_world_size
    return RankInfo(first, 0, node_rank, nodes * local_world_size, local_world_size, nodes)


def ranks_on_node(first: RankInfo) -> tuple[RankInfo, ...]:
    """Return the ranks of all processes of this node, given those of its first one."""
    return tuple(
        RankInfo(
            first.global_rank + local_rank,
            local_rank,
            first.node_rank,
            first.world_size,
            first.local_world_size,
            first.num_nodes,
        )
        for local_rank in range(first.local_world_size)
    )


def rendezvous_endpoint(environment: ClusterEnvironment, ranks: RankInfo) -> RendezvousEndpoint | None:
    """Return where the nodes of a job meet; None for a job on one node, which sees to that itself.

    Raises:
        EnvironmentVariableError, ConfigurationError: when the address is not known, or leads nowhere.
    """
    if ranks.is_one_node or script_place() is not None:
        return None
    hosts = ranks.node_rank == 0
    return RendezvousEndpoint((_address_of_store(environment, hosts), environment.main_port), hosts)


def refuse_private_elsewhere(environment: ClusterEnvironment, ranks: RankInfo) -> None:
    """Refuse a private rendezvous of ranks that this process does not start: they have no channel to it.

    Raises:
        ConfigurationError: says so, before anything is started.
    """
    is_external = environment.creates_processes_externally
    if ranks.world_size > 1 and (is_external or not ranks.is_one_node):
        who = f"{environment.name} has started the ranks" if is_external else "the job has several nodes"
        raise ConfigurationError(
            message=f"rendezvous='private' is not possible here: {who}, so they meet in a TCP store.",
            facts=f"{environment!r}, {ranks!r}.",
            remedy='leave rendezvous at "auto"; what listens then, and where, is in docs/security.md. On one '
            'node "private" works where the strategy starts the ranks: run the script without a launcher.',
        )


def inline_launcher(environment: ClusterEnvironment, ranks: RankInfo) -> InlineLauncher:
    """Return the launcher of a process that is its rank already."""
    is_hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if ranks.world_size == 1 and not (is_hosted and isinstance(environment, TorchElasticEnvironment)):
        return InlineLauncher(ranks)
    hosts = ranks.is_global_zero and not is_hosted
    if is_hosted:
        address = environment.main_address
    else:
        address = LOOPBACK if ranks.is_one_node else _address_of_store(environment, hosts)
    endpoint = (address, environment.main_port)
    return InlineLauncher(ranks, endpoint, hosts_store=hosts, store_outlives=is_hosted)


def _address_of_store(environment: ClusterEnvironment, hosts: bool) -> str:
    """Return at which address this process hosts the store of several nodes, or else finds it."""
    address_here = listening_address if hosts else meeting_address
    return address_here(environment.main_address, environment.other_node)


def own_address(endpoint_host: str) -> str:
    """Return the address at which this node listens for those that meet at an endpoint.

    Raises:
        ConfigurationError: when that is not known, or leads nowhere.
    """
    return listening_address(endpoint_host, None)


def interface_of(ranks: RankInfo, address: tuple[str, int] | None) -> str | None:
    """Return the interface that gloo is to use: loopback on one node, else the one toward rank 0's.

    None where that is not known.
    """
    if ranks.is_one_node:
        return interface_toward(LOOPBACK)
    return None if address is None else interface_toward(address[0])


def _number_of(environment: NodesEnvironment, local_world_size: int, asked: int | None) -> int:
    per_node = environment.processes_per_node
    is_other = environment.has_num_nodes and asked not in (None, environment.num_nodes)
    if is_other or per_node not in (None, local_world_size):
        raise WorldSizeMismatchError(
            devices=local_world_size,
            num_nodes=asked or environment.num_nodes,
            launched_by=environment.name,
            world_size=environment.num_nodes * (per_node or local_world_size),
            variables=environment.seen(),
        )
    nodes = environment.num_nodes if environment.has_num_nodes else asked
    if nodes is None and environment.node_rank == 0:
        return 1  # a preset; whoever means several nodes says so
    if nodes is None or environment.node_rank >= nodes:
        raise ConfigurationError(
            message=f"This is node {environment.node_rank}, but "
            + ("nobody says of how many." if nodes is None else f"there are only {nodes}, from 0 up."),
            facts=", ".join(f"{name}={value}" for name, value in environment.seen().items()),
            remedy="Trainer(num_nodes=...), or NNODES, with the number of nodes; NODE_RANK counts from 0.",
        )
    return nodes


def _nobody_started_the_others(
    environment: ClusterEnvironment, local_world_size: int, num_nodes: int | None
) -> ConfigurationError:
    missing = ", ".join(NodesEnvironment.missing(os.environ))
    return ConfigurationError(
        message=f"num_nodes={num_nodes} is not possible here: nobody has started the other nodes.",
        facts=f"the environment is {environment.name!r}, which is one node; {missing or 'nothing'} not set "
        f"on {socket.gethostname()!r}.",
        remedy=f"start it on every node: torchrun --nnodes={num_nodes} --nproc-per-node={local_world_size} "
        "train.py; or by hand: NODE_RANK=0 MASTER_ADDR=<node 0's address> MASTER_PORT=29500 python train.py",
    )
