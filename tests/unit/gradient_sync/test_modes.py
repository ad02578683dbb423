"""Sync modes: their names, when DDP averages in each, and how often."""

from typing import Any

import pytest
import torch
from torch import nn

from rankwise.errors import ConfigurationError, InvalidTypeError, LifecycleError, UnknownNameError
from rankwise.gradient_sync import GradientSyncMode, gradient_sync_context
from rankwise.gradient_sync.options import resolve_sync_mode
from rankwise.strategies import DDPStrategy, SingleDeviceStrategy
from tests.helpers.raising import raises
from tests.helpers.threaded import ThreadedStrategy, counted_reductions, run_ranks
from tests.unit.gradient_sync.helpers import (
    accumulate,
    alone,
    assert_close,
    assert_each,
    bare,
    batch,
    loss_of,
    net,
    on_ranks,
)

MODES = [mode.value for mode in GradientSyncMode]


def batches(ranks: int, count: int) -> list[torch.Tensor]:
    return [batch(rank, number) for rank in range(ranks) for number in range(count)]


@pytest.mark.parametrize("name", MODES)
def test_ddp_sync_strategy_names(name: str) -> None:
    """Composer's `DDPSyncStrategy`: every mode has a name, in any case."""
    mode = GradientSyncMode(name)
    assert (
        resolve_sync_mode(name.upper()) is resolve_sync_mode(mode) is GradientSyncMode(name.upper()) is mode
    )
    assert DDPStrategy(sync_mode=name).gradients.mode is mode


def test_auto() -> None:
    """`"auto"` averages once per window, but in each microbatch if DDP looks for unused parameters."""
    assert DDPStrategy().gradients.mode is GradientSyncMode.SINGLE_AUTO_SYNC
    assert DDPStrategy(find_unused_parameters=True).gradients.mode is GradientSyncMode.MULTI_AUTO_SYNC


def test_an_unknown_name() -> None:
    """An unknown name is an error in the constructor that suggests the nearest one."""
    raises(ValueError, "'force_sync' is not a valid GradientSyncMode", GradientSyncMode, "force_sync")
    raises(UnknownNameError, "Did you mean 'forced_sync'", DDPStrategy, sync_mode="force_sync")
    raises(InvalidTypeError, "sync_mode", DDPStrategy, sync_mode=3)


@pytest.mark.parametrize("arguments", [{"comm_hook": "fp16_compress"}, {"static_graph": True}])
def test_forced_sync_excludes(arguments: dict[str, object]) -> None:
    """Features that need DDP's own reductions are errors with forced sync."""
    raises(ConfigurationError, "forced_sync", DDPStrategy, sync_mode="forced_sync", **arguments)


@pytest.mark.parametrize(
    ("mode", "count"), [("single_auto_sync", 1), ("multi_auto_sync", 4), ("forced_sync", 1)]
)
def test_reductions_per_optimizer_step(mode: str, count: int) -> None:
    """Four microbatches: one all-reduce per bucket and step, but with `multi_auto_sync` one in each."""
    model = net()

    def work(strategy: ThreadedStrategy, wrapped: nn.Module) -> tuple[int, list[torch.Tensor | None]]:
        before = len(sizes.get(strategy.global_rank, ()))  # wrapping reduces too
        result = accumulate(strategy, wrapped, (2, 2, 2, 2))
        return len(sizes[strategy.global_rank]) - before, result

    with counted_reductions() as sizes:
        results = on_ranks(2, work, model, sync_mode=mode)
    expected = alone(model, batches(2, 4))
    for reductions, result in results:
        assert reductions == count
        assert_close(result, expected)


def test_a_static_graph_may_accumulate() -> None:
    """The first backward pass of a static graph averages, because it cannot run under `no_sync`."""
    model = net()
    found = on_ranks(2, lambda s, m: accumulate(s, m, (2, 2, 2)), model, static_graph=True)
    assert_each(found, alone(model, batches(2, 3)))


@pytest.mark.parametrize("weighting", [None, "logged"])
@pytest.mark.parametrize("view", [False, True])
def test_a_static_graph_has_equal_windows(weighting: str | None, view: bool) -> None:
    """The first window gives the same bits as later ones, so that a run can resume with any of them."""

    def work(strategy: ThreadedStrategy, wrapped: nn.Module) -> list[list[torch.Tensor | None]]:
        results = []
        for _ in range(3):
            wrapped.zero_grad()
            results.append(accumulate(strategy, wrapped, (2, 1, 3)))
        return results

    options: dict[str, Any] = {"gradient_weighting": weighting, "gradient_as_bucket_view": view}
    for first, *others in on_ranks(2, work, net(), static_graph=True, **options):
        for other in others:
            assert_close(first, other, atol=0)


