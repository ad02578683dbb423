"""Create, check and destroy the default process group, and let a program's own calls join and leave it."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import os
import socket
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist

from rankwise.checks import check_is_a, check_keywords
from rankwise.environments import ClusterEnvironment, detect_environment
from rankwise.environments.network import LOOPBACK, LOOPBACK_INTERFACE
from rankwise.errors import ConfigurationError, ProcessGroupError, UnknownNameError
from rankwise.process_group.authentication import groups_authenticated, key_of, refuse_unknown_torch
from rankwise.processes.fork_safety import import_functional
from rankwise.ranks import RankInfo, warn
from rankwise.stores.rendezvous import (
    RankIdentity,
    exclusive_device,
    find_restart,
    identity_of,
    run_rendezvous,
)
from rankwise.stores.sealed import NamedPrefixStore, job_key_of_environment, seal, unsealed
from rankwise.stores.tcp import open_store, seal_default_store

_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_RELEASE_S = 0.02
_SHORTEST_NAME = 2  # torch ignores a shorter value
# Arguments of torch's function that rankwise's own replace.
_NOT_OPTIONS = ("init_method", "world_size", "rank", "store", "device_id")
_LIGHTNINGS_NAMES = {
    "cluster_environment": "init_process_group(environment=...).",
    "torch_distributed_backend": 'init_process_group(backend="gloo").',
}
_BACKENDS = ("gloo", "nccl", "mpi", "ucc", "xccl")
_group_numbers = itertools.count()  # each group that this process creates has its own keys in the store


def init_process_group(
    environment: ClusterEnvironment | None = None,
    backend: str | None = None,
    global_rank: int | None = None,
    world_size: int | None = None,
    *,
    device: torch.device | None = None,
    timeout: timedelta = timedelta(minutes=10),
    init_timeout: timedelta = timedelta(minutes=2),
    **options: Any,
) -> RankInfo:
    """Create torch's default process group of the processes that `environment` describes.

    An existing group is used if it has these ranks and this back end; a job's group outlives the program's
    `destroy_process_group()`. A strategy creates its group itself; this function is for programs without one.
    They end the group with `torch.distributed.destroy_process_group()`, once no `DistributedDataParallel`
    object exists any more: torch may abort the process at its exit otherwise.

    Collective: every rank must call this.

    Args:
        environment: describes the job; by default the environment that is detected.
        backend: `"gloo"`, `"nccl"`, ...; by default NCCL on CUDA, gloo on the CPU, torch's own elsewhere.
        global_rank: instead of the environment's. On one node it is the local rank too.
        world_size: instead of the environment's.
        device: this rank's; by default the CUDA device of its local rank if there is one, else the CPU.
        timeout: how long a collective may take.
        init_timeout: how long to wait for the other ranks.
        options: for torch's function of this name, such as `pg_options`.

    Raises:
        ProcessGroupError (a RuntimeError): when torch has no distributed package, or the existing group has
            other ranks or another back end, or options are given for it.
        InvalidTypeError: for an environment of another class.
        UnknownArgumentError: for an option that torch's function does not take, or that is not the user's.
        InvalidArgumentError: for a rank or size that contradicts the environment.
        UnknownNameError, ConfigurationError: for a back end that does not exist.
        EnvironmentVariableError: when the environment's variables are wrong.
        RendezvousTimeoutError: when rank 0 cannot be reached in time.
    """
    _check_distributed_available()
    _check_options(options)
    environment = detect_environment().environment if environment is None else environment
    check_is_a("environment", environment, ClusterEnvironment)
    ranks = _ranks_in(environment, global_rank, world_size)
    if device is None:
        count = torch.cuda.device_count()
        device = torch.device("cuda", ranks.local_rank % count) if count else torch.device("cpu")
    backend = default_backend(device.type) if backend is None else check_backend(backend)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if dist.is_initialized():
        _check_existing(ranks, backend)
        if options:
            names = ", ".join(options)
            remedy = "destroy it first with torch.distributed.destroy_process_group(), or leave them out."
            raise ProcessGroupError(f"A process group exists, which cannot take {names}.", remedy)
        count_joined()
        return ranks
    if "gloo" in backend:
        check_interface()
    store = _open_environment_store(environment, ranks, init_timeout)
    with gloo_on_interface(LOOPBACK_INTERFACE if ranks.is_one_node else None):
        join_process_group(
            store, ranks, backend, device, timeout=timeout, init_timeout=init_timeout, options=options
        )
    return ranks


def _check_options(options: Mapping[str, Any]) -> None:
    own = inspect.signature(init_process_group).parameters
    known = set(inspect.signature(dist.init_process_group).parameters) - set(_NOT_OPTIONS)
    known |= {each.name for each in own.values() if each.kind is not each.VAR_KEYWORD}
    check_keywords("init_process_group()", options, known, _LIGHTNINGS_NAMES)


def _ranks_in(environment: ClusterEnvironment, global_rank: int | None, world_size: int | None) -> RankInfo:
    """Return the ranks in an environment; given values replace its own."""
    ranks = environment.ranks
    place = ranks.global_rank if global_rank is None else global_rank
    size = ranks.world_size if world_size is None else world_size
    if (place, size) == (ranks.global_rank, ranks.world_size):
        return ranks
    if ranks.is_one_node:
        return RankInfo(place, place, 0, size, size, 1)
    return dataclasses.replace(ranks, global_rank=place, world_size=size)


@contextmanager
def process_group(
    store: dist.Store,
    ranks: RankInfo,
    backend: str,
    device: torch.device,
    *,
    timeout: timedelta,
    init_timeout: timedelta | None = None,
    on_rendezvous: Callable[[tuple[RankIdentity, ...]], object] = lambda identities: None,
) -> Iterator[tuple[RankIdentity, ...]]:
    """Provide the default process group in the block; destroy it at the end unless it existed before.

    Collective: every rank must call this, in the same order.

    Arguments, yielded value and errors are the same as in `join_process_group`.
    """
    is_ours = not dist.is_initialized()
    identities = join_process_group(
        store, ranks, backend, device, timeout=timeout, init_timeout=init_timeout, on_rendezvous=on_rendezvous
    )
    try:
        with group_joinable() if is_ours else nullcontext():
            yield identities
    except BaseException:
        if is_ours and dist.is_initialized():
            _abort_nccl()
        raise
    finally:
        if is_ours and dist.is_initialized():
            destroy_groups()


def join_process_group(
    store: dist.Store,
    ranks: RankInfo,
    backend: str,
    device: torch.device,
    *,
    timeout: timedelta,
    init_timeout: timedelta | None = None,
    on_rendezvous: Callable[[tuple[RankIdentity, ...]], object] = lambda identities: None,
    options: Mapping[str, Any] | None = None,
) -> tuple[RankIdentity, ...]:
    """Create the default process group, or check that the existing one has these ranks and this back end.

    Collective: every rank must call this, in the same order.

    Args:
        store: the store that all ranks of the job use.
        ranks: this process's.
        backend: `"gloo"`, `"nccl"`, ...
        device: this rank's; a group on NCCL is bound to it.
        timeout: how long a collective may take.
        init_timeout: how long the rendezvous may take; None: as long as a collective.
        on_rendezvous: called with all identities after the rendezvous, before torch creates the group: that
            is a long call in C++, during which another rank may fail.
        options: further arguments for torch's function.

    Returns:
        Every rank's identity, by global rank; empty for a group that existed before.

    Raises:
        ProcessGroupError: when torch has no distributed package, the existing group differs, or the ranks'
            identities contradict each other.
        PeerAuthenticationError: when another process has taken a rank's place.
        RendezvousTimeoutError: when a rank is missing after `init_timeout`.
    """
    _check_distributed_available()
    if dist.is_initialized():
        _check_existing(ranks, backend)
        seal_default_store(key_of().secret)  # which authenticates the ranks
        return ()
    own = identity_of(ranks, exclusive_device(backend, device))
    limit = timeout if init_timeout is None else init_timeout
    identities = run_rendezvous(store, own, limit)
    on_rendezvous(identities)
    with groups_authenticated(None, limit):
        with _torch_state_kept():
            dist.init_process_group(
                backend,
                store=unsealed(store),
                rank=ranks.global_rank,
                world_size=ranks.world_size,
                timeout=timeout,
                device_id=device if device.type == "cuda" and "nccl" in backend else None,
                **(options or {}),
            )
        try:
            if torch.__version__ < "2.8":
                _drop_with(dist.group.WORLD)  # the program may destroy it by torch's function
            refuse_unknown_torch()
            seal_default_store(key_of().secret)
        except BaseException:
            destroy_groups()
            raise
    return identities


@contextmanager
def _torch_state_kept() -> Iterator[None]:
    """Undo what `init_process_group` leaves changed.

    torch wraps `sys.excepthook` on every call and never unwraps it. It also counts a group before creating
    it, and keeps the count if that fails; the count is part of the group's keys, so all ranks need the same.

    A module that is imported here takes the current default group as a default argument. If it were imported
    later, by the first `DistributedDataParallel`, it would keep this group and its threads until the
    interpreter ends, and a thread that then releases a tensor aborts the process.
    """
    import_functional()
    hook = sys.excepthook
    world = dist.distributed_c10d._world
    count = world.group_count
    try:
        yield
    except BaseException:
        world.group_count = count
        raise
    finally:
        sys.excepthook = hook


def _check_distributed_available() -> None:
    if not dist.is_available():
        raise ProcessGroupError("This build of torch has no torch.distributed.", "install one that has.")


def check_group_ranks(ranks: RankInfo) -> None:
    """Raise ProcessGroupError if a process group exists in which this process has other ranks."""
    if not dist.is_available() or not dist.is_initialized():
        return
    rank, size = dist.get_rank(), dist.get_world_size()
    if (rank, size) != (ranks.global_rank, ranks.world_size):
        raise ProcessGroupError(
            f"A process group exists in which this process is rank {rank} of {size}, but in the job it is "
            f"global_rank {ranks.global_rank} of {ranks.world_size}.",
            "destroy it first with torch.distributed.destroy_process_group(), or ask for its world size.",
        )


def _check_existing(ranks: RankInfo, backend: str) -> None:
    check_group_ranks(ranks)
    existing = dist.get_backend()
    if existing != backend:
        raise ProcessGroupError(
            f"A process group with back end {existing!r} exists, but the strategy asks for {backend!r}.",
            f"pass process_group_backend={existing!r}, or destroy the group first.",
        )


def _open_environment_store(
    environment: ClusterEnvironment, ranks: RankInfo, timeout: timedelta
) -> dist.Store:
    if ranks.world_size == 1:
        return dist.HashStore()
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # then torchrun's agent hosts it
    # The ranks of one node use loopback, whatever address they were given, unless an agent hosts the store.
    host = environment.main_address if is_agents or not ranks.is_one_node else LOOPBACK
    address = (host, environment.main_port)
    store = open_store(None, address, hosts=ranks.is_global_zero and not is_agents, timeout=timeout)
    restart = find_restart(address, store, ranks, timeout).number if is_agents else 0
    part = NamedPrefixStore(f"start{restart}/join{next(_group_numbers)}", store)
    return seal(part, job_key_of_environment())


def check_backend(name: Any) -> str:
    """Return a back end's name in torch's spelling.

    Raises:
        InvalidTypeError: when the name is not a string.
        UnknownNameError: when the name is neither built into torch nor registered as a plug-in.
        ConfigurationError: when this build of torch lacks the back end.
    """
    check_is_a("process_group_backend", name, str, "a name, such as 'gloo' or 'nccl'")
    spelled: str = name.lower()
    known = {str(backend).lower() for backend in dist.Backend.backend_list} - {"undefined"} | set(_BACKENDS)
    for part in spelled.split(","):
        backend = part.rpartition(":")[2]  # "cpu:gloo,cuda:nccl" names one for each device type
        if backend not in known:
            raise UnknownNameError(kind="process_group_backend", name=name, known=tuple(sorted(known)))
        if backend == "nccl" and not dist.is_nccl_available():
            raise ConfigurationError(
                message="process_group_backend='nccl' is not possible: this build of torch has no NCCL.",
                remedy="leave process_group_backend unset, or use 'gloo'.",
            )
    return spelled


def default_backend(device_type: str) -> str:
    """Return NCCL for CUDA, gloo for the CPU, and torch's own default elsewhere."""
    if device_type == "cuda":
        return "nccl" if dist.is_nccl_available() else "gloo"
    defaults: dict[str, str] = dist.Backend.default_device_backend_map
    return defaults.get(device_type, "gloo")


