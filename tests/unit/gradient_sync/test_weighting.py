"""Exact weighting: batches of different sizes on different ranks give the average of one process."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, default_collate

from rankwise.errors import ConfigurationError, InvalidArgumentError, ProcessGroupError, UnknownNameError
from rankwise.strategies import DDPStrategy
from tests.helpers.raising import raises
from tests.helpers.threaded import ThreadedStrategy, counted_reductions, run_ranks
from tests.unit.gradient_sync.helpers import (
    SIZES,
    Sums,
    accumulate,
    alone,
    assert_close,
    assert_each,
    batch,
    batches_of,
    fit_alone,
    fit_on_ranks,
    loss_of,
    net,
    on_ranks,
    stepped_alone,
)
from tests.unit.trainer.helpers import Stream


def window(strategy: ThreadedStrategy, wrapped: nn.Module, scale: float = 1.0) -> list[Tensor | None]:
    """Accumulate a window of two microbatches, each with its weight; return its gradients."""
    return accumulate(strategy, wrapped, SIZES[strategy.global_rank], scale)


@pytest.mark.parametrize("bucket_cap_mb", [25, 0.0001])
@pytest.mark.parametrize("mode", ["single_auto_sync", "multi_auto_sync", "forced_sync"])
def test_logged_weights(mode: str, bucket_cap_mb: float) -> None:
    """Ranks and microbatches of all sizes, 0 too: one process's gradients, at no further collective.

    With many buckets too, of which the first alone carries the weight.
    """
    options: dict[str, Any] = {"sync_mode": mode, "bucket_cap_mb": bucket_cap_mb}

    def count(strategy: ThreadedStrategy, wrapped: nn.Module) -> tuple[int, list[Tensor | None]]:
        before = len(counted.get(strategy.global_rank, ()))
        averaged = window(strategy, wrapped)
        return len(counted[strategy.global_rank]) - before, averaged

    with counted_reductions() as counted:
        weighted = on_ranks(3, count, net(), gradient_weighting="logged", **options)
        plain = on_ranks(3, count, net(), **options)
    for (reductions, averaged), (as_many, _) in zip(weighted, plain, strict=True):
        assert_close(averaged, alone(net(), batches_of(SIZES)))
        assert reductions == as_many > 0


def test_a_window_of_no_weight() -> None:
    """If every weight is 0, the gradients are zeros, not NaN."""
    zeros: list[Tensor | None] = [torch.zeros_like(parameter) for parameter in net().parameters()]
    for mode in ("single_auto_sync", "forced_sync"):
        options: dict[str, Any] = {"gradient_weighting": "logged", "sync_mode": mode}
        assert_each(on_ranks(2, lambda s, m: accumulate(s, m, (0,)), net(), **options), zeros, 0)


@pytest.mark.parametrize("hook", ["powersgd", "noop", "post_localsgd", lambda state, bucket: None])
def test_hooks_that_cannot_carry_weights(hook: Any) -> None:
    """Such hooks are errors in the constructor that name "samples", which works with every hook."""
    period = 2 if hook == "post_localsgd" else None
    with pytest.raises(ConfigurationError, match="samples"):
        DDPStrategy(comm_hook=hook, gradient_weighting="logged", model_averaging_period=period)
    strategy = DDPStrategy(comm_hook=hook, gradient_weighting="samples", model_averaging_period=period)
    assert strategy.gradient_weighting == "samples"


# ------------------------------------------------------------------------------------------- how they travel


def expected() -> list[Tensor | None]:
    """Return what one process computes for the window of two ranks."""
    return alone(net(), batches_of(SIZES[:2]))


@pytest.mark.parametrize(
    "options", [{"static_graph": True}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}]
)
def test_weights_with_what_ddp_can_do(options: dict[str, Any]) -> None:
    """Two windows, the second with DDP's rebuilt buckets, give the gradients of one process."""

    def train(strategy: ThreadedStrategy, wrapped: nn.Module) -> list[Tensor | None]:
        window(strategy, wrapped)
        wrapped.zero_grad()
        return window(strategy, wrapped)

    assert_each(on_ranks(2, train, net(), gradient_weighting="logged", **options), expected())


