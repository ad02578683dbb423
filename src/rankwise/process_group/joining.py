"""Let a program that creates and destroys its own process group run in a job that has created it."""

from __future__ import annotations

import inspect
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch.distributed as dist

from rankwise.errors import ProcessGroupError
from rankwise.ranks import warn

# Arguments of `init_process_group` that say how to create a group; this group exists already.
_OF_RENDEZVOUS = ("backend", "init_method", "rank", "world_size", "store", "group_name", "device_id")


@final
@dataclass(eq=False)
class _JobGroup:
    """The default group of a job, and the number of programs' calls that have joined it and not left."""

    num_joined: int = 0


_lock = threading.Lock()
_groups: list[_JobGroup] = []  # the last one is the innermost job's
_plain: dict[str, Callable[..., Any]] = {}  # torch's functions by name, while others stand in for them


@contextmanager
def group_joinable() -> Iterator[None]:
    """Make torch's `init_process_group` join the default group in the block, and its counterpart leave it.

    Programs import these functions in any way and at any time, so their code is replaced, not their names.
    Where that is not possible torch refuses a second group, as it does by itself.

    Mutates: the two functions, until the block ends.
    """
    group = _JobGroup()
    with _lock:
        if not _groups:
            _replace()
        _groups.append(group)
    try:
        yield
    finally:
        with _lock:
            _groups.remove(group)
            if not _groups:
                _restore()


def count_joined() -> None:
    """Count a call that has found the default group of this process's job, for the call that ends it."""
    for group in _groups[-1:]:
        group.num_joined += 1


def create_or_join(*args: Any, **kwargs: Any) -> None:
    """Do what torch's `init_process_group` does, or join the job's group if there is one.

    Raises:
        ProcessGroupError: when the job's group has another back end, rank or size.
    """
    plain = _plain["init_process_group"]
    if not dist.is_initialized():
        plain(*args, **kwargs)
        return
    signature = inspect.signature(plain)
    given = {
        name: value
        for name, value in signature.bind(*args, **kwargs).arguments.items()
        if value != signature.parameters[name].default
    }
    _check(given)
    if unused := [name for name in given if name not in _OF_RENDEZVOUS]:
        warn(
            f"init_process_group() joins the job's process group, which cannot take {', '.join(unused)}. "
            "Pass timeout= to the strategy, or leave the group to the program: "
            "strategy.launch(function, init_process_group=False).",
        )
    count_joined()


def destroy_or_leave(*args: Any, **kwargs: Any) -> None:
    """Do what torch's `destroy_process_group` does; for the job's group that was joined only count it."""
    plain = _plain["destroy_process_group"]
    of = inspect.signature(plain).bind(*args, **kwargs).arguments.get("group")
    joined = [group for group in _groups[-1:] if group.num_joined]
    if not joined or not dist.is_initialized() or (of is not None and of is not dist.group.WORLD):
        plain(*args, **kwargs)
        return
    joined[0].num_joined -= 1


def _check(given: dict[str, Any]) -> None:
    """Raise unless the job's group is the one that a program asks for."""
    backends = (dist.get_backend(), dist.get_backend_config())
    asked = given.get("backend")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    differing = [f"backend={asked!r}"] if asked and str(asked).lower() not in backends else []
    for name, own in (("rank", rank), ("world_size", world_size)):
        if given.get(name, own) != own:
            differing.append(f"{name}={given[name]!r}")
    if differing:
        raise ProcessGroupError(
            f"init_process_group({', '.join(differing)}) contradicts the process group of the job, which has "
            f"back end {backends[0]!r}, and in which this process is rank {rank} of {world_size}.",
            "strategy.launch(function, init_process_group=False) leaves the group to the program.",
        )


def _init(*args: Any, **kwargs: Any) -> None:
    from rankwise.process_group.joining import create_or_join

    create_or_join(*args, **kwargs)


def _destroy(*args: Any, **kwargs: Any) -> None:
    from rankwise.process_group.joining import destroy_or_leave

    destroy_or_leave(*args, **kwargs)


# Their code runs with torch's global names, so it imports what it needs.
_STAND_INS = {"init_process_group": _init, "destroy_process_group": _destroy}


def _replace() -> None:
    for name, stand_in in _STAND_INS.items():
        function = _innermost(name)
        if isinstance(function, types.FunctionType) and not function.__closure__:
            code, defaults = function.__code__, function.__defaults__
            plain = types.FunctionType(code, function.__globals__, name, defaults)
            plain.__kwdefaults__ = function.__kwdefaults__
            _plain[name] = plain
            function.__signature__ = inspect.signature(plain)  # type: ignore[attr-defined]  # for `inspect`
            function.__code__ = stand_in.__code__


def _restore() -> None:
    for name in list(_plain):
        function: Any = _innermost(name)
        function.__code__ = _plain.pop(name).__code__
        del function.__signature__


def _innermost(name: str) -> Any:
    """Return torch's function within the ones that log its calls."""
    return inspect.unwrap(getattr(dist.distributed_c10d, name))
