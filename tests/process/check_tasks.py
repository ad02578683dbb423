"""What the tests of `check_collectives` run on each rank: importable, so that spawned workers find it."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rankwise.errors import CollectiveMismatchError, LifecycleError
from rankwise.process_group.interception import Call, intercepted
from rankwise.ranks import rank_zero_only
from rankwise.strategies import DDPStrategy

all_reduce_by_its_own_name = dist.all_reduce


def error_text(call: Callable[[], Any], kind: type[Exception] = CollectiveMismatchError) -> str:
    """Return the text of the error that a call ends in."""
    try:
        call()
    except kind as error:
        return str(error)
    return "no error"


def mismatches(strategy: DDPStrategy) -> dict[str, str]:
    """Make one mistake after another; return this rank's error text for each."""
    rank = strategy.global_rank
    is_zero = rank == 0
    x, sizes = torch.ones(4), [torch.ones(size) for size in range(6)]
    dtype, operation = [(torch.float32, dist.ReduceOp.SUM), (torch.int64, dist.ReduceOp.MAX)][rank]
    found = {
        "kind": error_text(lambda: dist.broadcast(x, 0) if is_zero else dist.all_reduce(x)),
        "shape": error_text(lambda: dist.all_reduce(torch.ones(3 + rank))),
        "dtype": error_text(lambda: strategy.all_reduce(torch.ones(2, dtype=dtype))),
        "operation": error_text(lambda: dist.all_reduce(x, op=operation)),
        "root": error_text(lambda: dist.broadcast(x, src=rank)),
        "by its own name": error_text(lambda: all_reduce_by_its_own_name(x) if is_zero else dist.barrier()),
        "many": error_text(lambda: dist.all_gather(sizes, x) if is_zero else dist.barrier()),
        "objects": error_text(lambda: dist.all_gather_object([None, None], 1) if is_zero else dist.barrier()),
    }
    if is_zero:
        found["order"] = error_text(lambda: dist.all_reduce(x))
    else:
        found["order"] = error_text(lambda: dist.all_reduce(x))
    pair = dist.new_group([0, 1])
    found["subgroup"] = error_text(lambda: dist.all_reduce(torch.ones(1 + rank), group=pair, async_op=True))
    found["afterwards"] = f"{error_text(lambda: dist.all_reduce(x))}: {x.tolist()}"
    return found


def no_mismatches(strategy: DDPStrategy) -> list[list[float]]:
    """Call matching collectives, in branches for the root and the others too, and on several groups."""
    x, y = torch.ones(2), torch.full((2,), float(strategy.global_rank))
    if strategy.is_global_zero:
        dist.broadcast(x + 1, 0)
    else:
        dist.broadcast(x, 0)
    dist.all_reduce(y)
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    works = [dist.all_reduce(torch.ones(2), group=group, async_op=True) for group in groups]
    for work in works:
        work.wait()
    strategy.barrier("here")
    dist.all_to_all_single(torch.zeros(2), torch.ones(2))
    return [x.tolist(), y.tolist()]


def sends_among_collectives(strategy: DDPStrategy) -> tuple[list[float], str]:
    """Send in every way of torch between collectives; return what came, and the text of a mistake."""
    rank, peer = strategy.global_rank, 1 - strategy.global_rank
    own = torch.full((2,), 1.0 + rank)
    total, *got = (torch.zeros(2) for _ in range(4))
    dist.all_reduce(total)
    for sender in range(2):
        dist.send(own, peer) if rank == sender else dist.recv(got[0], peer)
    work = dist.all_reduce(total.copy_(own), async_op=True)
    both = [dist.isend(own, peer), dist.irecv(got[1], peer)]
    for each in (*both, work):
        each.wait()
    dist.barrier()
    in_a_batch = [dist.P2POp(dist.irecv, got[2], peer), dist.P2POp(dist.isend, own, peer)]
    for each in dist.batch_isend_irecv(in_a_batch):
        each.wait()
    objects: list[Any] = [5.0] if rank == 0 else [0.0]
    # The only one that sends: nothing is alike here.
    dist.send_object_list(objects, 1) if rank == 0 else dist.recv_object_list(objects, 0)
    came = [*total.tolist(), *torch.cat(got).tolist(), *objects]
    return came, error_text(lambda: dist.all_reduce(torch.ones(1 + rank)))