@pytest.mark.parametrize("is_own_wrapper", [False, True])
def test_weights_are_no_unused_parameter(is_own_wrapper: bool) -> None:
    """DDP searches among the model's own parameters, and the search is unnecessary where it finds none."""

    class Finding(ThreadedStrategy):
        def configure_ddp(self, module: nn.Module, device_ids: list[int] | None) -> Any:
            own = {"find_unused_parameters": True} if is_own_wrapper else {}
            return DistributedDataParallel(module, **{**self.ddp_kwargs, **own})

    def run(rank: int) -> int:
        options: Any = {} if is_own_wrapper else {"find_unused_parameters": True}
        strategy = Finding(rank, 2, gradient_weighting="logged", **options)

        def train(_: Any) -> int:
            wrapped: Any = strategy.setup_module(net())
            for _ in range(10):
                assert_close(window(strategy, wrapped), expected())
                wrapped.zero_grad()
            return int(wrapped._get_ddp_logging_data()["num_parameter_tensors"])

        number: int = strategy.launch(train)
        return number

    with pytest.warns(UserWarning, match="found no unused parameter in 10 reductions"):
        found = run_ranks(2, run)
    assert found == [len(list(net().parameters()))] * 2


def test_a_static_graph_with_an_unused_parameter() -> None:
    """An unused last parameter is no error, in any window."""

    class Sparing(nn.Sequential):
        def forward(self, samples: Tensor) -> Tensor:
            for layer in list(self)[:-1]:
                samples = layer(samples)
            return samples

    def train(strategy: ThreadedStrategy, wrapped: nn.Module) -> list[Tensor | None]:
        for _ in range(2):
            window(strategy, wrapped)
            wrapped.zero_grad()
        return window(strategy, wrapped)[:-2]

    model = Sparing(*net().children(), nn.Linear(1, 1).double())
    results = on_ranks(2, train, model, gradient_weighting="logged", static_graph=True)
    assert_each(results, expected())


def test_no_hook_is_needed_and_nothing_is_left() -> None:
    """DDP calls no hook, and the module has the same parameters as before."""

    def look(strategy: ThreadedStrategy, wrapped: Any) -> tuple[Any, ...]:
        window(strategy, wrapped)
        module = strategy.unwrap_module(wrapped)
        return len(wrapped._comm_hooks), list(module.state_dict()), len(list(module.modules()))

    model = net()
    same = (0, list(model.state_dict()), len(list(model.modules())))
    assert on_ranks(2, look, model, gradient_weighting="logged") == [same] * 2


def test_a_scaled_loss() -> None:
    """A gradient scaler's factor is in the gradients, not in the weights."""
    for result in on_ranks(2, lambda s, m: window(s, m, 1024), net(), gradient_weighting="logged"):
        assert_close([None if g is None else g / 1024 for g in result], expected())


def test_parameters_of_16_bits_only() -> None:
    """With 16-bit parameters only, a hook sends the weights in 32 bits."""

    def train(strategy: ThreadedStrategy, wrapped: Any) -> float:
        with strategy.gradient_sync_context(wrapped):
            loss = wrapped(torch.ones(1, 1, dtype=torch.bfloat16)).sum() * (1 - strategy.global_rank)
            strategy.weighted_loss(loss, (257, 3 * 257)[strategy.global_rank]).backward()
        assert len(wrapped._comm_hooks) == 1
        return float(wrapped.module.weight.grad)

    model = nn.Linear(1, 1, bias=False).bfloat16()
    found = on_ranks(2, train, model, gradient_weighting="logged")
    assert found == pytest.approx([0.25, 0.25], abs=2**-9)


