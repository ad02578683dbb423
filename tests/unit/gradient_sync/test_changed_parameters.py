"""Parameters that are frozen, unfrozen or added between steps train as in one process."""

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rankwise.errors import ConfigurationError
from rankwise.gradient_sync import tracking
from rankwise.gradient_sync.tracking import TrainedSet
from tests.helpers.parameters import in_turn
from tests.helpers.threaded import ThreadedStrategy, run_ranks
from tests.unit.gradient_sync.helpers import Layers, batch, loss_of

STEPS = 4
Change = Callable[[Layers, torch.optim.Optimizer, int], None]


def before(number: int, act: Callable[[Layers, torch.optim.Optimizer], object]) -> Change:
    """Return a change before a step."""

    def change(model: Layers, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step == number:
            act(model, optimizer)

    return change


def add_layer(model: Layers, optimizer: torch.optim.Optimizer) -> None:
    """Add a layer, and train it."""
    optimizer.add_param_group({"params": model.add_layer().parameters()})


def replace_layer(model: Layers, optimizer: torch.optim.Optimizer) -> None:
    """Replace a layer by another one with the same values."""
    model.last = copy.deepcopy(model.last)
    optimizer.param_groups[0]["params"] = list(model.parameters())


def add_scale(model: Layers, optimizer: torch.optim.Optimizer) -> None:
    """Train a parameter that is not in the module."""
    optimizer.add_param_group({"params": model.scale})


def back_and_forth(model: Layers, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Freeze and unfreeze layers alternately."""
    model.first.requires_grad_(step % 2 == 0)
    model.second.requires_grad_(step % 2 == 1)


CASES: dict[str, tuple[tuple[str, ...], Change]] = {
    "unfrozen": (("first",), before(1, lambda model, _: model.first.requires_grad_(True))),
    "unfrozen at the start": (("first",), before(0, lambda model, _: model.first.requires_grad_(True))),
    "frozen": ((), before(2, lambda model, _: model.second.requires_grad_(False))),
    "a layer is added": ((), before(1, add_layer)),
    "a layer is replaced": ((), before(2, replace_layer)),
    "a parameter outside": ((), before(0, add_scale)),
    "a parameter group outside": ((), before(1, add_scale)),
    "alternating": ((), back_and_forth),
    "all unfrozen": (
        ("first", "second", "last"),
        before(1, lambda model, _: model.last.requires_grad_(True)),
    ),
}


def optimizer_of(model: Layers) -> torch.optim.Optimizer:
    """Return an optimizer with a state."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def samples_of(rank: int, step: int, microbatch: int) -> Tensor:
    """Return the same samples every time: as many as the microbatch's number says, and the rank's."""
    return batch(rank, 10 * step + microbatch, 1 + rank + microbatch)


def expected(case: str, accumulate: int, weighted: bool = False, change_at: int = 0) -> list[Tensor]:
    """Train one process by hand on the samples of two ranks."""
    frozen, change = CASES[case]
    model = Layers(*frozen)
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        total = sum(len(samples_of(r, step, m)) for r in range(2) for m in range(accumulate))
        for microbatch in range(accumulate):
            if microbatch == change_at:
                change(model, optimizer, step)
            for rank in range(2):
                samples = samples_of(rank, step, microbatch)
                part = len(samples) / total if weighted else 1 / (2 * accumulate)
                loss = loss_of(model, samples) * part
                if loss.requires_grad:
                    loss.backward()
        optimizer.step()
    return model.values()


def trained(
    case: str, accumulate: int, change_at: int = 0, *, in_block: bool = False, **arguments: Any
) -> list[list[Tensor]]:
    """Train on two ranks, and change what is trained before or in the block; return the weights of each."""
    frozen, change = CASES[case]
    weighted = arguments.get("gradient_weighting") == "logged"

    def run(rank: int) -> list[Tensor]:
        strategy = ThreadedStrategy(rank, 2, **arguments)
        model = Layers(*frozen)

        def train(strategy: ThreadedStrategy) -> list[Tensor]:
            wrapped, optimizer = strategy.setup_module(model), optimizer_of(model)
            for step in range(STEPS):
                optimizer.zero_grad()
                for number in range(accumulate):
                    if number == change_at and not in_block:
                        change(model, optimizer, step)
                    samples = samples_of(rank, step, number)
                    is_final = number == accumulate - 1
                    with strategy.gradient_sync_context(wrapped, [optimizer], is_final):
                        if number == change_at and in_block:
                            change(model, optimizer, step)
                        loss = loss_of(wrapped, samples)
                        if weighted:
                            loss = strategy.weighted_loss(loss, len(samples))
                        if loss.requires_grad:
                            (loss if weighted else loss / accumulate).backward()
                strategy.optimizer_step(optimizer)
            return model.values()

        return strategy.launch(train)

    return run_ranks(2, run)


def check(case: str, accumulate: int, change_at: int = 0, **arguments: Any) -> None:
    """All ranks have one process's weights."""
    weighted = arguments.get("gradient_weighting") == "logged"
    wanted = expected(case, accumulate, weighted, change_at)
    for own in trained(case, accumulate, change_at, **arguments):
        torch.testing.assert_close(own, wanted, rtol=0, atol=1e-12)


MODES = ("single_auto_sync", "multi_auto_sync", "forced_sync")
PARTLY = [case for case in CASES if case != "all unfrozen"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", CASES)
def test_what_is_trained_is_averaged(case: str, mode: str) -> None:
    """Two ranks have one process's weights, in every mode."""
    check(case, 1, sync_mode=mode)
    if case != "all unfrozen":
        check(case, 3, sync_mode=mode)


@pytest.mark.full
@pytest.mark.parametrize(("case", "mode"), in_turn(PARTLY, MODES))
def test_within_a_window(case: str, mode: str) -> None:
    """A change between the microbatches of a window keeps their gradients."""
    check(case, 3, change_at=1, sync_mode=mode)
    check(case, 3, change_at=2, sync_mode=mode)


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", ["unfrozen", "a layer is added", "a parameter group outside"])
def test_within_a_block(case: str, mode: str) -> None:
    """What is trained from a microbatch's own forward pass on is averaged at the end of its window."""
    for accumulate, change_at in (1, 0), (2, 0), (2, 1):
        check(case, accumulate, change_at, in_block=True, sync_mode=mode)


def test_an_unknown_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where DDP is built in another way, a change is an error, and the wrapper stays as it is."""
    monkeypatch.setitem(tracking._REBUILT_WITH, "_ddp_init_helper", "self parameters options")
    with pytest.raises(ConfigurationError, match=r"torch .* is not known to rankwise"):
        trained("frozen", 1)
    check("frozen", 1, sync_mode="forced_sync")


def test_optimizers_are_numbered_alike_on_all_ranks() -> None:
    """A new optimizer may get the id of one that has ended, on some ranks."""
    model = Layers()
    parameters, first = TrainedSet(model), torch.optim.SGD(model.scale, lr=0.1)
    parameters.read(model, [first])
    number, others = id(first), list[torch.optim.Optimizer]()
    del first
    gc.collect()
    while not others or (id(others[-1]) != number and len(others) < 1000):
        others.append(torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1))
    parameters.read(model, [others[-1]])
    labels = [name for name in parameters.facts() if " of optimizer " in name]
    assert labels == ["parameter '0 of optimizer 0'", "parameter '0 of optimizer 1'"]


@pytest.mark.parametrize(
    "change",
    [
        lambda net: net[0].requires_grad_(False),
        lambda net: setattr(net[0], "bias", None),
        lambda net: setattr(net[0], "weight", copy.deepcopy(net[0].weight)),
        lambda net: net[1].register_parameter("scale", nn.Parameter(torch.ones(1))),
        lambda net: net.append(nn.Linear(2, 2)),
        lambda net: net.__delitem__(2),
        lambda net: net.__setitem__(2, copy.deepcopy(net[2])),
    ],
    ids=["frozen", "removed", "replaced", "added", "layer added", "layer removed", "layer replaced"],
)
def test_every_change_is_found(change: Callable[[Any], object]) -> None:
    """A module that has changed is read again, and one that has not is not."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    parameters = TrainedSet(net)
    assert not parameters.is_current([optimizer])
    assert not parameters.read(net, [optimizer])
    assert parameters.is_current([optimizer])
    assert parameters.is_complete([optimizer])
    change(net)
    assert not parameters.is_current([optimizer])
    assert not parameters.is_complete([])
    assert parameters.read(net, [optimizer])
    assert parameters.is_current([optimizer])


OPTIONS: list[dict[str, Any]] = [{}, {"find_unused_parameters": True}, {"sync_mode": "forced_sync"}]


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True found")
@pytest.mark.parametrize(("case", "options"), in_turn(PARTLY, OPTIONS))
def test_logged_weights(case: str, options: dict[str, Any]) -> None:
    """Logged weights apply to what is trained now, whatever carries them."""
    check(case, 2, gradient_weighting="logged", **options)
    check(case, 3, change_at=1, gradient_weighting="logged", **options)
