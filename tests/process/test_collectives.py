"""Distributed utilities on three processes: one test for each row of that section of the features."""

import array
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from rankwise import TrainingModule
from rankwise.environments import LocalEnvironment, PlainEnvironment
from rankwise.errors import (
    ConfigurationError,
    InvalidTypeError,
    RankZeroFailedError,
    TensorMismatchError,
    WorkerRaisedError,
)
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
from rankwise.process_group.interception import Call, intercepted
from rankwise.ranks import RankInfo
from rankwise.strategies import DDPStrategy
from tests.helpers.raising import raises
from tests.process.helpers import ddp
from tests.process.training_tasks import quiet_trainer

WORLD = 3
on_three = pytest.mark.distributed(world_size=WORLD)


# ------------------------------------------------------------------------------------- reductions


@on_three
def test_all_reduce(rank_strategy: DDPStrategy) -> None:
    """Every operation works, by its name or as torch's, also in containers, and does not change its input."""
    value = torch.tensor([rank_strategy.global_rank + 1.0, 2.0])
    expected = {"sum": [6.0, 6.0], "Mean": [2.0, 2.0], "AVG": [2.0, 2.0]}
    expected |= {"min": [1.0, 2.0], "MAX": [3.0, 2.0], "product": [6.0, 8.0]}
    assert {name: all_reduce(value, None, name).tolist() for name in expected} == expected
    nested: Any = all_reduce({"a": value, "b": [value.int(), "text", None]}, reduce_op="sum")
    assert nested["a"].tolist() == [6.0, 6.0]
    assert (nested["b"][0].tolist(), nested["b"][1:]) == ([6, 6], ["text", None])
    assert value.tolist() == [rank_strategy.global_rank + 1.0, 2.0]
    strided = all_reduce(torch.arange(6.0).reshape(2, 3).t(), None, "sum")
    assert strided.tolist() == [[0.0, 9.0], [3.0, 12.0], [6.0, 15.0]]
    assert all_reduce("text") == "text"
    operations = (None, "mean", dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp(dist.ReduceOp.PRODUCT))
    found = [rank_strategy.all_reduce(value[0], reduce_op=operation).item() for operation in operations]
    assert found == [6.0, 2.0, 2.0, 3.0, 6.0]
    raises(ValueError, r"Unknown reduce_op.*BAND", rank_strategy.all_reduce, 1, reduce_op=dist.ReduceOp.BAND)


@on_three
@pytest.mark.quick
def test_sync_ddp(rank_strategy: DDPStrategy) -> None:
    """The default is the sum; a name or torch's operation selects another. There is no barrier before."""
    value = torch.tensor([rank_strategy.global_rank + 1.0, 2.0])
    calls: list[Call] = []
    with intercepted(calls.append):
        assert sync_ddp(value).tolist() == [6.0, 6.0]
    assert [call.what.split(" ")[0] for call in calls] == ["all_reduce"]
    assert sync_ddp(value, reduce_op="mean").tolist() == [2.0, 2.0]
    assert sync_ddp(value, reduce_op=dist.ReduceOp.MAX).tolist() == [3.0, 2.0]
    assert sync_ddp_if_available(value, reduce_op="avg").tolist() == [2.0, 2.0]


# Those that gloo does not send.
ODD_DTYPES = (torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e5m2)


@on_three
def test_reductions_are_exact(rank_strategy: DDPStrategy) -> None:
    """16-bit floats are reduced in 32 bits and integers in 64: no part of a sum overflows.

    The mean of integers is a float; booleans are counted, or stay booleans.
    """
    rank = rank_strategy.global_rank

    def reduced(values: tuple[float, ...], dtype: torch.dtype, name: str) -> tuple[Any, torch.dtype]:
        found = all_reduce(torch.tensor(values[rank], dtype=dtype), None, name)
        return found.item(), found.dtype

    assert reduced((4e4, 4e4, 4e4), torch.half, "mean") == (40000.0, torch.half)
    assert reduced((4e4, 4e4, -4e4), torch.half, "sum") == (40000.0, torch.half)
    assert reduced((256.0, 1.0, 1.0), torch.bfloat16, "sum") == (258.0, torch.bfloat16)
    assert reduced((200, 200, 200), torch.uint8, "sum") == (600, torch.int64)
    assert reduced((2**63 + 5, 1, 7), torch.uint64, "max") == (2**63 + 5, torch.uint64)
    pair = sync_ddp(torch.full((2,), rank, dtype=torch.int16))
    assert (pair.tolist(), pair.dtype) == ([3, 3], torch.int64)
    for dtype in ODD_DTYPES:
        found = all_reduce(torch.tensor(rank).to(dtype), None, "max")
        assert (found.double().item(), found.dtype) == (2.0, dtype)
    assert reduced((84, 85, 86), torch.uint8, "mean") == (pytest.approx(85), torch.float32)
    flags = (True, False, False)
    assert reduced(flags, torch.bool, "sum") == (1, torch.int64)
    assert reduced(flags, torch.bool, "mean")[0] == pytest.approx(1 / 3)
    assert reduced(flags, torch.bool, "min") == (False, torch.bool)
    assert reduced(flags, torch.bool, "max")[0] is True