def check_interface() -> None:
    """Raise `ConfigurationError` if `GLOO_SOCKET_IFNAME` names an interface that this host does not have."""
    wanted = os.environ.get(_GLOO_INTERFACE, "")
    if len(wanted) < _SHORTEST_NAME:
        return
    known = [name for _, name in socket.if_nameindex()]
    if not {*wanted.split(",")} <= {*known}:
        raise ConfigurationError(
            message=f"{_GLOO_INTERFACE}={wanted!r} names no network interface of {socket.gethostname()!r}.",
            facts=f"it has {', '.join(known)}.",
            remedy=f"unset {_GLOO_INTERFACE}, or name one of them, or several with commas between them.",
        )


@contextmanager
def gloo_on_interface(name: str | None) -> Iterator[None]:
    """Restrict the gloo groups that are created in the block to one network interface; None: no restriction.

    Mutates: `os.environ["GLOO_SOCKET_IFNAME"]`, restored on exit; unchanged where the user has set it.
    """
    if name is None or _GLOO_INTERFACE in os.environ:
        yield
        return
    os.environ[_GLOO_INTERFACE] = name
    try:
        yield
    finally:
        os.environ.pop(_GLOO_INTERFACE, None)


def _abort_nccl() -> None:
    """Abort NCCL's operations: after a failure, destroying the group would wait for other ranks."""
    for group in list(dist.distributed_c10d._world.pg_map):
        if "nccl" in dist.get_backend(group):
            group._get_backend(torch.device("cuda")).abort()


