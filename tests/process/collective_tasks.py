"""What the ranks of the collectives' tests run; each returns what its test compares."""

import array
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rankwise import DDPStrategy
from rankwise.environments import LocalEnvironment, PlainEnvironment
from rankwise.process_group import (
    AllGatherGrad,
    all_gather,
    all_gather_ddp_if_available,
    all_gather_object,
    all_reduce,
    barrier,
    broadcast,
    gather_all_tensors,
    gather_object,
    init_process_group,
    sync_ddp,
    sync_ddp_if_available,
)
from rankwise.process_group.group import destroy_groups

WORLD = 3
CPU = torch.device("cpu")
LARGE = 3000  # float32: more bytes than travel with the description


def all_scenarios(strategy: DDPStrategy) -> dict[str, Any]:
    """Run every scenario on this rank."""
    rank = strategy.global_rank
    torch.manual_seed(rank)
    return {
        "reduced": reduce_everything(rank),
        "gathered": gather_everything(rank),
        "strategy": gather_with(strategy),
        "exact": reduce_exactly(rank),
        "numbers": reduce_numbers(strategy),
        "dataclasses": use_dataclasses(strategy),
        "refused": refused_values(strategy),
        "derivatives": derivatives_of_gathered(rank),
        "gradient": gradient_of_gathered(rank),
        "shapes": gather_shapes(rank),
        "counts": count_collectives(rank),
        "mismatches": mismatches(rank),
        "objects": objects(rank),
        "subgroup": in_a_subgroup(rank),
        "existing": existing_group(strategy),
        "first": rank_zero_goes_first(strategy),
        "per_node": rank_zero_goes_first(strategy, local=True),
        "first_failed": rank_zero_fails(strategy, OSError("disk full")),
        "first_failed_oddly": rank_zero_fails(strategy, OSError("no data-\udcff.bin")),
    }


def reduce_everything(rank: int) -> dict[str, Any]:
    """Reduce floats, integers and booleans with every operation."""
    value = torch.tensor([rank + 1.0, 2.0])
    whole, flag = torch.tensor(rank, dtype=torch.uint8) + 254 // WORLD, torch.tensor(rank == 0)
    nested = all_reduce({"a": value, "b": [value.int(), "text", None]}, reduce_op="sum")
    results = {
        name: all_reduce(value, None, name) for name in ("sum", "Mean", "AVG", "min", "MAX", "product")
    }
    return {
        **results,
        "input": value,
        "whole": all_reduce(whole),
        "flags": [all_reduce(flag, None, name) for name in ("sum", "mean", "min", "max")],
        "nested": nested,
        "text": all_reduce("text"),
        "sync_ddp": [
            sync_ddp(value),
            sync_ddp(value, reduce_op="mean"),
            sync_ddp(value, reduce_op=dist.ReduceOp.MAX),
        ],
        "sync_ddp_if_available": sync_ddp_if_available(value, reduce_op="avg"),
        "strided": all_reduce(torch.arange(6.0).reshape(2, 3).t(), None, "sum"),
    }


def gather_everything(rank: int) -> dict[str, Any]:
    """Gather tensors of one shape, nested ones too."""
    return {
        "plain": all_gather(torch.full((2, 1), float(rank))),
        "scalar": all_gather_ddp_if_available(torch.tensor(rank)),
        "nested": all_gather({"a": (torch.tensor([rank]), "text")}),
        "strided": all_gather(torch.arange(6.0).reshape(2, 3).t() + rank)[rank],
    }


ODD_DTYPES = (torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e5m2)
"""Those that gloo does not send."""


def gather_with(strategy: DDPStrategy) -> dict[str, Any]:
    """Gather numbers, arrays and odd dtypes."""
    rank = strategy.global_rank
    mixed = {"a": rank, "b": [rank + 0.1, "text"], "c": rank == 0, "d": np.full((2, 1), rank)[::-1]}
    return {
        "mixed": strategy.all_gather(mixed),
        "odd": [all_gather(torch.tensor([[1, rank]]).to(dtype)) for dtype in ODD_DTYPES],
        "scalar": all_gather(torch.tensor(rank, dtype=torch.int16)),
    }