@on_three
def test_reducing_numbers(rank_strategy: DDPStrategy) -> None:
    """Numbers stay numbers and arrays stay arrays; the result is that of all ranks."""
    rank = rank_strategy.global_rank
    total = sync_ddp({"a": rank, "b": (rank + 0.5, np.array([rank, 1.0])), "c": np.float32(rank), "d": None})
    assert (total["a"], total["b"][0], total["c"], total["d"]) == (3, 4.5, 3.0, None)
    assert isinstance(total["a"], int)
    assert isinstance(total["b"][1], np.ndarray)
    assert total["b"][1].tolist() == [3.0, 3.0]
    assert (sync_ddp(3.0), all_reduce(3), all_reduce(rank == 0, None, "min")) == (9.0, 3.0, False)


@dataclass(frozen=True)
class Measured:
    """What a step may return: tensors and numbers, nested, beside other values."""

    loss: Tensor
    counts: tuple[int, ...]
    inner: Any = None
    name: str = "train"
    total: float = field(init=False, default=1.0)


@on_three
@pytest.mark.quick
def test_dataclasses(rank_strategy: DDPStrategy) -> None:
    """Frozen dataclasses are reduced and gathered like other containers."""
    rank = rank_strategy.global_rank
    value = Measured(torch.tensor([rank + 1.0]), (rank,), [Measured(torch.tensor(rank), ())])
    reduced, gathered = rank_strategy.all_reduce(value, reduce_op="sum"), rank_strategy.all_gather(value)
    assert (reduced.loss.item(), reduced.counts, reduced.inner[0].loss.item()) == (6.0, (3,), 3)
    assert (reduced.total, reduced.name) == (3.0, "train")
    assert gathered.loss.tolist() == [[1.0], [2.0], [3.0]]
    assert gathered.counts[0].tolist() == gathered.inner[0].loss.tolist() == [0, 1, 2]


@on_three
def test_what_cannot_be_reduced(rank_strategy: DDPStrategy) -> None:
    """Values that may hold numbers, but are not numeric, are errors that say what they are."""
    odd: list[Any] = [
        *({1.0, 2.0}, Fraction(1, 2), iter([1.0]), range(2), torch.Size([2]), 2**70),
        *(torch.eye(2).to_sparse(), torch.ones(2, device="meta"), torch.ones(1).expand(2)[None].to_mkldnn()),
        *(np.array([None]), np.array(["text"]), np.ma.array([1.0, 2.0], mask=[False, True])),
        *(array.array("d", [1]), SimpleNamespace(tensor=torch.ones(1))),
    ]
    for value in odd:
        for call in (rank_strategy.all_reduce, rank_strategy.all_gather):
            with pytest.raises(InvalidTypeError, match=r"(?s)^value=.*expected a dense tensor"):
                call({"loss": torch.ones(1), "odd": [value]})


# ------------------------------------------------------------------------------------- gathering


@on_three
def test_all_gather(rank_strategy: DDPStrategy) -> None:
    """The shape of the result is (world_size, *), in rank order, with any dtype; containers are traversed."""
    rank = rank_strategy.global_rank
    plain = all_gather(torch.full((2, 1), float(rank)))
    assert plain.tolist() == [[[0.0], [0.0]], [[1.0], [1.0]], [[2.0], [2.0]]]
    numbers, text = all_gather({"a": (torch.tensor([rank]), "text")})["a"]
    assert (numbers.tolist(), text) == ([[0], [1], [2]], "text")
    strided = torch.arange(6.0).reshape(2, 3).t() + rank
    torch.testing.assert_close(all_gather(strided)[rank], strided)
    for dtype in ODD_DTYPES:
        found = all_gather(torch.tensor([[1, rank]]).to(dtype))
        assert (found.dtype, found.double().tolist()) == (dtype, [[[1, 0]], [[1, 1]], [[1, 2]]])
    for call in (all_gather, all_gather_ddp_if_available):
        assert call(torch.tensor(rank, dtype=torch.int16)).tolist() == [0, 1, 2]