def destroy_groups() -> None:
    """Destroy all process groups, without a gloo thread joining itself.

    A gloo group joins its threads when its last reference is dropped. One of these threads runs the callbacks
    of futures, such as communication hooks, and drops them after the waiting thread has continued. If such a
    callback holds the last reference to the group, the thread joins itself, which aborts the process.
    """
    for group in list(dist.distributed_c10d._world.pg_map):
        _drop_with(group)
    dist.destroy_process_group()


def _drop_with(group: Any) -> None:
    """Keep a group's back ends, which own the threads, until the group is dropped: any thread may do that."""
    backends = [group._get_backend(device_type) for device_type in group._device_types]
    weakref.finalize(group, _drop_backends, backends).atexit = False


def _drop_backends(backends: list[Any]) -> None:
    """Release the back ends."""
    if torch.__version__ < "2.8":
        # The caller holds Python's global lock while it joins the threads. One may wait for that lock to
        # release its last tensor: the threads get a moment for it.
        time.sleep(_RELEASE_S)
    if not isinstance(threading.current_thread(), threading._DummyThread):
        backends.clear()
    else:  # possibly one of the threads that would be joined; Python waits for the new one before it exits
        threading.Thread(target=backends.clear, name="rankwise-destroy-group").start()


# ------------------------------------------------------------------ programs that create a group in a job

