"""Unused parameters: their names by rank, and the cost of looking for them."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from rankwise.errors import ConfigurationError, UnusedParametersError
from tests.helpers.raising import raises
from tests.helpers.threaded import ThreadedStrategy, run_ranks
from tests.unit.gradient_sync.helpers import batch, net, on_ranks


class Heads(nn.Module):
    """Has two heads; the argument of `forward` selects those that are used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(3, 3).double()
        self.frozen = nn.Linear(3, 3).double().requires_grad_(False)
        self.first = nn.Linear(3, 1).double()
        self.second = nn.Linear(3, 1, bias=False).double()

    def forward(self, samples: Tensor, heads: tuple[str, ...]) -> Tensor:
        total: Tensor = sum(self.get_submodule(head)(self.body(samples)).sum() for head in heads)
        return total


def use(
    heads_by_rank: tuple[tuple[str, ...], ...], steps: int, model: nn.Module | None = None, **arguments: Any
) -> list[object]:
    """Run some steps in which each rank uses some heads."""

    def work(strategy: ThreadedStrategy, wrapped: nn.Module) -> None:
        for _ in range(steps):
            with strategy.gradient_sync_context(wrapped):
                wrapped(batch(0), heads_by_rank[strategy.global_rank]).backward()

    return on_ranks(len(heads_by_rank), work, model or Heads(), **arguments)


def test_they_are_named_by_rank() -> None:
    """DDP's error has the names of each rank and three remedies, and comes in the same step."""
    with pytest.raises(UnusedParametersError) as caught:
        use((("first",), ("second",)), steps=1)
    assert caught.value.names_by_rank == {0: ("second.weight",), 1: ("first.weight", "first.bias")}
    for way in ("use them in every step", "requires_grad_(False)", "find_unused_parameters=True"):
        assert way in str(caught.value)


def test_a_plain_loop_gets_the_names_too() -> None:
    """The launched function's error contains the names, also if DDP raises it in the next forward pass."""

    def work(strategy: ThreadedStrategy, wrapped: nn.Module) -> None:
        for _ in range(2):
            wrapped(batch(0), ("second",)).backward()

    with pytest.raises(UnusedParametersError, match=r"'first.weight', 'first.bias'") as caught:
        on_ranks(1, work, Heads())
    assert caught.traceback[-1].name == "_pre_forward"


def test_other_errors_stay() -> None:
    """Another RuntimeError does not change."""

    def work(strategy: ThreadedStrategy, wrapped: nn.Module) -> None:
        raise RuntimeError("something else")

    raises(RuntimeError, "something else", on_ranks, 1, work, Heads())


@pytest.mark.parametrize("first", [("first",), ("first", "second")])
def test_find_unused_parameters(first: tuple[str, ...]) -> None:
    """The same steps run, without a warning if one rank or both have an unused parameter."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use((first, ("second",)), steps=12, find_unused_parameters=True)


def test_unnecessary_search_is_a_warning() -> None:
    """If no rank has an unused parameter, rank 0 warns after ten reductions, with the cost."""
    with pytest.warns(UserWarning, match="no unused parameter in 10 reductions on any rank") as caught:
        use((("first", "second"),) * 2, steps=22, find_unused_parameters=True)
    [warning] = [warning for warning in caught if "find_unused_parameters" in str(warning.message)]
    assert "10 more all-reduces, of 5 flags each" in str(warning.message)


def test_ignored_parameters_may_be_unused() -> None:
    """Parameters in `_ddp_params_and_buffers_to_ignore` may be unused, and are not averaged."""
    model = Heads()
    model._ddp_params_and_buffers_to_ignore = ["second.weight"]  # type: ignore[assignment]  # torch's way
    use((("first",), ("first",)), 2, model)


def test_nothing_but_ignored_parameters_to_train() -> None:
    """A module that DDP could not wrap is returned unchanged."""
    model: Any = net()
    model._ddp_params_and_buffers_to_ignore = [*dict(model.named_parameters())]
    assert on_ranks(2, lambda s, m: type(m), model) == [nn.Sequential] * 2


def test_dtensors_are_refused() -> None:
    """DTensor parameters are an error that names them."""

    def work(rank: int) -> None:
        strategy = ThreadedStrategy(0, 1)
        model = nn.Linear(2, 2)
        mesh = DeviceMesh("cpu", [0], _init_backend=False)
        model.weight = nn.Parameter(DTensor.from_local(model.weight.detach(), mesh, [Replicate()]))
        strategy.launch(lambda s: s.setup_module(model))

    raises(ConfigurationError, r"DTensors.*\n.*weight.*pieces", run_ranks, 1, work)


def test_accumulation_with_unused_parameters() -> None:
    """`single_auto_sync` with `find_unused_parameters` includes parameters of earlier microbatches."""

    def work(strategy: ThreadedStrategy, wrapped: nn.Module) -> Tensor | None:
        for heads in (("first",), ("second",)):
            with strategy.gradient_sync_context(wrapped, is_final_microbatch=heads == ("second",)):
                wrapped(batch(strategy.global_rank), heads).backward()
        gradient: Tensor | None = strategy.unwrap_module(wrapped).get_parameter("first.weight").grad
        return gradient

    single = Heads()
    (sum(single(batch(rank), (head,)) for rank in (0, 1) for head in ("first", "second")) / 2).backward()
    for mode in ("single_auto_sync", "multi_auto_sync"):
        for result in on_ranks(2, work, Heads(), find_unused_parameters=True, sync_mode=mode):
            torch.testing.assert_close(result, single.first.weight.grad)