@on_three
@pytest.mark.quick
def test_gathering_numbers_and_arrays(rank_strategy: DDPStrategy) -> None:
    """Numbers and arrays become tensors of every rank's, on the strategy's device; other values stay."""
    rank = rank_strategy.global_rank
    mixed = {"a": rank, "b": [rank + 0.1, "text"], "c": rank == 0, "d": np.full((2, 1), rank)[::-1]}
    found = rank_strategy.all_gather(mixed)
    assert found["a"].tolist() == [0, 1, 2]
    assert found["b"][0].tolist() == [0.1, 1.1, 2.1]  # as exact as Python's numbers
    assert found["b"][1] == "text"
    assert found["c"].tolist() == [True, False, False]
    assert found["d"].tolist() == [[[0], [0]], [[1], [1]], [[2], [2]]]


def loss_of(everything: Tensor, rank: int) -> Tensor:
    """Return a rank's loss, in which every slice has another part."""
    coefficients = torch.linspace(-1, 1, everything.numel(), dtype=torch.float64).reshape(everything.shape)
    return ((everything * coefficients).sum() * (rank + 1)).tanh() + (everything**2)[rank].sum()


@on_three
def test_all_gather_with_gradients(rank_strategy: DDPStrategy) -> None:
    """Gradients through a gather, summed over the ranks, are one process's, and so are higher derivatives."""
    rank, generator = rank_strategy.global_rank, torch.Generator().manual_seed(5)
    weights = torch.randn(4, 3, dtype=torch.float64, generator=generator, requires_grad=True)
    inputs = torch.randn(WORLD, 2, 4, dtype=torch.float64, generator=generator)
    outputs = torch.stack([own @ weights for own in inputs])
    total = torch.stack([loss_of(outputs, each) for each in range(WORLD)]).sum()
    [expected] = torch.autograd.grad(total, weights)
    [found] = torch.autograd.grad(loss_of(all_gather(inputs[rank] @ weights, sync_grads=True), rank), weights)
    torch.testing.assert_close(all_reduce(found, None, "sum"), expected, rtol=0, atol=1e-12)
    number = rank + 1.0
    x = torch.tensor(number, dtype=torch.float64, requires_grad=True)
    value = (AllGatherGrad.apply(x * x) ** 2).sum()  # type: ignore[no-untyped-call]  # torch does not type it
    derivatives = []
    for _ in range(3):
        (value,) = torch.autograd.grad(value, x, create_graph=True)  # summed over the ranks' values
        derivatives.append(value.item() / WORLD)
    assert derivatives == pytest.approx([4 * number**3, 12 * number**2, 24 * number], rel=1e-12)


LARGE = 3000  # float32: more bytes than travel with the description
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.int64, torch.bool, torch.complex64)
KINDS: dict[str, Callable[[int], tuple[int, ...]]] = {
    "scalar": lambda rank: (),
    "even": lambda rank: (2, 3),
    "uneven": lambda rank: (rank + 1, 3 - rank),
    "large": lambda rank: (LARGE + rank, 2),
    "empty": lambda rank: (rank * LARGE,),
}


def tensor_of(rank: int, kind: str, dtype: torch.dtype) -> Tensor:
    """Return a rank's tensor; a matrix is not contiguous."""
    shape = KINDS[kind](rank)
    numbers = torch.arange(torch.Size(shape).numel()).reshape(shape) * (rank + 1)
    tensor = (numbers % 2 == 0) if dtype is torch.bool else (numbers % 120).to(dtype)
    return tensor.t() if tensor.ndim == 2 else tensor