# Arguments of `init_process_group` that say how to create a group; this group exists already.
_OF_RENDEZVOUS = ("backend", "init_method", "rank", "world_size", "store", "group_name", "device_id")


@final
@dataclass(eq=False)
class _JobGroup:
    """The default group of a job, and the number of programs' calls that have joined it and not left."""

    num_joined: int = 0


_joinable_lock = threading.Lock()
_job_groups: list[_JobGroup] = []  # the last one is the innermost job's
# Torch's functions by name, while others stand in for them.
_plain_functions: dict[str, Callable[..., Any]] = {}


@contextmanager
def group_joinable() -> Iterator[None]:
    """Make torch's `init_process_group` join the default group in the block, and its counterpart leave it.

    Programs import these functions in any way and at any time, so their code is replaced, not their names.
    Where that is not possible torch refuses a second group, as it does by itself.

    Mutates: the two functions, until the block ends.
    """
    group = _JobGroup()
    with _joinable_lock:
        if not _job_groups:
            _replace()
        _job_groups.append(group)
    try:
        yield
    finally:
        with _joinable_lock:
            _job_groups.remove(group)
            if not _job_groups:
                _restore()


def count_joined() -> None:
    """Count a call that has found the default group of this process's job, for the call that ends it."""
    for group in _job_groups[-1:]:
        group.num_joined += 1