def test_a_wrapper_around_a_copy() -> None:
    """If DDP wraps a copy of the module, a hook sends the weights."""

    class Copying(ThreadedStrategy):
        def configure_ddp(self, module: nn.Module, device_ids: list[int] | None) -> Any:
            return super().configure_ddp(net(), device_ids)

    def run(rank: int) -> list[Tensor | None]:
        strategy = Copying(rank, 2, gradient_weighting="logged")
        result: list[Tensor | None] = strategy.launch(lambda s: window(s, s.setup_module(net())))
        return result

    assert_each(run_ranks(2, run), expected())


@pytest.mark.parametrize(
    ("loss", "error", "words"),
    [
        (lambda _, wrapped: loss_of(wrapped, batch(0)), ConfigurationError, "has no weight"),
        (
            lambda strategy, _: strategy.weighted_loss(torch.ones((), requires_grad=True), 1),
            ProcessGroupError,
            "reached no parameter",
        ),
    ],
)
def test_losses_that_are_refused(loss: Any, error: type[Exception], words: str) -> None:
    """One without a weight, and one past the module, whose weight would count in the next step."""

    def train(strategy: ThreadedStrategy, wrapped: nn.Module) -> None:
        with strategy.gradient_sync_context(wrapped):
            loss(strategy, wrapped).backward()

    raises(error, words, on_ranks, 1, train, net(), gradient_weighting="logged")


def test_wrong_names_and_weights() -> None:
    """An unknown weighting, an invalid weight, and a weight without weighting are errors."""
    raises(UnknownNameError, "Did you mean 'samples'", DDPStrategy, gradient_weighting="sample")
    strategy = DDPStrategy(gradient_weighting="logged")
    for wrong in (-1, float("nan")):
        raises(InvalidArgumentError, "from 0 on", strategy.weighted_loss, torch.ones(()), wrong)
    raises(ConfigurationError, "nothing asks for weights", DDPStrategy().weighted_loss, torch.ones(()), 1)


# ------------------------------------------------------------------------------------------- the Trainer


class Fit(Sums):
    """Fits sums; logs or returns the weight of its batches if asked to."""

    def __init__(self, says: str = "") -> None:
        super().__init__()
        self.says = says

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.says == "logs":
            self.log_weight(len(batch[0]))
        loss = self.loss(batch)
        return {"loss": loss, "weight": len(batch[0])} if self.says == "returns" else loss


def dataset(count: int) -> TensorDataset:
    return TensorDataset(batch(9, 9, count))


def by_hand(count: int, world_size: int, batch_size: int, accumulate: int) -> Tensor:
    """Train one process on each global window, concatenated."""
    [samples] = dataset(count).tensors
    parts = [samples[rank::world_size].split(batch_size * accumulate) for rank in range(world_size)]
    return stepped_alone(Fit(), [torch.cat(windows) for windows in zip(*parts, strict=True)])


def fitted(world_size: int, loader: Any, says: str = "", accumulate: int = 1, **options: Any) -> Tensor:
    """Fit one epoch on threads; return the weights, which are the same on all."""
    modules = [Fit(says) for _ in range(world_size)]
    results = fit_on_ranks(modules, loader, options, accumulate_grad_batches=accumulate)
    assert all(torch.equal(results[0], other) for other in results)
    return results[0]


@pytest.mark.full
@pytest.mark.parametrize(("weighting", "says"), [("samples", ""), ("logged", "logs"), ("logged", "returns")])
@pytest.mark.parametrize("mode", ["auto", "forced_sync"])
def test_a_short_last_batch(weighting: str, says: str, mode: str) -> None:
    """11 samples per rank, 3 in a batch and 6 in a window: the last window has batches of 3 and 2 samples."""
    loader = DataLoader(dataset(22), batch_size=3)
    mine = fitted(2, loader, says, 2, gradient_weighting=weighting, sync_mode=mode)
    torch.testing.assert_close(mine, by_hand(22, 2, 3, 2), rtol=0, atol=1e-12)
    assert not torch.allclose(fitted(2, loader, "", 2), by_hand(22, 2, 3, 2), rtol=0, atol=1e-6)


