"""Exact weighting: batches of different sizes on different ranks, and the average of one process on all."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

from rankwise import Trainer, TrainingModule
from rankwise.errors import ConfigurationError, InvalidArgumentError, ProcessGroupError, UnknownNameError
from rankwise.strategies import DDPStrategy, SingleDeviceStrategy
from tests.helpers.threaded import ThreadedStrategy, counted_reductions, run_ranks
from tests.process.training_tasks import quiet_trainer
from tests.unit.gradient_sync.helpers import alone, assert_close, batch, loss_of, net, on_ranks

SIZES = ((4, 1), (3, 2), (0, 5))  # of each rank's two microbatches


@pytest.mark.parametrize("bucket_cap_mb", [25, 0.0001])
@pytest.mark.parametrize("mode", ["single_auto_sync", "multi_auto_sync", "forced_sync"])
def test_logged_weights(mode: str, bucket_cap_mb: float) -> None:
    """Ranks and microbatches of all sizes, 0 too: one process's gradients, at no further collective.

    With many buckets too, of which the first alone carries the weight.
    """
    model = net()
    everything = [batch(rank, n, size) for rank in range(3) for n, size in enumerate(SIZES[rank]) if size]
    expected = alone(model, everything)
    options: dict[str, Any] = {"sync_mode": mode, "bucket_cap_mb": bucket_cap_mb}

    def window(strategy: ThreadedStrategy, wrapped: nn.Module) -> tuple[int, list[Tensor | None]]:
        rank = strategy.global_rank
        before = len(counted.get(rank, ()))
        for number, size in enumerate(SIZES[rank]):
            with strategy.gradient_sync_context(wrapped, is_final_microbatch=number == 1):
                loss = loss_of(wrapped, batch(rank, number, max(1, size)))  # there is no mean of nothing
                is_weighted = strategy.gradient_weighting is not None
                (strategy.weighted_loss(loss, size) if is_weighted else loss).backward()
        gradients = [p.grad for p in strategy.unwrap_module(wrapped).parameters()]
        return len(counted.get(rank, ())) - before, gradients

    with counted_reductions() as counted:
        weighted = on_ranks(3, window, model, gradient_weighting="logged", **options)
        plain = on_ranks(3, window, model, **options)
    for (reductions, gradients), (as_many, _) in zip(weighted, plain, strict=True):
        assert_close(gradients, expected)
        assert reductions == as_many > 0


def test_several_windows_and_rebuilt_buckets() -> None:
    """Weights of one window are forgotten in the next; DDP makes new buckets in between."""

    def train(strategy: ThreadedStrategy, wrapped: nn.Module) -> list[Tensor]:
        seen = []
        for step in range(4):
            wrapped.zero_grad()
            size = 1 + (step + strategy.global_rank) % 3
            with strategy.gradient_sync_context(wrapped):
                samples = batch(strategy.global_rank, step, size)
                strategy.weighted_loss(loss_of(wrapped, samples), torch.tensor(float(size))).backward()
            seen.append(torch.cat([p.grad.flatten() for p in wrapped.parameters() if p.grad is not None]))
        return seen

    model = net()
    for seen in on_ranks(2, train, model, gradient_weighting="logged", bucket_cap_mb=0.0001):
        for step, mine in enumerate(seen):
            samples = [batch(rank, step, 1 + (step + rank) % 3) for rank in range(2)]
            theirs = torch.cat([g.flatten() for g in alone(model, samples) if g is not None])
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_a_window_of_no_weight() -> None:
    """Where every weight is 0 there is nothing to average, and no NaN."""

    def train(strategy: ThreadedStrategy, wrapped: nn.Module) -> float:
        with strategy.gradient_sync_context(wrapped):
            strategy.weighted_loss(loss_of(wrapped, batch(0)), 0).backward()
        return float(sum(p.grad.abs().sum() for p in wrapped.parameters() if p.grad is not None))

    for mode in ("single_auto_sync", "forced_sync"):
        assert on_ranks(2, train, net(), gradient_weighting="logged", sync_mode=mode) == [0, 0]


def test_bf16_compress_with_weights() -> None:
    """bfloat16 has room for sums of gradients times weights; the weight itself is sent exactly."""

    def train(strategy: ThreadedStrategy, wrapped: nn.Module) -> list[Tensor | None]:
        size = (100_001, 300_003)[strategy.global_rank]
        with strategy.gradient_sync_context(wrapped):
            strategy.weighted_loss(loss_of(wrapped, batch(strategy.global_rank, 0, 1)), size).backward()
        return [p.grad for p in strategy.unwrap_module(wrapped).parameters()]

    model = net()
    (loss_of(model, batch(0, 0, 1)) * 100_001 + loss_of(model, batch(1, 0, 1)) * 300_003).div(
        400_004
    ).backward()
    expected = [p.grad for p in model.parameters()]
    options: dict[str, Any] = {"comm_hook": "bf16_compress", "bucket_cap_mb": 0.0001}
    for result in on_ranks(2, train, net(), gradient_weighting="logged", **options):
        assert_close(result, expected, atol=2e-2)


@pytest.mark.parametrize("hook", ["fp16_compress", "powersgd", "noop", lambda state, bucket: None])
def test_hooks_that_cannot_carry_weights(hook: Any) -> None:
    """They are refused in the constructor, and "samples", which goes with all, is named."""
    with pytest.raises(ConfigurationError, match="samples"):
        DDPStrategy(comm_hook=hook, gradient_weighting="logged")
    assert DDPStrategy(comm_hook=hook, gradient_weighting="samples").gradient_weighting == "samples"


def test_wrong_names_and_weights() -> None:
    """A weighting that is none, a weight that cannot be one, and one that nobody asked for."""
    with pytest.raises(UnknownNameError, match="Did you mean 'samples'"):
        DDPStrategy(gradient_weighting="sample")
    strategy = DDPStrategy(gradient_weighting="logged")
    for wrong in (-1, float("nan")):
        with pytest.raises(InvalidArgumentError, match="from 0 on"):
            strategy.weighted_loss(torch.ones(()), wrong)
    with pytest.raises(ConfigurationError, match="nothing asks for weights"):
        DDPStrategy().weighted_loss(torch.ones(()), 1)


def test_a_loss_that_bypasses_the_module() -> None:
    """Its weight would never be sent, and the others would take the next step's for it."""

    def train(strategy: ThreadedStrategy, wrapped: nn.Module) -> None:
        with strategy.gradient_sync_context(wrapped):
            strategy.weighted_loss(torch.ones((), requires_grad=True), 1).backward()

    with pytest.raises(ProcessGroupError, match="reached no parameter"):
        on_ranks(1, train, net(), gradient_weighting="logged")


