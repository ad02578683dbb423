"""`Fabric` on several ranks, which are threads of this process: the same weights as on one."""

import copy
import warnings
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from rankwise import Fabric
from rankwise.errors import ConfigurationError
from tests.helpers.raising import raises
from tests.helpers.threaded import ThreadedStrategy, run_ranks
from tests.unit.fabric.helpers import Classifier, data, fabric, largest_difference, train


def on_rank(rank: int, world_size: int = 2, **options: Any) -> Fabric:
    """Return the Fabric of a thread."""
    return Fabric(strategy=ThreadedStrategy(rank, world_size, **options))


@pytest.mark.parametrize(
    "options", [{}, {"clip": 0.05}, {"accumulate": 2}, {"accumulate": 2, "clip": 0.05}], ids=str
)
def test_two_ranks_give_the_weights_of_one_process(options: dict[str, Any]) -> None:
    """On the same global batches, with clipping and accumulation."""
    expected = train(fabric(), Classifier(), shuffle=False, **options)
    modules = [Classifier() for _ in range(2)]
    for found in run_ranks(2, lambda rank: train(on_rank(rank), modules[rank], shuffle=False, **options)):
        assert largest_difference(found, expected) < 1e-6


def test_weighted_losses_give_the_weights_of_one_process() -> None:
    """Ranks with batches of different sizes average as one process that has all samples."""
    x, y = data(10).tensors
    shares = (slice(0, 7), slice(7, 10))
    template = Classifier()

    def gradient(fabric: Fabric, share: slice) -> Tensor | None:
        own = copy.deepcopy(template)
        module, optimizer = fabric.setup(own, torch.optim.SGD(own.parameters(), lr=0.1))
        with fabric.gradient_sync_context(module, optimizer):
            fabric.backward(module.training_step((x[share], y[share])), weight=share.stop - share.start)
        return own.first.weight.grad

    template.training_step((x, y)).backward()
    expected = template.first.weight.grad
    template.zero_grad()
    for found in run_ranks(
        2, lambda rank: gradient(on_rank(rank, gradient_weighting="logged"), shares[rank])
    ):
        torch.testing.assert_close(found, expected)


def test_a_window_is_averaged_after_its_last_backward_pass() -> None:
    """With `forced_sync` only the block of a window averages, and backward passes belong in it."""

    def gradient(rank: int) -> float:
        one = on_rank(rank, sync_mode="forced_sync")
        own = nn.Linear(1, 1, bias=False)
        module = one.setup(own)
        raises(ConfigurationError, "outside of the block", one.backward, module(torch.ones(1, 1)).sum())
        own.zero_grad()
        for is_last in (False, True):
            with one.gradient_sync_context(module, is_final_microbatch=is_last):
                one.backward(module(torch.full((1, 1), 1.0 + rank)).sum())
        assert own.weight.grad is not None
        return float(own.weight.grad)

    assert run_ranks(2, gradient) == [3.0, 3.0]  # twice the mean of 1 and 2


def test_a_method_beside_forward_must_be_marked() -> None:
    """Otherwise its gradients would not be averaged."""
    modules = [Classifier() for _ in range(2)]

    def gradient(rank: int) -> Tensor | None:
        one = on_rank(rank)
        module = one.setup(modules[rank])
        x, y = (part[rank::2] for part in data().tensors)
        raises(ConfigurationError, "mark_forward_method", module.loss, x, y)
        module.mark_forward_method(module.module.loss)
        one.backward(module.loss(x, y=y))
        return modules[rank].first.weight.grad

    first, second = run_ranks(2, gradient)
    assert first is not None
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_an_optimizer_with_a_closure_decides_alike() -> None:
    """L-BFGS with a line search steps by the mean of the losses."""
    modules = [Classifier() for _ in range(2)]

    def steps(rank: int) -> dict[str, Tensor]:
        one, own = on_rank(rank), modules[rank]
        sgd = torch.optim.LBFGS(own.parameters(), max_iter=6, line_search_fn="strong_wolfe")
        module, optimizer = one.setup(own, sgd)
        x, y = (part[rank::2] for part in data().tensors)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = module.training_step((x, y))
            one.backward(loss)
            return loss

        optimizer.step(closure)
        return own.state_dict()

    first, second = run_ranks(2, steps)
    assert largest_difference(first, second) == 0


def test_each_sample_is_evaluated_once() -> None:
    """Ranks have different numbers of batches; the module is called without collectives, after the first."""
    modules = [nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)) for _ in range(2)]
    numbers = TensorDataset(torch.arange(5.0)[:, None])

    def evaluate(rank: int) -> tuple[list[float], Tensor]:
        one = on_rank(rank)
        module = one.setup(modules[rank])
        loader = one.setup_dataloaders(DataLoader(numbers, batch_size=1), each_sample_once=True)
        one.backward(module(torch.full((2, 1), 3.0 + rank)).sum())  # each rank's statistics are its own
        module.eval()
        seen = []
        with torch.no_grad():
            for (x,) in loader:
                module(x)
                seen.append(float(x))
        return seen, modules[rank][1].running_mean.clone()  # type: ignore[operator]  # a buffer

    (first, mean), (second, same_mean) = run_ranks(2, evaluate)
    assert (first, second) == ([0.0, 2.0, 4.0], [1.0, 3.0])
    assert torch.equal(mean, same_mean)


def test_repeated_samples_are_said() -> None:
    """For a loader that reads in order, as for an evaluation, unless each counts once; no rank has none."""

    def warned(rank: int, **options: Any) -> list[str]:
        one = on_rank(rank)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            one.setup_dataloaders(DataLoader(data(5)), **options)
            one.barrier()
        return [str(each.message) for each in caught if "read twice" in str(each.message)]

    messages = list(chain(*run_ranks(2, warned)))
    assert messages
    assert all(message.startswith("1 of 5 samples are read twice") for message in messages)
    assert run_ranks(2, lambda rank: warned(rank, each_sample_once=True)) == [[], []]
    with pytest.raises(ConfigurationError, match="leaves no sample for global_rank 1"):
        run_ranks(2, lambda rank: on_rank(rank).setup_dataloaders(DataLoader(data(1)), each_sample_once=True))

    def length(rank: int) -> int:
        loader = on_rank(rank).setup_dataloaders(DataLoader(data(5)), use_distributed_sampler=False)
        return len(list(loader))

    assert run_ranks(2, length) == [5, 5]


def test_a_frozen_module_is_the_same_everywhere() -> None:
    """Nothing in it is trained, so it is not wrapped; all ranks get rank 0's weights."""
    modules = [nn.Linear(2, 2).requires_grad_(False) for _ in range(2)]
    with torch.no_grad():
        modules[1].weight += 1

    def output(rank: int) -> Tensor:
        result: Tensor = on_rank(rank).setup(modules[rank])(torch.ones(1, 2))
        return result

    first, second = run_ranks(2, output)
    assert torch.equal(first, second)