@pytest.mark.parametrize("weighting", ["samples", "logged"])
def test_batches_of_all_sizes(weighting: str) -> None:
    """Whole batches of a user's own batch sampler: [4, 1], then [2, 5], then [3, 3]."""
    indices: Any = [each.tolist() for each in torch.arange(18).split([4, 1, 2, 5, 3, 3])]
    loader = DataLoader(dataset(18), batch_sampler=indices)
    mine = fitted(2, loader, "logs" if weighting == "logged" else "", gradient_weighting=weighting)
    expected = stepped_alone(Fit(), dataset(18).tensors[0].split([4 + 1, 2 + 5, 3 + 3]))
    torch.testing.assert_close(mine, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("weighting", "says"), [("samples", ""), ("logged", "logs")])
def test_one_process_that_accumulates(weighting: str, says: str) -> None:
    """Batches of different sizes in one window are weighted without a process group, too."""
    loader = DataLoader(dataset(7), batch_size=2)
    found = fit_alone(Fit(says), loader, weighting, accumulate_grad_batches=2)
    torch.testing.assert_close(found, by_hand(7, 1, 2, 2), rtol=0, atol=1e-12)


def test_unknown_batch_sizes_are_refused() -> None:
    """The batch sizes of an iterable data set are unknown: the error says to log them."""
    with pytest.raises(ConfigurationError, match="log_weight"):
        fit_alone(
            Fit(),
            DataLoader(Stream(dataset(5).tensors[0]), batch_size=2),
            "samples",
            accumulate_grad_batches=2,
        )


def some_of(count: int, samples: list[Any]) -> Any:
    """Put together so many of the samples, each twice at most."""
    return default_collate((samples * 2)[:count])


@pytest.mark.parametrize(("world_size", "accumulate"), [(1, 2), (2, 1), (3, 1)])
def test_samples_that_are_left_out(world_size: int, accumulate: int) -> None:
    """A collate function that drops samples makes batches of unknown sizes; so does one that makes more."""
    for count in (2, 8):
        loader = DataLoader(dataset(24), 4, collate_fn=partial(some_of, count))
        with pytest.raises(
            ConfigurationError, match=r"does not know the size of batch 0.*\n.*\n.*log_weight"
        ):
            fitted(world_size, loader, accumulate=accumulate, gradient_weighting="samples")


def fit_own_split(make_loader: Callable[[int], Any]) -> list[Tensor]:
    """Fit on two threads, each with a loader of its own that rankwise does not split; return the weights."""
    options = {"gradient_weighting": "samples"}
    return fit_on_ranks([Fit(), Fit()], make_loader, options, use_distributed_sampler=False)


def test_sizes_that_are_one_ranks_own_are_refused() -> None:
    """Loaders that are not split have batch sizes that other ranks do not know, which is an error."""
    with pytest.raises(ConfigurationError, match=r"split over 1, not over 2 ranks.*\n.*log_weight"):
        fit_own_split(lambda rank: DataLoader(dataset(4 if rank == 0 else 1), batch_size=4))


def test_a_distributed_sampler_of_the_users_is_weighed() -> None:
    """With a `DistributedSampler` each rank knows the others' batch sizes."""

    def make_loader(rank: int) -> Any:
        data = dataset(10)
        return DataLoader(data, 3, sampler=DistributedSampler(data, 2, rank, shuffle=False))

    first, second = fit_own_split(make_loader)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, by_hand(10, 2, 3, 1), rtol=0, atol=1e-12)


def test_a_weight_that_is_missing_or_not_asked_for() -> None:
    """Both are errors if they would change gradients; a single batch needs no weight."""
    loader = DataLoader(dataset(4), batch_size=2)
    with pytest.raises(ConfigurationError, match="has no weight"):
        fit_alone(Fit(), loader, "logged", accumulate_grad_batches=2)
    with pytest.raises(ConfigurationError, match="not weighted by it"):
        fit_alone(Fit("logs"), loader, accumulate_grad_batches=2)
    assert torch.equal(fit_alone(Fit(), loader), fit_alone(copy.deepcopy(Fit("logs")), loader))
