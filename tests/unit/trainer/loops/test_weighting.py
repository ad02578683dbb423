"""Logged weights: large ones, and batches of weight 0, whose loss may be NaN."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from rankwise import TrainingModule
from rankwise.errors import NonFiniteLossError
from rankwise.strategies import SingleDeviceStrategy
from tests.helpers.threaded import ThreadedStrategy, run_ranks
from tests.process.training_tasks import quiet_trainer
from tests.unit.gradient_sync.helpers import batch, loss_of, net

WINDOW = 2


# ------------------------------------------------------------------------ large weights


class Weighed(TrainingModule):
    """Logs weights of 0 to 2, times `size`."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.net = net().float()
        self.size = size

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log_weight(self.size * ((batch_idx + self.global_rank) % 3))
        return loss_of(self.net, batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ManuallyWeighed(Weighed):
    """The same in manual optimisation."""

    def __init__(self, size: float) -> None:
        super().__init__(size)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        weight = self.size * ((batch_idx + self.global_rank) % 3)
        self.manual_backward(loss_of(self.net, batch[0]), weight=weight)
        optimizer.step()


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(batch(0, 0, 16).float()), batch_size=1)


def fit(strategy: Any, world_size: int, module: TrainingModule, precision: str, window: int) -> Tensor:
    """Fit in a precision, where any overflow raises; return the weights."""
    options: dict[str, Any] = {"precision": precision, "on_nonfinite": "raise", "max_epochs": 1}
    quiet_trainer(strategy, world_size, accumulate_grad_batches=window, **options).fit(module, loader())
    return nn.utils.parameters_to_vector(module.parameters()).detach()


def fit_alone(size: float, precision: str) -> Tensor:
    strategy = SingleDeviceStrategy(gradient_weighting="logged", accelerator="cpu")
    return fit(strategy, 1, Weighed(size), precision, WINDOW)


def fit_on_two(kind: type[Weighed], size: float, precision: str, mode: str) -> Tensor:
    modules = [kind(size) for _ in range(2)]
    window = WINDOW if kind is Weighed else 1

    def run(rank: int) -> Tensor:
        strategy = ThreadedStrategy(rank, 2, gradient_weighting="logged", sync_mode=mode)
        return fit(strategy, 2, modules[rank], precision, window)

    first, second = run_ranks(2, run)
    assert torch.equal(first, second)
    return first


@pytest.mark.parametrize("precision", ["16-true", "16-master"])
def test_one_process(precision: str) -> None:
    """A million times the weights give the same model, to the bit."""
    expected = fit_alone(1, precision)
    assert torch.equal(fit_alone(2.0**20, precision), expected)
    assert expected.isfinite().all()


@pytest.mark.parametrize(
    ("kind", "mode"), [(Weighed, "auto"), (Weighed, "forced_sync"), (ManuallyWeighed, "auto")]
)
@pytest.mark.parametrize("precision", ["16-true", "16-master"])
def test_two_ranks(kind: type[Weighed], mode: str, precision: str) -> None:
    """The same on two ranks, in every way of averaging gradients."""
    expected = fit_on_two(kind, 1, precision, mode)
    assert torch.equal(fit_on_two(kind, 2.0**20, precision, mode), expected)
    assert expected.isfinite().all()