def create_or_join(*args: Any, **kwargs: Any) -> None:
    """Do what torch's `init_process_group` does, or join the job's group if there is one.

    Raises:
        ProcessGroupError: when the job's group has another back end, rank or size.
    """
    plain = _plain_functions["init_process_group"]
    if not dist.is_initialized():
        plain(*args, **kwargs)
        return
    signature = inspect.signature(plain)
    given = {
        name: value
        for name, value in signature.bind(*args, **kwargs).arguments.items()
        if value != signature.parameters[name].default
    }
    _check_asked(given)
    if unused := [name for name in given if name not in _OF_RENDEZVOUS]:
        warn(
            f"init_process_group() joins the job's process group, which cannot take {', '.join(unused)}. "
            "Pass timeout= to the strategy, or leave the group to the program: "
            "strategy.launch(function, init_process_group=False).",
        )
    count_joined()


def destroy_or_leave(*args: Any, **kwargs: Any) -> None:
    """Do what torch's `destroy_process_group` does; for the job's group that was joined only count it."""
    plain = _plain_functions["destroy_process_group"]
    of = inspect.signature(plain).bind(*args, **kwargs).arguments.get("group")
    joined = [group for group in _job_groups[-1:] if group.num_joined]
    if not joined or not dist.is_initialized() or (of is not None and of is not dist.group.WORLD):
        plain(*args, **kwargs)
        return
    joined[0].num_joined -= 1


def _check_asked(given: dict[str, Any]) -> None:
    """Raise unless the job's group is the one that a program asks for."""
    backends = (dist.get_backend(), dist.get_backend_config())
    asked = given.get("backend")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    differing = [f"backend={asked!r}"] if asked and str(asked).lower() not in backends else []
    own = {"rank": rank, "world_size": world_size}
    differing += [f"{name}={given[name]!r}" for name in own if given.get(name, own[name]) != own[name]]
    if differing:
        raise ProcessGroupError(
            f"init_process_group({', '.join(differing)}) contradicts the process group of the job, which has "
            f"back end {backends[0]!r}, and in which this process is rank {rank} of {world_size}.",
            "strategy.launch(function, init_process_group=False) leaves the group to the program.",
        )


# Run as the code of torch's functions, with torch's globals: hence the imports of this very module.
def _init(*args: Any, **kwargs: Any) -> None:
    from rankwise.process_group.group import create_or_join

    create_or_join(*args, **kwargs)


def _destroy(*args: Any, **kwargs: Any) -> None:
    from rankwise.process_group.group import destroy_or_leave

    destroy_or_leave(*args, **kwargs)


_STAND_INS = {"init_process_group": _init, "destroy_process_group": _destroy}


def _replace() -> None:
    for name, stand_in in _STAND_INS.items():
        function = _innermost(name)
        if isinstance(function, types.FunctionType) and not function.__closure__:
            code, defaults = function.__code__, function.__defaults__
            plain = types.FunctionType(code, function.__globals__, name, defaults)
            plain.__kwdefaults__ = function.__kwdefaults__
            _plain_functions[name] = plain
            function.__signature__ = inspect.signature(plain)  # type: ignore[attr-defined]  # for `inspect`
            function.__code__ = stand_in.__code__


def _restore() -> None:
    for name in list(_plain_functions):
        function: Any = _innermost(name)
        function.__code__ = _plain_functions.pop(name).__code__
        del function.__signature__


def _innermost(name: str) -> Any:
    """Return torch's function within the ones that log its calls."""
    return inspect.unwrap(getattr(dist.distributed_c10d, name))