def reduce_exactly(rank: int) -> dict[str, Any]:
    """Reduce values whose sum, or whose part of a sum, the dtype cannot hold; and dtypes that gloo lacks."""
    large = torch.tensor((4e4, 4e4, -4e4)[rank], dtype=torch.half)
    return {
        "mean": all_reduce(torch.tensor(4e4, dtype=torch.half)),
        "sum": all_reduce(large, None, "sum"),
        "bfloat16": all_reduce(torch.tensor((256.0, 1.0, 1.0)[rank], dtype=torch.bfloat16), None, "sum"),
        "bytes": all_reduce(torch.tensor(200, dtype=torch.uint8), None, "sum"),
        "int16": sync_ddp(torch.full((2,), rank, dtype=torch.int16)),
        "odd": [all_reduce(torch.tensor(rank).to(dtype), None, "max") for dtype in ODD_DTYPES],
        "uint64": all_reduce(torch.tensor((2**63 + 5, 1, 7)[rank], dtype=torch.uint64), None, "max"),
    }


def reduce_numbers(strategy: DDPStrategy) -> dict[str, Any]:
    """Reduce what is not a tensor, with names, torch's operations and None."""
    rank = strategy.global_rank
    everything = {"a": rank, "b": (rank + 0.5, np.array([rank, 1.0])), "c": np.float32(rank), "d": None}
    operations = (None, "mean", dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp(dist.ReduceOp.PRODUCT))
    refused = ""
    try:
        strategy.all_reduce(1, reduce_op=dist.ReduceOp.BAND)
    except ValueError as error:
        refused = str(error)
    return {
        "sum": sync_ddp(everything),
        "float": sync_ddp(3.0),
        "mean": all_reduce(3),
        "least": all_reduce(rank == 0, None, "min"),
        "operations": [strategy.all_reduce(torch.tensor(rank + 1.0), reduce_op=each) for each in operations],
        "refused": refused,
    }


@dataclass(frozen=True)
class Measured:
    """What a step may return: tensors and numbers, nested, beside other values."""

    loss: Tensor
    counts: tuple[int, ...]
    inner: Any = None
    name: str = "train"
    total: float = field(init=False, default=1.0)


def use_dataclasses(strategy: DDPStrategy) -> dict[str, Any]:
    """Reduce and gather frozen dataclasses."""
    rank = strategy.global_rank
    value = Measured(torch.tensor([rank + 1.0]), (rank,), [Measured(torch.tensor(rank), ())])
    return {"reduced": strategy.all_reduce(value, reduce_op="sum"), "gathered": strategy.all_gather(value)}


class Holder:
    """Holds a tensor in an attribute."""

    def __init__(self) -> None:
        self.tensor = torch.ones(1)


def refused_values(strategy: DDPStrategy) -> list[str]:
    """Give collectives what they cannot reduce or gather; return each error's text."""
    odd: list[Any] = [
        *({1.0, 2.0}, Holder(), Fraction(1, 2), iter([1.0]), range(2), torch.Size([2]), 2**70),
        *(torch.eye(2).to_sparse(), torch.ones(2, device="meta"), torch.ones(1).expand(2)[None].to_mkldnn()),
        *(
            np.array([None]),
            np.array(["text"]),
            np.ma.array([1.0, 2.0], mask=[False, True]),
            array.array("d", [1]),
        ),
    ]
    texts = []
    for value in odd:
        for call in (strategy.all_reduce, strategy.all_gather):
            try:
                call({"loss": torch.ones(1), "odd": [value]})
            except TypeError as error:
                texts.append(f"{type(error).__name__}: {error}")
            else:
                texts.append(f"{call.__name__} took {value!r}")
    return texts


def derivatives_of_gathered(rank: int) -> list[float]:
    """Return the first three derivatives of the sum over the ranks of `sum(x ** 4)`, for this rank's x."""
    x = torch.tensor(rank + 1.0, dtype=torch.float64, requires_grad=True)
    value = (AllGatherGrad.apply(x * x) ** 2).sum()  # type: ignore[no-untyped-call]  # torch does not type it
    found = []
    for _ in range(3):
        (value,) = torch.autograd.grad(value, x, create_graph=True)  # summed over the ranks' values
        found.append(value.item() / WORLD)
    return found


