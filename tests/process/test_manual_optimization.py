"""Manual optimization: ranks have equal gradients and one process's weights; windows are saved."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from rankwise import DDPStrategy, Trainer, TrainingModule
from rankwise.errors import WorkerRaisedError
from tests.helpers.parameters import first, in_turn
from tests.process.helpers import count_calls, ddp
from tests.process.training_tasks import FEATURES, loader, quiet_trainer, saving_each_step, trainer_on


class Gan(TrainingModule):
    """A generator and a discriminator in float64; notes how far gradients and buffers of the ranks differ."""

    is_compared = True
    differences = 0.0
    reductions = 0
    batches: Tensor

    def __init__(self, ways: str = "plain") -> None:
        super().__init__()
        self.automatic_optimization = False
        self.ways = ways
        torch.manual_seed(5)
        self.generator = nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, 2)).double()
        self.discriminator = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1)).double()
        self.unused = nn.Linear(1, 1).double()
        self.register_buffer("batches", torch.zeros((), dtype=torch.double))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.generator(x)
        return made

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.note(self.batches)
        self.batches.add_(1 + self.global_rank)  # DDP makes buffers rank 0's before each forward pass
        generate, discriminate = self.optimizers()
        x, y = batch
        real = torch.cat([y, y.sin()], dim=1)
        with_both = self.ways != "toggled"
        if not with_both:
            self.toggle_optimizer(discriminate)
        discriminate.zero_grad()
        made = self(x) if with_both else self(x).detach()
        with self.no_backward_sync(enabled=self.ways == "blocked"):
            self.run_backward((1 - self.discriminator(real)).square().mean(), is_equal=self.ways != "blocked")
        self.run_backward(self.discriminator(made).square().mean())
        discriminate.step()
        if not with_both:
            self.untoggle_optimizer(discriminate)
            self.toggle_optimizer(generate)
        generate.zero_grad()
        self.run_backward((1 - self.discriminator(self(x))).square().mean())
        generate.step()
        if not with_both:
            self.untoggle_optimizer(generate)

    def run_backward(self, loss: Tensor, *, is_equal: bool = True) -> None:
        before = len(REDUCTIONS)
        self.manual_backward(loss)
        self.reductions += len(REDUCTIONS) - before
        if is_equal:
            gradients = [each.grad for each in self.parameters() if each.grad is not None]
            self.note(nn.utils.parameters_to_vector(gradients))

    def note(self, tensor: Tensor) -> None:
        if self.is_compared and self.trainer.world_size > 1:
            first, second = self.trainer.strategy.all_gather(tensor.detach())
            self.differences += (first - second).abs().max().item()

    def on_train_end(self) -> None:
        assert self.unused.weight.grad is None

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.generator.parameters(), lr=0.01),
            torch.optim.SGD(self.discriminator.parameters(), lr=0.1),
        ]


REDUCTIONS: list[str] = []


def weights(module: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(module.parameters()).detach()


@pytest.mark.parametrize(
    ("ways", "options"),
    [
        ("plain", {}),
        ("plain", {"static_graph": True}),
        pytest.param("plain", {"find_unused_parameters": True}, marks=pytest.mark.quick),
        pytest.param("toggled", {}, marks=pytest.mark.quick),
        ("blocked", {}),
    ],
)
def test_manual_backward_and_toggle_optimizer_on_two_ranks(
    ways: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three backward passes for two optimizers in a step: one reduction each, or two where one is blocked."""
    count_calls(monkeypatch, REDUCTIONS, "all_reduce")
    alone, expected = trainer_on(1, max_epochs=2), Gan(ways)
    alone.fit(expected, loader(40, 8))
    trainer, module = quiet_trainer(ddp("fork", **options), 2, max_epochs=2), Gan(ways)
    trainer.fit(module, loader(40, 4))
    assert trainer.global_step == alone.global_step == 20
    assert module.differences == 0
    assert module.reductions == 10 * (2 if ways == "blocked" else 3)
    torch.testing.assert_close(weights(module), weights(expected), rtol=0, atol=1e-9)
    assert not torch.equal(next(module.parameters()), next(Gan().parameters()))


def test_a_rank_that_has_run_out_takes_part() -> None:
    """With an uneven last batch the padding steps have no weight: the weights are one process's."""
    expected, module = Gan(), Gan()
    trainer_on(1, max_epochs=2).fit(expected, loader(33, 8))
    module.is_compared = False  # there are no collectives in steps that some ranks repeat
    trainer_on(2, max_epochs=2, uneven_inputs="join").fit(module, loader(33, 4))
    torch.testing.assert_close(weights(module), weights(expected), rtol=0, atol=1e-9)


