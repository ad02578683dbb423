"""Collectives without a process group: each returns its input, and wrong arguments are errors."""

import contextvars
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rankwise.environments import LocalEnvironment
from rankwise.errors import (
    InvalidArgumentError,
    InvalidTypeError,
    LifecycleError,
    ProcessGroupError,
    UnknownNameError,
)
from rankwise.process_group import (
    all_gather,
    all_gather_ddp_if_available,
    all_gather_object,
    all_reduce,
    gather_all_tensors,
    gather_object,
    init_process_group,
    rank_zero_first,
    sync_ddp,
    sync_ddp_if_available,
)
from rankwise.process_group.collectives import Description, describe
from rankwise.process_group.lone_calls import refuse_lone_call
from rankwise.ranks import RankInfo
from tests.helpers.raising import raises


@pytest.fixture
def group_of_one() -> Iterator[RankInfo]:
    """Have a process group of this process; return its rank."""
    yield init_process_group(LocalEnvironment(), device=torch.device("cpu"))
    torch.distributed.destroy_process_group()


def test_gathering_alone() -> None:
    """Without a process group, gathering returns the input."""
    tensor = torch.ones(2, requires_grad=True)
    assert all_gather(tensor, sync_grads=True) is tensor
    assert all_gather_ddp_if_available(tensor) is tensor
    assert gather_all_tensors(tensor) == [tensor]
    assert (all_gather_object("x"), gather_object("x")) == (["x"], ["x"])


def test_reducing_alone() -> None:
    """A reduction returns the value, the mean of an integer a float; a number is gathered as a tensor."""
    assert all_reduce(torch.tensor(3)).dtype == torch.float32
    assert all_reduce(torch.tensor(3), reduce_op="SUM").dtype == torch.int64
    assert sync_ddp_if_available("x") == "x"
    assert (all_reduce(3), all_reduce(3.5), all_reduce(3, reduce_op="sum")) == (3.0, 3.5, 3)
    assert all_gather({"a": 0.1, "b": "x"})["a"].item() == 0.1


def test_sync_ddp_needs_a_group() -> None:
    """The error of `sync_ddp` without a process group names `sync_ddp_if_available`."""
    raises(LifecycleError, "sync_ddp_if_available", sync_ddp, torch.ones(1))


def test_unknown_operations() -> None:
    """An unknown reduction, or one that is no name, is an error, also for values that are not tensors."""
    for operation in ("median", ""):
        raises(UnknownNameError, "reduce_op", all_reduce, "x", None, operation)
    wrong: Any = 3
    raises(InvalidTypeError, "reduce_op=3", all_reduce, torch.ones(1), None, wrong)


def test_gathering_objects_on_an_unknown_rank() -> None:
    """A destination outside of the group is an error."""
    raises(InvalidArgumentError, "dst=1", gather_object, "x", dst=1)


def test_rank_zero_first_alone() -> None:
    """Without a process group the block runs at once, may call collectives, and raises what it raises."""
    with pytest.raises(Wordless), rank_zero_first(local=True):
        refuse_lone_call("a collective", None)
        raise Wordless


class Gone(torch.distributed.HashStore):
    """A store whose `set` fails."""

    def set(self, key: str, value: str) -> None:
        raise RuntimeError("Connection reset by peer")


class Wordless(Exception):
    """An exception whose `str` fails."""

    def __str__(self) -> str:
        raise LookupError


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("store", [Gone(), torch.distributed.HashStore()], ids=["gone", "there"])
def test_rank_zero_keeps_its_own_failure(store: torch.distributed.Store) -> None:
    """The block's exception is raised unchanged, also if its text or the store is unavailable."""
    with pytest.raises(Wordless), rank_zero_first(store=store):
        raise Wordless


@pytest.mark.usefixtures("group_of_one")
def test_refusal_ends_with_the_block() -> None:
    """Collectives are refused in the block of rank zero, but not after it in a task that it has started."""
    with rank_zero_first():
        task = contextvars.copy_context()
        raises(LifecycleError, "in the block of rank_zero_first", refuse_lone_call, "a collective", None)
    task.run(refuse_lone_call, "a collective", None)


def test_torch_without_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torch's distributed package the error says so, and is a RuntimeError."""
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    raises(RuntimeError, r"no torch\.distributed", init_process_group, LocalEnvironment())


@pytest.mark.parametrize(
    ("arguments", "write"),
    [
        ({"cluster_environment": LocalEnvironment()}, r"init_process_group\(environment="),
        ({"torch_distributed_backend": "gloo"}, r"init_process_group\(backend="),
        ({"environment": "slurm"}, "expected an instance of ClusterEnvironment"),
    ],
)
def test_lightnings_keywords(arguments: Any, write: str) -> None:
    """Keywords of Lightning's `init_dist_connection`, and names of environments, are refused."""
    raises(TypeError, write, init_process_group, **arguments)


def test_group_of_one(group_of_one: RankInfo) -> None:
    """A single process can have a process group."""
    assert group_of_one.world_size == 1
    own = torch.ones(2)
    with torch.device("meta"):  # a default device is for the caller's tensors
        assert gather_all_tensors(own)[0].tolist() == [1, 1]


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2, 3).bool(),
        torch.tensor(1.5),
        torch.empty(0, 4),
        torch.arange(6.0, requires_grad=True).reshape(2, 3).t(),
        torch.tensor([1 + 2j]).conj(),
        torch.ones(3, dtype=torch.bfloat16),
    ],
)
def test_descriptions(value: torch.Tensor) -> None:
    """A description has a tensor's dtype and shape, and a small tensor's data."""
    found = Description(describe(value))
    assert found.dtype == value.dtype
    assert found.shape == value.shape
    assert found.num_bytes == value.nbytes
    torch.testing.assert_close(found.tensor(), value.detach(), rtol=0, atol=0)


def test_descriptions_without_a_tensor() -> None:
    """A value that is not a dense tensor is named; an impossible shape is refused, also without data."""
    assert str(Description(describe({"a": 1}))) == "no tensor but dict"
    assert "sparse_coo" in str(Description(describe(torch.eye(2).to_sparse())))
    message = describe(torch.ones(0, 2))
    message.view(torch.int64)[2:6] = torch.tensor([3, 0, 1 << 40, 1 << 40])
    raises(ProcessGroupError, "is not the description of a tensor", Description, message)