def weights_and_inputs(rank: int) -> tuple[Tensor, Tensor]:
    """Return the same weights on every rank, and the rank's own inputs."""
    generator = torch.Generator().manual_seed(5)
    weights = torch.randn(4, 3, dtype=torch.float64, generator=generator)
    inputs = torch.randn(WORLD, 2, 4, dtype=torch.float64, generator=generator)
    return weights, inputs[rank]


def loss_of(everything: Tensor, rank: int) -> Tensor:
    """Return a rank's loss, in which every slice has another part."""
    coefficients = torch.linspace(-1, 1, everything.numel(), dtype=torch.float64).reshape(everything.shape)
    return ((everything * coefficients).sum() * (rank + 1)).tanh() + (everything**2)[rank].sum()


def gradient_of_gathered(rank: int) -> Tensor:
    """Return the gradient of the sum of all ranks' losses, of all ranks' outputs, for the weights."""
    weights, inputs = weights_and_inputs(rank)
    weights.requires_grad_()
    loss_of(all_gather(inputs @ weights, sync_grads=True), rank).backward()
    assert weights.grad is not None
    return all_reduce(weights.grad, None, "sum")


def shape_of(rank: int, kind: str) -> tuple[int, ...]:
    """Return the shape of a rank's tensor."""
    shapes = {
        "scalar": (),
        "even": (2, 3),
        "uneven": (rank + 1, 3 - rank),
        "large": (LARGE + rank, 2),
        "empty": (rank * LARGE,),
    }
    return shapes[kind]


def tensor_of(rank: int, kind: str, dtype: torch.dtype) -> Tensor:
    """Return a rank's tensor."""
    shape = shape_of(rank, kind)
    numbers = torch.arange(torch.Size(shape).numel()).reshape(shape) * (rank + 1)
    return (numbers % 2 == 0) if dtype is torch.bool else (numbers % 120).to(dtype)


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.int64, torch.bool, torch.complex64)
KINDS = ("scalar", "even", "uneven", "large", "empty")


def gather_shapes(rank: int) -> dict[str, list[Tensor]]:
    """Gather tensors of every kind and dtype."""
    found = {}
    for dtype in DTYPES:
        for kind in KINDS:
            mine = tensor_of(rank, kind, dtype)
            found[f"{kind} {dtype}"] = gather_all_tensors(mine.t() if mine.ndim == 2 else mine)
    return found