# ------------------------------------------------------------------------------------------- the Trainer


class Fit(TrainingModule):
    """Fits sums; may say what its batches weigh, by logging or returning it."""

    def __init__(self, says: str = "") -> None:
        super().__init__()
        self.net = net()
        self.says = says

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = loss_of(self.net, batch[0])
        if self.says == "logs":
            self.log_weight(len(batch[0]))
        return {"loss": loss, "weight": len(batch[0])} if self.says == "returns" else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def dataset(count: int) -> TensorDataset:
    return TensorDataset(batch(9, 9, count))


def by_hand(count: int, world_size: int, batch_size: int, accumulate: int) -> Tensor:
    """Train one process on each global window, concatenated."""
    model = Fit()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    [samples] = dataset(count).tensors
    shares = [samples[rank::world_size] for rank in range(world_size)]
    for start in range(0, max(map(len, shares)), batch_size * accumulate):
        window = torch.cat([share[start : start + batch_size * accumulate] for share in shares])
        optimizer.zero_grad()
        loss_of(model.net, window).backward()
        optimizer.step()
    return flat(model)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def fit_on_ranks(world_size: int, loader: Any, says: str = "", accumulate: int = 1, **options: Any) -> Tensor:
    """Fit one epoch on threads; return the weights, which are the same on all."""
    modules = [Fit(says) for _ in range(world_size)]

    def fit(rank: int) -> Tensor:
        strategy = ThreadedStrategy(rank, world_size, **options)
        trainer = quiet_trainer(strategy, world_size, max_epochs=1, accumulate_grad_batches=accumulate)
        trainer.fit(modules[rank], loader)
        return flat(modules[rank])

    results = run_ranks(world_size, fit)
    assert all(torch.equal(results[0], other) for other in results)
    return results[0]


