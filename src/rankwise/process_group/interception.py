"""Intercept this process's collectives before they run, whichever library calls them.

Interception covers calls through torch.distributed's Python side: its functions, however they were imported,
and what is built on them. It does not cover collectives that C++ starts itself (a reducer without a
communication hook).
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist

from rankwise.nested import walked
from rankwise.paths import path_in_package

# What must be the same on all ranks: the tensors at one position of the arguments, their dtype alone, or
# nothing. For each rule, the methods of a process group (newer and older names).
_WHOLE, _DTYPE, _NOTHING = "whole", "dtype", "nothing"
_RULES = {
    # of allgather and scatter the outputs: every rank has all of them, and only the root of a scatter inputs
    (_WHOLE, 0): "allreduce allreduce_coalesced broadcast reduce scatter allgather allgather_coalesced "
    "allgather_into_tensor_coalesced all_gather_single all_gather_single_coalesced _allgather_base",
    # the inputs: only the root of a gather has outputs
    (_WHOLE, 1): "gather reduce_scatter reduce_scatter_tensor_coalesced reduce_scatter_single "
    "reduce_scatter_single_coalesced _reduce_scatter_base",
    (_DTYPE, 0): "alltoall alltoall_base all_to_all_single",
    (_NOTHING, 0): "barrier monitored_barrier",
}
_METHODS = {name: rule for rule, names in _RULES.items() for name in names.split()}
# Functions of torch.distributed that DDP calls with a group and tensors.
_FUNCTIONS = dict.fromkeys(("_broadcast_coalesced", "_verify_params_across_processes"), (_WHOLE, 0))
_WRAPPERS = "torch.distributed.c10d_logger"  # around every function of torch.distributed
_BACKWARD = ("backward", "grad")  # of torch.autograd
# Modules between the user's call and the collective. Any other module of rankwise is reported as the caller.
_INNER_MODULES = (
    *("torch", "contextlib", "lightning_utilities", "rankwise.gradient_sync", "rankwise.nested"),
    *("rankwise.precision", "rankwise.process_group", "rankwise.strategies"),
)
_INNER_PREFIXES = tuple(f"{module}." for module in _INNER_MODULES)
_PACKAGE = __name__.partition(".")[0]
_MOST_TENSORS = 4


@final
class Call(NamedTuple):
    """A collective that is about to run."""

    group: dist.ProcessGroup
    name: str  # of torch's function that was called, or of the group's method
    what: str  # the collective, with its tensors, operation and root
    where: str  # the caller
    identity: str  # text that is the same on all ranks of the same collective
    is_users: bool = True  # whether the user's code calls it, also by `self.all_gather` of a module


Observer = Callable[[Call], None]

# Blocks of several threads may overlap: the last one to end restores torch's methods.
_lock = threading.Lock()
observers: list[Observer] = []  # of this process's collectives
_undo: list[Callable[[], None]] = []


@contextmanager
def intercepted(observer: Observer) -> Iterator[None]:
    """Call `observer` before each collective of this process, in its thread; its exceptions propagate.

    Mutates: methods of `torch.distributed.ProcessGroup`, and two functions of `torch.distributed`, until the
    block ends.
    """
    with _lock:
        if not observers:
            _wrap_all()
        observers.append(observer)
    try:
        yield
    finally:
        with _lock:
            observers.remove(observer)
            while _undo and not observers:
                _undo.pop()()


def own_calls_intercepted(observer: Observer, *, also_ours: bool = False) -> AbstractContextManager[None]:
    """Call `observer` before each collective that the user's code (with `also_ours`: rankwise's too) runs.

    Only collectives of this thread count. Enter the block in the thread that makes it.
    """
    thread = threading.get_ident()

    def observe(call: Call) -> None:
        if (also_ours or call.is_users) and threading.get_ident() == thread:
            observer(call)

    return intercepted(observe)


def _wrap_all() -> None:
    for owner, table in ((dist.ProcessGroup, _METHODS), (dist, _FUNCTIONS)):
        for name, rule in table.items():
            plain = vars(owner).get(name)  # not getattr: the undo must restore the raw attribute
            if plain is not None:
                setattr(owner, name, _observed(getattr(owner, name), name, rule))
                _undo.append(functools.partial(setattr, owner, name, plain))


def _observed(plain: Any, name: str, rule: tuple[str, int]) -> Any:
    def observed(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        if group.size() > 1:
            call = _call(group, name, rule, (*args, *kwargs.values()))
            for observer in tuple(observers):
                observer(call)
        return plain(group, *args, **kwargs)

    return observed


def call_from_here(group: dist.ProcessGroup, name: str) -> Call:
    """Describe the calling code as a collective of the given name."""
    _, where, _, _ = _caller(name, sys._getframe(1))
    return Call(group, name, name, where, f"{name} {where}")


def _call(group: dist.ProcessGroup, method: str, rule: tuple[str, int], args: tuple[Any, ...]) -> Call:
    amount, position = rule
    tensors = args[position] if amount != _NOTHING and position < len(args) else ()
    described = _described(tensors, whole=amount == _WHOLE)
    details, is_rooted = _details(method, args)
    name, where, where_without_line, is_users = _caller(method, sys._getframe(2))
    of = f" of {described}" if described else ""
    what = f"{name}{of}{f' ({details})' if details else ''}"
    # Code often branches on being the root, so for a collective with a root the line may differ.
    identity = f"{what} {where_without_line if is_rooted else where}"
    return Call(group, name, what, where, identity, is_users)


def _described(tensors: Any, *, whole: bool) -> str:
    """Return the dtypes and (if `whole`) shapes of tensors, which may be in nested lists."""
    flat = [item for item in walked(tensors) if isinstance(item, torch.Tensor)]
    if not whole:
        return ", ".join(dict.fromkeys(_dtype(tensor) for tensor in flat))
    shown = [f"{_dtype(tensor)}{list(tensor.shape)}" for tensor in flat]
    counts = {text: shown.count(text) for text in dict.fromkeys(shown)}
    texts = [text if count == 1 else f"{count} x {text}" for text, count in counts.items()]
    if len(texts) > _MOST_TENSORS:
        elements = sum(tensor.numel() for tensor in flat)
        texts[_MOST_TENSORS - 1 :] = [f"... ({len(flat)} tensors, {elements} elements)"]
    return ", ".join(texts)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _details(name: str, args: tuple[Any, ...]) -> tuple[str, bool]:
    """Return the reduction and the root, and whether there is one."""
    kinds = [getattr(getattr(options, "reduceOp", None), "op", None) for options in args]
    details = [str(kind).rpartition(".")[2].lower() for kind in kinds if kind is not None]
    has_root = name in ("broadcast", "reduce", "gather", "scatter")
    roots = [getattr(options, "rootRank", None) for options in args if has_root]
    named = [f"root {root}" for root in roots if root is not None]
    return ", ".join([*details, *named]), bool(named)


def _caller(name: str, frame: FrameType | None) -> tuple[str, str, str, bool]:
    """Return the function of torch.distributed that was called, and where, with and without the line.

    The last value is whether that is the user's code: not rankwise's, except a method that forwards a call.
    """
    is_torch, is_in_backward, module = True, False, ""
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if not f"{module}.".startswith(_INNER_PREFIXES):
            break
        is_torch = is_torch and module.startswith("torch.distributed")
        if is_torch and module != _WRAPPERS:
            name = frame.f_code.co_name
        is_in_backward |= module.startswith("torch.autograd") and frame.f_code.co_name in _BACKWARD
        frame = frame.f_back
    if frame is None:  # in a thread of C++
        return name, "in a backward pass", "in a backward pass", False
    filename = frame.f_code.co_filename
    file = path_in_package(filename) or Path(filename).name  # folders of the user's differ between ranks
    at = f"{'in the backward pass ' if is_in_backward else ''}at {file}"
    function = f" in {frame.f_code.co_name}"
    is_users = module.partition(".")[0] != _PACKAGE or frame.f_code.co_name in ("all_gather", "all_reduce")
    return name, f"{at}:{frame.f_lineno}{function}", f"{at}{function}", is_users