class Hooked(DDPStrategy):
    """Registers a communication hook with its wrapper, by torch's own means."""

    hook: Any = staticmethod(fp16_compress_hook)
    state: Any = None

    def configure_ddp(self, module: nn.Module, device_ids: list[int] | None) -> DistributedDataParallel:
        wrapper = super().configure_ddp(module, device_ids)
        wrapper.register_comm_hook(self.state, self.hook)
        return wrapper


def test_a_hook_averages() -> None:
    """Gradients go through the communication hook: both ranks have the same, with its rounding."""
    exact, rounded = Gan(), Gan()
    quiet_trainer(ddp("fork"), 2, max_epochs=1).fit(exact, loader(40, 4))
    quiet_trainer(Hooked(start_method="fork"), 2, max_epochs=1).fit(rounded, loader(40, 4))
    assert rounded.differences == 0
    mine, theirs = weights(rounded.discriminator), weights(exact.discriminator)
    assert not torch.equal(mine, theirs)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-2)


def test_a_hook_that_remembers_is_refused() -> None:
    """A hook that keeps gradients between steps is refused before training."""
    strategy = Hooked(start_method="fork")
    strategy.hook, strategy.state = powerSGD_hook, PowerSGDState(None)
    with pytest.raises(WorkerRaisedError, match="PowerSGDState cannot be used in manual optimisation"):
        quiet_trainer(strategy, 2, max_epochs=1).fit(Gan(), loader(8, 4))


BATCHES = 5  # of an epoch, so that windows of two batches end in the next one


class Accumulating(TrainingModule):
    """One optimizer steps for each batch, the other for every second one."""

    number: Tensor

    def __init__(self, ways: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.ways = ways
        torch.manual_seed(5)
        self.often = nn.Linear(FEATURES, 1).double()
        self.seldom = nn.Linear(FEATURES, 1).double()
        self.register_buffer("number", torch.zeros((), dtype=torch.long))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.number += 1
        steps = (self.step_often, self.step_seldom)
        for step in reversed(steps) if self.ways == "blocked first" else steps:
            step(*batch)

    def step_often(self, x: Tensor, y: Tensor) -> None:
        optimizer = self.optimizers()[0]
        with optimizer.toggled():
            optimizer.zero_grad()
            self.manual_backward(nn.functional.mse_loss(self.often(x), y))
            optimizer.step()

    def step_seldom(self, x: Tensor, y: Tensor) -> None:
        optimizer = self.optimizers()[1]
        is_last = int(self.number) % 2 == 0
        if not is_last and self.ways != "never cleared":
            optimizer.zero_grad()
        is_blocked = self.ways.startswith("blocked") and not is_last
        with optimizer.toggled(), self.no_backward_sync(is_blocked):
            self.manual_backward(nn.functional.mse_loss(self.seldom(x), y) / 2)
        if is_last:
            optimizer.step()

    def configure_optimizers(self) -> Any:
        layers = (self.often, self.seldom)
        return [torch.optim.SGD(layer.parameters(), lr=0.01, momentum=0.9) for layer in layers]


def fitted(ways: str, devices: int, ckpt_path: Path | None = None, **options: Any) -> tuple[Trainer, Tensor]:
    trainer, module = trainer_on(devices, max_epochs=2, **options), Accumulating(ways)
    trainer.fit(module, loader(8 * BATCHES, 8 // devices), ckpt_path=ckpt_path)
    return trainer, weights(module)


@pytest.mark.parametrize(
    ("ways", "devices"), first(2, in_turn(["averaged", "blocked", "never cleared", "blocked first"], [1, 2]))
)
def test_a_checkpoint_has_the_gradients(ways: str, devices: int, tmp_path: Path) -> None:
    """A run that goes on between the batches of a window ends with the same weights."""
    trainer, expected = fitted(ways, devices, **saving_each_step(tmp_path))
    assert trainer.global_step == 3 * BATCHES
    for step in (1, 3, 7):
        _, found = fitted(ways, devices, tmp_path / f"step={step}.ckpt")
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_another_number_of_ranks(tmp_path: Path) -> None:
    """Gradients that two ranks have not averaged yet are averaged for a run on one."""
    _, expected = fitted("blocked first", 2, **saving_each_step(tmp_path))
    _, found = fitted("blocked first", 1, tmp_path / "step=4.ckpt")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