@pytest.mark.parametrize(("weighting", "says"), [("samples", ""), ("logged", "logs"), ("logged", "returns")])
@pytest.mark.parametrize("mode", ["auto", "forced_sync"])
def test_a_short_last_batch(weighting: str, says: str, mode: str) -> None:
    """11 samples a rank, 3 in a batch and 6 in a window: the last window is of 3 and 2 samples."""
    loader = DataLoader(dataset(22), batch_size=3)
    mine = fit_on_ranks(2, loader, says, 2, gradient_weighting=weighting, sync_mode=mode)
    torch.testing.assert_close(mine, by_hand(22, 2, 3, 2), rtol=0, atol=1e-12)
    assert not torch.allclose(fit_on_ranks(2, loader, "", 2), by_hand(22, 2, 3, 2), rtol=0, atol=1e-6)


class Sized(BatchSampler):
    """Batches of given sizes, one after another."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__(SequentialSampler(range(sum(sizes))), 1, False)
        self.sizes = sizes

    def __iter__(self) -> Any:
        start = 0
        for size in self.sizes:
            yield list(range(start, start + size))
            start += size

    def __len__(self) -> int:
        return len(self.sizes)


@pytest.mark.parametrize("weighting", ["samples", "logged"])
def test_batches_of_all_sizes(weighting: str) -> None:
    """Whole batches of a user's own batch sampler, dealt out: [4, 1], then [2, 5], then [3, 3]."""
    sizes = [4, 1, 2, 5, 3, 3]
    loader = DataLoader(dataset(18), batch_sampler=Sized(sizes))
    mine = fit_on_ranks(2, loader, "logs" if weighting == "logged" else "", gradient_weighting=weighting)
    model = Fit()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    start = 0
    for pair in zip(sizes[::2], sizes[1::2], strict=True):
        optimizer.zero_grad()
        loss_of(model.net, dataset(18).tensors[0][start : start + sum(pair)]).backward()
        optimizer.step()
        start += sum(pair)
    torch.testing.assert_close(mine, flat(model), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("weighting", "says"), [("samples", ""), ("logged", "logs")])
def test_one_process_that_accumulates(weighting: str, says: str) -> None:
    """Batches of different sizes in one window are weighted without any group, too."""
    module = Fit(says)
    strategy = SingleDeviceStrategy(gradient_weighting=weighting, accelerator="cpu")
    trainer = quiet_trainer(strategy, 1, max_epochs=1, accumulate_grad_batches=2)
    trainer.fit(module, DataLoader(dataset(7), batch_size=2))
    torch.testing.assert_close(flat(module), by_hand(7, 1, 2, 2), rtol=0, atol=1e-12)


class Stream(IterableDataset[Tensor]):
    """An iterable data set, whose length nobody knows."""

    def __iter__(self) -> Any:
        return iter(dataset(5).tensors[0])


def trainer_of(accumulate: int = 1, **options: Any) -> Trainer:
    strategy = SingleDeviceStrategy(accelerator="cpu", **options)
    return quiet_trainer(strategy, 1, max_epochs=1, accumulate_grad_batches=accumulate)


def test_unknown_batch_sizes_are_refused() -> None:
    """Nobody knows an iterable data set's batches beforehand: the error says to log them."""
    with pytest.raises(ConfigurationError, match="log_weight"):
        trainer_of(2, gradient_weighting="samples").fit(Fit(), DataLoader(Stream(), batch_size=2))


def test_a_weight_that_is_missing_or_not_asked_for() -> None:
    """Both are errors where they would change gradients; one batch alone needs no weight."""
    loader = DataLoader(dataset(4), batch_size=2)
    with pytest.raises(ConfigurationError, match="has no weight"):
        trainer_of(2, gradient_weighting="logged").fit(Fit(), loader)
    with pytest.raises(ConfigurationError, match="not weighted by it"):
        trainer_of(2).fit(Fit("logs"), loader)
    plain, logging = Fit(), copy.deepcopy(Fit("logs"))
    trainer_of().fit(plain, loader)
    trainer_of().fit(logging, loader)
    assert torch.equal(flat(plain), flat(logging))