@on_three
def test_gather_all_tensors(rank_strategy: DDPStrategy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank's tensor arrives unchanged, whatever its size, dtype and strides; without gloo, too."""
    backends = [dist.Backend("gloo"), dist.Backend("mpi")]
    for backend, kind, dtype in itertools.product(backends, KINDS, DTYPES):
        monkeypatch.setattr(dist, "get_backend", lambda group=None, name=backend: name)
        found = gather_all_tensors(tensor_of(rank_strategy.global_rank, kind, dtype))
        expected = [tensor_of(rank, kind, dtype) for rank in range(WORLD)]
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@on_three
@pytest.mark.quick
def test_gather_all_tensors_refuses_mismatches(rank_strategy: DDPStrategy) -> None:
    """Tensors that do not match are the same error on every rank, with each rank's input."""
    rank = rank_strategy.global_rank
    first, second = "rank 0 of the group: torch.float32, shape (4,)", "rank 1 of the group: "
    sparse = "rank 2 of the group: a tensor that is not dense (layout torch.sparse_coo"
    odd: list[tuple[Any, str]] = [
        (torch.ones(2, 2) if rank == 1 else torch.ones(4), f"{first}; {second}torch.float32, shape (2, 2)"),
        (torch.ones(4, dtype=torch.float64 if rank == 1 else torch.int64), f"{second}torch.float64"),
        ([1] if rank == 1 else torch.ones(4), f"{second}no tensor but list"),
        (torch.ones(2, 2).to_sparse() if rank == 2 else torch.ones(2, 2), sparse),
    ]
    for value, text in odd:
        with pytest.raises(TensorMismatchError) as caught:
            gather_all_tensors(value)
        assert text in str(caught.value)


@on_three
@pytest.mark.quick
def test_gather_object(rank_strategy: DDPStrategy) -> None:
    """One rank gets all values, the others nothing; or every rank gets them."""
    rank = rank_strategy.global_rank
    found = gather_object(("x" * rank, rank), dst=1)
    assert found == ([("", 0), ("x", 1), ("xx", 2)] if rank == 1 else None)
    assert all_gather_object({"rank": rank}) == [{"rank": 0}, {"rank": 1}, {"rank": 2}]


# ------------------------------------------------------------------------------------- groups


@on_three
def test_collectives_in_a_subgroup(rank_strategy: DDPStrategy) -> None:
    """Every collective works among the ranks of a subgroup; on another rank it is an error."""
    rank, pair, one = rank_strategy.global_rank, dist.new_group([0, 2]), torch.ones(1)
    if rank == 1:
        calls: list[Any] = [(all_reduce, one), (all_gather, one), (broadcast, rank, 0), (barrier,)]
        for call, *arguments in calls:
            with pytest.raises(ValueError):
                call(*arguments, pair)
        return
    assert isinstance(pair, dist.ProcessGroup)
    assert all_reduce(torch.tensor(rank + 1.0), pair, "sum").item() == 4.0
    assert all_gather(torch.tensor(rank), pair).tolist() == [0, 2]
    assert [len(tensor) for tensor in gather_all_tensors(torch.ones(rank), pair)] == [0, 2]
    assert all_gather_object(rank, pair) == [0, 2]
    assert gather_object(rank, 2, pair) == (None if rank == 0 else [0, 2])
    x = torch.ones(1, requires_grad=True)
    all_gather(x * rank, pair, sync_grads=True).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0 * rank]


@on_three
def test_init_process_group_with_a_group(rank_strategy: DDPStrategy) -> None:
    """A matching group is used, another one is refused."""
    rank, variables = rank_strategy.global_rank, rank_strategy.worker.variables
    own = {name: value for name, value in variables.items() if "RANK" in name or "SIZE" in name}
    same = PlainEnvironment({**own, "MASTER_ADDR": "localhost", "MASTER_PORT": "1"})
    assert init_process_group(same, "gloo").global_rank == rank
    with pytest.raises(RuntimeError, match="global_rank 0 of 1") as caught:
        init_process_group(LocalEnvironment())
    assert f"rank {rank} of {WORLD}" in str(caught.value) or rank == 0


def own_group(strategy: DDPStrategy) -> None:
    """Create a process group by rank and size, in a process without one; then what does not work."""
    cpu, rank = torch.device("cpu"), strategy.global_rank
    ranks = init_process_group(LocalEnvironment(), "gloo", rank, 2, group_name="ours", device=cpu)
    assert ranks == RankInfo(rank, rank, 0, 2, 2, 1)
    assert float(all_reduce(torch.tensor(1.0), None, "sum")) == 2.0
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"store": None}, "takes no argument 'store'"),
        ({"pg_option": None}, "Did you mean 'pg_options'"),
        ({"group_name": "x"}, "A process group exists, which cannot take group_name"),
        ({"world_size": 3}, "in the job it is global_rank"),
    ]
    for change, text in wrong:
        arguments = {"global_rank": rank, "world_size": 2, "device": cpu, **change}
        with pytest.raises((ValueError, RuntimeError), match=text):
            init_process_group(LocalEnvironment(), "gloo", **arguments)
    destroy_groups()


@pytest.mark.quick
def test_init_process_group_by_rank_and_size() -> None:
    """It takes a rank, a size, and torch's arguments; what would be ignored is refused."""
    ddp("fork", "tcp").launch(own_group, init_process_group=False)


# ------------------------------------------------------------------------------------- rank zero first


@pytest.mark.parametrize("local", [False, True])
@on_three
def test_rank_zero_first(local: bool, rank_strategy: DDPStrategy) -> None:
    """The other ranks run the block after rank zero."""
    with rank_strategy.rank_zero_first(local):
        begun_s = time.monotonic()
        time.sleep(0.2 if rank_strategy.is_global_zero else 0.0)
        ended_s = time.monotonic()
    assert rank_strategy.broadcast(ended_s) <= begun_s or rank_strategy.is_global_zero