def test_weights_that_grow() -> None:
    """The unit follows the weights."""

    class Growing(Weighed):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log_weight(4.0 ** (batch_idx // WINDOW * 2))
            return loss

    strategy = SingleDeviceStrategy(gradient_weighting="logged", accelerator="cpu")
    assert fit(strategy, 1, Growing(1), "16-true", WINDOW).isfinite().all()


def test_overflow_by_a_weight() -> None:
    """An overflow from a weight much larger than the others is not reported as a rank's loss."""

    class Sudden(Weighed):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log_weight(1.0 if batch_idx < WINDOW else 1e30)
            return loss

    strategy = SingleDeviceStrategy(gradient_weighting="logged", accelerator="cpu")
    with pytest.raises(NonFiniteLossError, match="though every rank's loss is finite"):
        fit(strategy, 1, Sudden(1), "16-true", WINDOW)


# ------------------------------------------------------------------------ batches of weight 0


class Tokens(TrainingModule):
    """A mean over the samples that count; over none it is NaN, or 0 if `at_least` says so."""

    def __init__(self, at_least: float) -> None:
        super().__init__()
        self.net = net()
        self.at_least = at_least

    def loss_and_weight(self, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
        samples, counts = batch
        errors = (self.net(samples) - samples.sum(dim=1, keepdim=True)).square().squeeze(1)
        return (errors * counts).sum() / counts.sum().clamp_min(self.at_least), counts.sum()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, weight = self.loss_and_weight(batch)
        return {"loss": loss, "weight": weight}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ManualTokens(Tokens):
    """The same in manual optimisation."""

    def __init__(self, at_least: float) -> None:
        super().__init__(at_least)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss, weight = self.loss_and_weight(batch)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss, weight=weight)
        optimizer.step()


def fitted(kind: type[Tokens], at_least: float, policy: str | None, mode: str, window: int = 1) -> Tensor:
    """Fit on two ranks, the second of which has batches in which nothing counts; return the weights."""
    counts = torch.ones(12, dtype=torch.float64)
    counts[[1, 3, 9]] = 0  # of rank 1: its first batch, and a half of its third
    loader = DataLoader(TensorDataset(batch(0, 0, 12), counts), batch_size=2)
    modules = [kind(at_least) for _ in range(2)]

    def fit(rank: int) -> None:
        strategy = ThreadedStrategy(rank, 2, gradient_weighting="logged", sync_mode=mode)
        options: dict[str, Any] = {"max_epochs": 1, "on_nonfinite": policy}
        quiet_trainer(strategy, 2, accumulate_grad_batches=window, **options).fit(modules[rank], loader)

    run_ranks(2, fit)
    weights = [nn.utils.parameters_to_vector(module.parameters()).detach() for module in modules]
    assert torch.equal(weights[0], weights[1])
    return weights[0]


@pytest.mark.parametrize(
    ("kind", "mode", "window"),
    [(Tokens, "auto", 1), (Tokens, "auto", 2), (Tokens, "forced_sync", 1), (ManualTokens, "auto", 1)],
)
@pytest.mark.parametrize("policy", [None, "raise", "skip"])
def test_mean_over_nothing(kind: type[Tokens], mode: str, window: int, policy: str | None) -> None:
    """A NaN loss of weight 0 acts like a loss of 0: no rank raises or skips, and the weights are the same."""
    expected = fitted(kind, 1, policy, mode, window)
    assert torch.equal(fitted(kind, 0, policy, mode, window), expected)
    assert expected.isfinite().all()


class NaNInPadding(Tokens):
    """Returns a NaN loss in padding steps."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, _ = self.loss_and_weight(batch)
        is_repeated = bool(self.previous is batch[0]) if batch_idx else False
        self.previous: Tensor = batch[0]
        return loss * float("nan") if is_repeated else loss


def test_padding_step() -> None:
    """A repeated batch has no effect, even if its loss is NaN."""
    samples = TensorDataset(batch(0, 0, 5), torch.ones(5, dtype=torch.float64))
    loader = DataLoader(samples, batch_size=1)
    modules = [NaNInPadding(0) for _ in range(2)]

    def fit(rank: int) -> None:
        options: dict[str, Any] = {"uneven_inputs": "join", "on_nonfinite": "raise", "max_epochs": 1}
        quiet_trainer(ThreadedStrategy(rank, 2), 2, **options).fit(modules[rank], loader)

    run_ranks(2, fit)
    weights = [nn.utils.parameters_to_vector(module.parameters()).detach() for module in modules]
    assert torch.equal(weights[0], weights[1])
    assert weights[0].isfinite().all()


# ------------------------------------------------------------------------ gradients changed by hooks


class Clipped(Tokens):
    """Limits gradients by the norm of the parameters, without `torch.no_grad`."""

    def limit(self) -> None:
        for parameter in self.parameters():
            gradient: Any = parameter.grad
            gradient.mul_((0.1 * parameter.norm() / gradient.norm()).clamp(max=1))


class ClippedInItsHook(Clipped):
    """In the hook that is for it."""

    def configure_gradient_clipping(self, *arguments: Any) -> None:
        self.limit()


class ClippedBeforeTheStep(Clipped):
    """In the hook before."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.limit()


@pytest.mark.parametrize("mode", ["single_auto_sync", "multi_auto_sync", "forced_sync"])
@pytest.mark.parametrize("kind", [ClippedInItsHook, ClippedBeforeTheStep])
def test_hooks_that_change_gradients(kind: type[Clipped], mode: str) -> None:
    """Gradients may be multiplied by a function of parameters: the weights are those of one process."""
    data = TensorDataset(batch(0, 0, 24), torch.ones(24, dtype=torch.float64))
    single = kind(1)
    strategy = SingleDeviceStrategy(gradient_weighting="logged", accelerator="cpu")
    trainer = quiet_trainer(strategy, 1, max_epochs=1, accumulate_grad_batches=3)
    trainer.fit(single, DataLoader(data, batch_size=4))
    modules = [kind(1) for _ in range(2)]

    def fit(rank: int) -> None:
        strategy = ThreadedStrategy(rank, 2, gradient_weighting="logged", sync_mode=mode)
        trainer = quiet_trainer(strategy, 2, max_epochs=1, accumulate_grad_batches=3)
        trainer.fit(modules[rank], DataLoader(data, batch_size=2))

    run_ranks(2, fit)
    for found, expected in zip(modules[1].parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