@contextlib.contextmanager
def counted() -> Iterator[list[str]]:
    """Count the calls of torch's collectives in the block."""
    names = ("all_gather", "all_reduce", "barrier", "broadcast", "gather", "isend", "irecv")
    before, calls = {name: getattr(dist, name) for name in names}, []

    def counting(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return before[name](*args, **kwargs)

        return call

    for name in names:
        setattr(dist, name, counting(name))
    try:
        yield calls
    finally:
        for name, function in before.items():
            setattr(dist, name, function)


@contextlib.contextmanager
def without_gloo() -> Iterator[None]:
    """Make torch report another back end for the group."""
    before = dist.get_backend
    dist.get_backend = lambda group=None: dist.Backend("mpi")
    try:
        yield
    finally:
        dist.get_backend = before


def count_collectives(rank: int) -> dict[str, list[str]]:
    """Return the collectives of a small gather, of a large one and of a reduction."""
    counts = {}
    for kind in ("scalar", "uneven", "large"):
        with counted() as calls:
            gather_all_tensors(tensor_of(rank, kind, torch.float32))
        counts[kind] = calls
    with counted() as calls:
        sync_ddp(torch.ones(1))
    with counted() as otherwise, without_gloo():
        found = gather_all_tensors(tensor_of(rank, "large", torch.float32))
    for other in range(WORLD):
        torch.testing.assert_close(found[other], tensor_of(other, "large", torch.float32), rtol=0, atol=0)
    return {**counts, "sync_ddp": calls, "large, otherwise": otherwise}


def mismatches(rank: int) -> list[str]:
    """Give gather_all_tensors what does not go together; return each error's text."""
    odd: list[Any] = [
        torch.ones(2, 2) if rank == 1 else torch.ones(4),
        torch.ones(4, dtype=torch.float64 if rank == 1 else torch.int64),
        [1] if rank == 1 else torch.ones(4),
        torch.ones(2, 2).to_sparse() if rank == 2 else torch.ones(2, 2),
    ]
    texts = []
    for value in odd:
        try:
            gather_all_tensors(value)
        except ValueError as error:
            texts.append(f"{type(error).__name__}: {error}")
    return texts


def objects(rank: int) -> dict[str, Any]:
    """Gather what is picklable, on all ranks and on one."""
    return {"all": all_gather_object({"rank": rank}), "one": gather_object(("x" * rank, rank), dst=1)}


def _is_refused(call: Callable[[], Any]) -> bool:
    try:
        call()
    except ValueError:
        return True
    return False


def in_a_subgroup(rank: int) -> dict[str, Any]:
    """Use every collective among ranks 0 and 2; on rank 1 it is an error."""
    pair = dist.new_group([0, 2])
    assert isinstance(pair, dist.ProcessGroup) or rank == 1
    if rank == 1:
        calls: list[Callable[[], Any]] = [
            lambda: all_reduce(torch.ones(1), pair),
            lambda: all_gather(torch.ones(1), pair),
            lambda: broadcast(rank, 0, pair),
            lambda: barrier(pair),
        ]
        return {"refused": [_is_refused(call) for call in calls]}
    x = torch.ones(1, requires_grad=True)
    all_gather(x * rank, pair, sync_grads=True).sum().backward()
    return {
        "reduced": all_reduce(torch.tensor(rank + 1.0), pair, "sum"),
        "gathered": all_gather(torch.tensor(rank), pair),
        "tensors": gather_all_tensors(torch.ones(rank), pair),
        "objects": all_gather_object(rank, pair),
        "object": gather_object(rank, 2, pair),
        "gradient": x.grad,
    }


def existing_group(strategy: DDPStrategy) -> dict[str, Any]:
    """Call init_process_group where a group exists."""
    variables = {
        name: value for name, value in strategy.worker.variables.items() if "RANK" in name or "SIZE" in name
    }
    same = PlainEnvironment({**variables, "MASTER_ADDR": "localhost", "MASTER_PORT": "1"})
    answers: dict[str, Any] = {"used": init_process_group(same, "gloo").global_rank}
    try:
        init_process_group(LocalEnvironment())
    except RuntimeError as error:
        answers["refused"] = str(error)
    return answers


def own_group(strategy: DDPStrategy) -> list[Any]:
    """Create a process group by rank and size, in processes without one; return what does not work, too."""
    rank, found = strategy.global_rank, []
    ranks = init_process_group(LocalEnvironment(), "gloo", rank, 2, group_name="ours", device=CPU)
    found += [ranks, float(all_reduce(torch.tensor(1.0), None, "sum"))]
    wrong: list[dict[str, Any]] = [
        {"store": None},
        {"pg_option": None},
        {"group_name": "x"},
        {"world_size": 3},
    ]
    for change in wrong:
        arguments = {"global_rank": rank, "world_size": 2, "device": CPU, **change}
        try:
            init_process_group(LocalEnvironment(), "gloo", **arguments)
        except (ValueError, RuntimeError) as error:
            found.append(str(error))
    destroy_groups()
    return found


def rank_zero_goes_first(strategy: DDPStrategy, local: bool = False) -> list[float]:
    """Return when this rank began and ended its block."""
    with strategy.rank_zero_first(local):
        begun = time.monotonic()
        time.sleep(0.2 if strategy.is_global_zero else 0.0)
        return [begun, time.monotonic()]


def rank_zero_fails(strategy: DDPStrategy, problem: Exception) -> str:
    """Return this rank's error after rank zero failed; the next block works."""
    text = ""
    try:
        with strategy.rank_zero_first():
            if strategy.is_global_zero:
                raise problem
    except (OSError, RuntimeError) as error:
        text = f"{type(error).__name__}: {error}"
    with strategy.rank_zero_first():
        return text