def fail_first(strategy: DDPStrategy, name: str = "disk full") -> None:
    """Fail on rank zero, in its block."""
    with strategy.rank_zero_first():
        if strategy.is_global_zero:
            raise OSError(name)


@on_three
def test_rank_zero_first_tells_failures(rank_strategy: DDPStrategy) -> None:
    """The waiting ranks get rank zero's failure, escaped where it is not UTF-8; the next block works."""
    for name, sent in (("disk full", "disk full"), ("no data-\udcff.bin", r"no data-\udcff.bin")):
        with pytest.raises((OSError, RankZeroFailedError)) as caught:
            fail_first(rank_strategy, name)
        expected = f"The block of rank_zero_first() failed on global_rank 0: OSError: {sent}."
        text = str(caught.value)
        assert text == name if rank_strategy.is_global_zero else text.startswith(expected)
    with rank_strategy.rank_zero_first():
        pass


def test_rank_zero_first_names_the_culprit() -> None:
    """The job's error is rank zero's exception; the other ranks' are consequences."""
    raises(WorkerRaisedError, r"global_rank=0 .* raised OSError: disk full", ddp("fork").launch, fail_first)


# ------------------------------------------------------------------------------------- a subgroup's data


class Pairs(DDPStrategy):
    """Shares data among the even ranks, and among the odd ones, of four."""

    def __init__(self) -> None:
        super().__init__(start_method="fork", accelerator="cpu", devices=4)

    def setup_environment(self) -> None:
        super().setup_environment()
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        self._pair: dist.ProcessGroup = groups[self.global_rank % 2]

    @property
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        return self._pair


class Astray(Pairs):
    """Wraps a module without the subgroup."""

    def configure_ddp(self, module: torch.nn.Module, device_ids: list[int] | None) -> Any:
        return torch.nn.parallel.DistributedDataParallel(module)


def check_pairs(strategy: DDPStrategy) -> None:
    """Compare where this rank samples, what it reduces, and the gradient of a wrapped module."""
    rank = strategy.global_rank
    module = torch.nn.Linear(1, 1, bias=False)
    wrapped = strategy.setup_module(module)
    strategy.backward(wrapped(torch.tensor([[float(rank)]])).sum())
    assert module.weight.grad is not None
    assert module.weight.grad.item() == (1.0 if rank % 2 == 0 else 2.0)
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 2, "rank": rank // 2}
    assert strategy.all_reduce(torch.tensor(float(rank)), reduce_op="sum") == (2.0 if rank % 2 == 0 else 4.0)
    assert strategy.all_gather_object(rank, dist.group.WORLD) == [0, 1, 2, 3]
    strategy.__class__ = Astray
    with pytest.raises(ConfigurationError, match=r"process_group=self\.data_parallel_group") as caught:
        strategy.setup_module(torch.nn.Linear(1, 1))
    problem = f"has the ranks [0, 1, 2, 3], data_parallel_group [{rank % 2}, {rank % 2 + 2}]"
    assert problem in str(caught.value)


@pytest.mark.quick
def test_data_parallel_group() -> None:
    """Sampling, reducing and wrapping follow a subgroup; the whole world can still be asked for.

    A wrapper that averages over other ranks than those that share the data is refused.
    """
    Pairs().launch(check_pairs)


class InPairs(TrainingModule):
    """Trains each pair on numbers of its own, and compares each rank's data and weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(self.layer.weight)
        self.read: list[float] = []

    def train_dataloader(self) -> DataLoader[Any]:
        first = 10.0 * (self.global_rank % 2)
        return DataLoader(TensorDataset(torch.arange(first, first + 4)[:, None]), batch_size=1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.read.append(batch[0].item())
        return self.layer(batch[0]).sum()  # type: ignore[no-any-return]  # modules are untyped

    def on_train_end(self) -> None:
        first, is_odd = divmod(self.global_rank, 2)
        assert self.read == [10.0 * is_odd + first, 10.0 * is_odd + first + 2]
        assert self.layer.weight.item() == (-(10.5 + 12.5) if is_odd else -(0.5 + 2.5))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def test_a_trainer_follows_the_data_parallel_group() -> None:
    """It distributes samples and averages gradients within the subgroup."""
    module = InPairs()
    quiet_trainer(Pairs(), 4, max_epochs=1).fit(module)
    assert module.layer.weight.item() == -(0.5 + 2.5)
