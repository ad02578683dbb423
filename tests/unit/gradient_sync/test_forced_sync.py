"""Forced sync: exact averages if ranks have different gradients, with few collectives."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rankwise.errors import ConfigurationError
from rankwise.gradient_sync import gradient_sync_context, reduce_gradients
from rankwise.precision import MasterWeightsPrecision
from tests.helpers.threaded import ThreadedStrategy, counted_reductions, run_ranks
from tests.unit.gradient_sync.helpers import batch, gradients, loss_of, net, on_ranks


class Branches(nn.Module):
    """Uses the branch that its argument selects, and never the third one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.left = nn.Linear(3, 1).double()
        self.right = nn.Linear(3, 1).double()
        self.never = nn.Linear(3, 1).double()

    def forward(self, samples: Tensor, branch: str) -> Tensor:
        result: Tensor = self.get_submodule(branch)(samples)
        return result


def by_composers_loop(model: nn.Module) -> None:
    """Average each existing gradient separately, as Composer's forced sync does."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


@pytest.mark.parametrize(("is_ours", "is_right"), [(True, True), (False, False)])
def test_forced_sync_of_gradients_on_some_ranks_only(is_ours: bool, is_right: bool) -> None:
    """Rank 0 uses one branch, rank 1 the other: ours is one process's average, a loop's is not.

    The loop pairs up gradients that belong to different parameters.
    """
    models = [Branches(), Branches()]

    def train(rank: int) -> list[Tensor | None]:
        model = models[rank]
        with gradient_sync_context(model, mode="forced_sync") if is_ours else nullcontext():
            model(batch(rank), ("left", "right")[rank]).sum().backward()
        if not is_ours:
            by_composers_loop(model)
        return gradients(model)

    single = Branches()
    ((single(batch(0), "left").sum() + single(batch(1), "right").sum()) / 2).backward()
    for result in run_ranks(2, train):
        assert all(map(_same, result, gradients(single))) == is_right


def _same(left: Tensor | None, right: Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    return torch.allclose(left, right, rtol=0, atol=1e-12)


def test_buckets_are_few_and_full() -> None:
    """200 small parameters and one larger than a bucket make two buckets, with one flag per parameter."""
    sizes = [3] * 200 + [1000]
    parameters = [[nn.Parameter(torch.zeros(size)) for size in sizes] for _ in range(2)]

    def reduce(rank: int) -> list[float]:
        for number, parameter in enumerate(parameters[rank]):
            parameter.grad = torch.full_like(parameter, float(rank + number))
        reduce_gradients(parameters[rank], bucket_bytes=3000)
        return [float(parameter.grad.sum()) for parameter in parameters[rank] if parameter.grad is not None]

    with counted_reductions() as counted:
        first, second = run_ranks(2, reduce)
    assert counted[0] == counted[1] == [800, 1001]
    assert first == second == [(number + 0.5) * size for number, size in enumerate(sizes)]


def test_a_bucket_holds_one_dtype() -> None:
    """Half-precision gradients have their own bucket, and so has a weight if all gradients are half."""
    kinds = [torch.float32, torch.bfloat16, torch.float32]
    parameters = [[nn.Parameter(torch.zeros(2, dtype=kind)) for kind in kinds] for _ in range(2)]

    def reduce(rank: int) -> tuple[float | None, float | None]:
        for parameter in parameters[rank]:
            parameter.grad = torch.full_like(parameter, rank)
        return reduce_gradients(parameters[rank], weight=rank + 1), reduce_gradients(
            parameters[rank][1:2], weight=20_000_000 + 2 * rank
        )

    with counted_reductions() as counted:
        means = run_ranks(2, reduce)
    assert means == [(1.5, 20_000_001)] * 2
    assert counted[0] == [4 + 2 + 1, 2 + 1, 2 + 1, 1]
    assert all(float(parameter.grad[0]) == 0.5 for parameter in parameters[0] if parameter.grad is not None)


def test_nothing_is_reduced_when_a_backward_raised() -> None:
    """After an exception in the block gradients do not change, and no rank waits."""
    model = net()

    def train(rank: int) -> None:
        with gradient_sync_context(model, mode="forced_sync"):
            loss_of(model, batch(0)).backward()
            raise KeyError("no more")

    with counted_reductions() as counted, pytest.raises(KeyError):
        run_ranks(1, train)
    assert counted == {}


def test_sparse_gradients_are_refused() -> None:
    """Sparse gradients are an error."""
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigurationError, match="sparse"):
        run_ranks(1, lambda rank: reduce_gradients(embedding.parameters()))


def test_ignored_parameters_stay_as_they_are() -> None:
    """Parameters in `_ddp_params_and_buffers_to_ignore` are not averaged."""
    models = [net(), net()]

    def train(rank: int) -> list[Tensor | None]:
        model = models[rank]
        model._ddp_params_and_buffers_to_ignore = ["0.weight"]  # type: ignore[assignment]  # torch's way
        with gradient_sync_context(model, torch.optim.SGD(model.parameters(), lr=0.1), mode="forced_sync"):
            loss_of(model, batch(rank)).backward()
        return gradients(model)

    assert [*map(_same, *run_ranks(2, train))] == [False, True, True, True]


@pytest.mark.parametrize("mode", ["single_auto_sync", "multi_auto_sync", "forced_sync"])
def test_buffers_stay_the_same(mode: str) -> None:
    """Each window starts with rank 0's running statistics on all ranks, in every mode."""

    def train(strategy: ThreadedStrategy, wrapped: nn.Module) -> list[Tensor]:
        for number in range(4):
            with strategy.gradient_sync_context(wrapped, is_final_microbatch=number % 2 == 1):
                loss_of(wrapped, batch(strategy.global_rank, number)).backward()
        with torch.no_grad():
            wrapped.eval()(batch(0))  # which begins like a window
        return [buffer.clone() for buffer in wrapped.buffers()]

    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)).double()
    first, second = on_ranks(2, train, model, sync_mode=mode)
    assert not torch.equal(first[0], model[0].get_buffer("running_mean"))
    torch.testing.assert_close(second, first, rtol=0, atol=0)


def test_copies_of_parameters_are_not_sent() -> None:
    """With 32-bit master weights only the 16-bit gradients and their flags are sent."""

    def train(strategy: ThreadedStrategy, wrapped: nn.Module) -> float:
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=1)
        strategy.precision = MasterWeightsPrecision("bf16-master")
        strategy.precision.configure(wrapped, [optimizer])
        with strategy.gradient_sync_context(wrapped, [optimizer]):
            wrapped(torch.full((1, 10), float(strategy.global_rank)).bfloat16()).sum().backward()
        strategy.optimizer_step(optimizer)
        return float(optimizer.param_groups[0]["params"][0].grad[0, 0])

    model = nn.Linear(10, 1, bias=False).bfloat16()
    with counted_reductions() as counted:
        assert on_ranks(2, train, model, sync_mode="forced_sync") == [0.5, 0.5]
    assert counted[0] == counted[1] == [11]