def buckets(strategy: DDPStrategy) -> list[str]:
    """Call something else while the other rank averages gradients, in the first, second and third step."""
    found = []
    for steps in range(3):
        torch.manual_seed(1)
        wrapped = strategy.setup_module(nn.Linear(3, 2))

        def step(wrapped: nn.Module = wrapped) -> None:
            strategy.backward(wrapped(torch.ones(2, 3)).sum())

        for _ in range(steps):
            step()
        # as many elements of the same dtype: without the check these would pair up silently
        found.append(error_text(step if strategy.is_global_zero else lambda: dist.all_reduce(torch.ones(8))))
    return found


def leave_early(strategy: DDPStrategy, *, from_subgroup: bool) -> None:
    """Let rank 0 return while rank 1 waits for it."""
    group = dist.new_group([0, 1]) if from_subgroup else None
    if not strategy.is_global_zero:
        dist.all_reduce(torch.ones(1), group=group)


def come_late(strategy: DDPStrategy) -> None:
    """Let rank 1 do something else for longer than the timeout."""
    dist.all_reduce(torch.ones(2))
    if strategy.global_rank == 1:
        time.sleep(30.0)
    dist.barrier()


def in_sections(strategy: DDPStrategy) -> dict[str, str]:
    """Call collectives that the other rank never calls; return this rank's error texts."""
    found: dict[str, str] = {}
    x = torch.ones(2)

    def attempt(name: str, call: Callable[[], Any]) -> None:
        if strategy.is_global_zero:
            found[name] = error_text(call, LifecycleError)

    if strategy.check_collectives:
        rank_zero_only(attempt)("torch's in a function", lambda: dist.all_reduce(x))
    with strategy.rank_zero_first():
        attempt("ours in a block", strategy.barrier)
        attempt("torch's in a block", lambda: dist.all_reduce(x))
    alone = [dist.new_group([rank]) for rank in range(2)][strategy.global_rank]
    with strategy.rank_zero_first(local=True):
        attempt("ours in a node's block", strategy.barrier)
        strategy.all_reduce(x, group=alone)
    strategy.barrier()
    return found


def every_collective(strategy: DDPStrategy) -> dict[str, list[str]]:
    """Call each collective of torch.distributed that gloo has; return what was seen of each."""
    size, x = strategy.world_size, torch.ones(2)
    parts = [torch.zeros(2) for _ in range(size)]
    is_zero = strategy.is_global_zero
    # By the name that this version of torch does not warn of.
    gather_into_one = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(x),
        "broadcast": lambda: dist.broadcast(x, 0),
        "reduce": lambda: dist.reduce(x, 0),
        "all_gather": lambda: dist.all_gather(parts, x),
        "gather": lambda: dist.gather(x, parts if is_zero else None, 0),
        "scatter": lambda: dist.scatter(x, parts if is_zero else None, 0),
        "reduce_scatter": lambda: dist.reduce_scatter(torch.zeros(2), parts),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.zeros(2), torch.ones(2)),
        "barrier": dist.barrier,
        "monitored_barrier": dist.monitored_barrier,
        "all_gather_object": lambda: dist.all_gather_object([None] * size, 1),
        "gather_object": lambda: dist.gather_object(1, [None] * size if is_zero else None, 0),
        "broadcast_object_list": lambda: dist.broadcast_object_list([1], 0),
        "scatter_object_list": lambda: dist.scatter_object_list([None], [1] * size if is_zero else None, 0),
        "single": lambda: gather_into_one(torch.zeros(2 * size), torch.ones(2)),
    }
    found = {}
    for name, call in calls.items():
        seen: list[Call] = []
        with intercepted(seen.append):
            try:
                call()
            except RuntimeError as error:
                if "does not support" not in str(error):  # gloo of torch 2.6 has no reduce_scatter
                    raise
        found[name] = [each.what for each in seen]
    return found