@pytest.mark.parametrize("mode", [*MODES, "auto"])
def test_ddp_sync_context_without_a_trainer(mode: str) -> None:
    """Composer's `_ddp_sync_context`: the same gradients in any training loop, under each mode."""
    model = net()

    def train(rank: int) -> list[torch.Tensor | None]:
        wrapped = bare(copies[rank])
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        for number in range(3):
            with gradient_sync_context(wrapped, optimizer, number == 2, mode):
                (loss_of(wrapped, batch(rank, number)) / 3).backward()
        return [parameter.grad for parameter in wrapped.parameters()]

    copies = [net(), net(), net()]
    assert_each(run_ranks(3, train), alone(model, batches(3, 3)))


def test_nothing_is_distributed() -> None:
    """In one process without a group the block does nothing."""
    model = net()
    with gradient_sync_context(model, torch.optim.SGD(model.parameters(), lr=0.1)):
        loss_of(model, batch(0)).backward()
    assert_close([parameter.grad for parameter in model.parameters()], alone(net(), [batch(0)]))


def test_a_module_that_ddp_has_not_wrapped() -> None:
    """A module that is not wrapped is an error, but not with forced sync, which does not need DDP."""
    models = [net(), net()]

    def train(rank: int) -> list[torch.Tensor | None]:
        with pytest.raises(InvalidTypeError, match="forced_sync"), gradient_sync_context(models[rank]):
            loss_of(models[rank], batch(rank)).backward()
        models[rank].zero_grad()
        with gradient_sync_context(models[rank], mode="forced_sync"):
            loss_of(models[rank], batch(rank)).backward()
        return [parameter.grad for parameter in models[rank].parameters()]

    assert_each(run_ranks(2, train), alone(net(), batches(2, 1)))


def test_prepare_ddp_module() -> None:
    """Composer's `_prepare_ddp_module`: a module without parameters to train is not wrapped, nor averaged."""

    def work(strategy: ThreadedStrategy, plain: nn.Module) -> tuple[type, list[Any]]:
        with strategy.gradient_sync_context(plain):
            plain(batch(0))
        return type(plain), [parameter.grad for parameter in plain.parameters()]

    assert on_ranks(2, work, net().requires_grad_(False)) == [(nn.Sequential, [None] * 4)] * 2
    strategy = ThreadedStrategy(0, 1)
    raises(LifecycleError, "a process group", strategy.launch, lambda s: s.setup_module(net()))


@pytest.mark.parametrize("hook", [None, "fp16_compress"])
def test_a_module_is_wrapped_once(hook: str | None) -> None:
    """Another call for the same module, or for its wrapper, returns the wrapper that exists."""

    def work(strategy: ThreadedStrategy, wrapped: nn.Module) -> list[torch.Tensor | None]:
        assert strategy.setup_module(wrapped) is wrapped
        assert strategy.setup_module(strategy.unwrap_module(wrapped)) is wrapped
        assert len(strategy.job.modules.wrappers) == 1
        return accumulate(strategy, wrapped)

    with counted_reductions() as sizes:
        results = on_ranks(2, work, net(), comm_hook=hook)
    expected = alone(net(), batches(2, 2))
    for rank, result in enumerate(results):
        assert_close(result, expected, 1e-2 if hook else 1e-12)
        assert sizes[rank].count(21) == 1


def test_a_wrapper_follows_what_is_trained() -> None:
    """The wrapper of a module of which other parameters are trained now averages them."""
    model: Any = net()
    model[0].requires_grad_(False)

    def work(strategy: ThreadedStrategy, wrapped: nn.Module) -> list[torch.Tensor | None]:
        again = strategy.setup_module(strategy.unwrap_module(wrapped).requires_grad_(True))
        assert again is wrapped
        return accumulate(strategy, again)

    assert_each(on_ranks(2, work, model), alone(net(), batches(2, 2)))


def test_a_compiled_module_is_wrapped_once() -> None:
    """What `torch.compile` returned stands for its module."""

    def work(strategy: ThreadedStrategy, wrapped: nn.Module) -> bool:
        compiled: Any = torch.compile(strategy.unwrap_module(wrapped), backend="eager")
        return strategy.setup_module(compiled) is wrapped

    assert on_ranks(1, work, net()) == [True]


def test_a_module_that_torch_has_wrapped_is_refused() -> None:
    """A wrapper that the strategy has not made averages in its own way."""

    def work(strategy: ThreadedStrategy, wrapped: nn.Module) -> None:
        raises(ConfigurationError, "configure_ddp", strategy.setup_module, bare(net()))

    on_ranks(1, work, net())


def test_nothing_to_block() -> None:
    """`no_backward_sync(enabled=False)` does nothing, so the module may be a plain one."""

    def work(strategy: ThreadedStrategy, wrapped: nn.Module) -> None:
        with strategy.no_backward_sync(net(), enabled=False):
            pass
        with pytest.raises(InvalidTypeError, match=r"^module=.* is of type Sequential: .* setup_module\(\)"):
            strategy.no_backward_sync(net())

    on_ranks(1, work, net())
    with SingleDeviceStrategy().no_backward_sync(net(), enabled=False):
        pass
