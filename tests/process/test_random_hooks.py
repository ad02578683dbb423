"""Outside of forward, backward and data all ranks draw the same random numbers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils import prune

from rankwise import seed_everything
from rankwise.callbacks import Callback
from tests.helpers.parameters import first
from tests.process.training_tasks import Regression, loader, saving_each_step, step_by_hand, trainer_on

STEP_HOOKS = (
    *("on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_zero_grad"),
    *("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_train_batch_end"),
    *("on_train_epoch_end", "on_validation_start", "on_validation_epoch_end", "on_save_checkpoint"),
)


def draws() -> list[float]:
    """Draw one number from each generator."""
    return [float(torch.rand(())), random.random(), float(np.random.rand())]


class NoisySGD(torch.optim.SGD):
    """Draws after each step; notes what it has drawn."""

    def __init__(self, *arguments: Any, noted: list[Any], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.noted = noted

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.noted.append(("step", draws()))
        return loss


class Line(Regression):
    """Gathers what each rank has noted; by default its weights."""

    gathered: list[Any]

    def on_train_end(self) -> None:
        self.gathered = self.trainer.strategy.all_gather_object(self.noted())

    def noted(self) -> Any:
        return [value.tolist() for value in self.state_dict().values()]


class Drawing(Line):
    """Draws random numbers in every hook, and in the steps; both are noted apart."""

    def __init__(self) -> None:
        super().__init__()
        self.shared: list[tuple[str, list[float]]] = []
        self.own: list[list[float]] = []
        self.get_parameter("net.0.weight").register_hook(self.draw_for_gradient)

    def noted(self) -> Any:
        callback: Any = self.trainer.callbacks[0]
        own = {"shared": self.shared, "own": self.own, "callback": callback.drawn}
        return {**own, "weights": super().noted()}

    def draw_for_gradient(self, gradient: Tensor) -> None:
        self.shared.append(("tensor hook", draws()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.own.append(draws())
        loss = super().training_step(batch, batch_idx)
        if not self.automatic_optimization:
            step_by_hand(self, loss)
            self.own.append(draws())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.own.append(draws())

    def on_validation_batch_start(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.shared += [("first batch", draws())][batch_idx:]

    def on_validation_batch_end(self, *arguments: Any) -> None:
        draws()  # on ranks with different numbers of batches

    def configure_optimizers(self) -> Any:
        return NoisySGD(self.parameters(), lr=0.01, noted=self.shared)


class Manual(Drawing):
    automatic_optimization = False


class DrawingInMore(Drawing):
    """Draws in the hooks of automatic optimisation too."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.shared.append(("optimizer_zero_grad", draws()))
        optimizer.zero_grad()

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        self.shared.append(("optimizer_step", draws()))
        optimizer.step(optimizer_closure)

    def configure_gradient_clipping(self, *arguments: Any) -> None:
        self.shared.append(("configure_gradient_clipping", draws()))

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self.rate)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def rate(self, step: int) -> float:
        self.shared.append(("rate", draws()))
        return 1.0


for name in STEP_HOOKS:

    def _hook(self: Drawing, *arguments: Any, name: str = name) -> None:
        self.shared.append((name, draws()))

    setattr(Drawing, name, _hook)


class DrawingCallback(Callback):
    """Draws on rank 0 alone in one hook, and on each in the next."""

    def __init__(self) -> None:
        self.drawn: list[list[float]] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 0:
            draws()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.drawn.append(draws())


def trained(module: Drawing, path: Any = None, callbacks: Any = None, **options: Any) -> list[Any]:
    """Train two epochs; return what each of two ranks has drawn."""
    seed_everything(1)
    callbacks = [DrawingCallback(), *filter(None, [callbacks])]
    trainer = trainer_on(2, max_epochs=2, num_sanity_val_steps=0, callbacks=callbacks, **options)
    trainer.fit(module, loader(12, 2), loader(3, 1), ckpt_path=path)  # validation: other numbers of batches
    return module.gathered


@pytest.mark.parametrize("kind", [Drawing, pytest.param(DrawingInMore, marks=pytest.mark.quick), Manual])
def test_hooks_and_optimizers_draw_the_same_on_all_ranks(kind: type[Drawing]) -> None:
    """Also after one rank drew more, and validated other batches; steps draw each rank's own, all are new."""
    first, second = trained(kind())
    for what in ("shared", "callback", "weights"):
        assert first[what] == second[what]
    assert len(first["shared"]) > 40
    assert not [numbers for numbers in first["own"] if numbers in second["own"]]
    numbers = [tuple(each) for each in [*(drawn for _, drawn in first["shared"]), *first["own"]]]
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("kind", first(1, [DrawingInMore, Drawing]))
def test_a_run_that_resumes_draws_the_same(kind: type[Drawing], tmp_path: Path) -> None:
    """A run that resumes within an epoch draws what the whole run draws, in hooks and in steps."""
    whole = trained(kind(), **saving_each_step(tmp_path))
    rest = trained(kind(), path=tmp_path / "step=2.ckpt")
    for before, after in zip(whole, rest, strict=True):
        assert after["weights"] == before["weights"]
        assert after["own"] == before["own"][-len(after["own"]) :]
        assert len(after["own"]) > 4
        shared = [each for each in before["shared"] if each[0] != "on_save_checkpoint"]
        assert after["shared"][-20:] == shared[-20:]


class OwnNumbers(Line):
    """Draws in hooks and in steps, of one process."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[float] = []

    def on_train_start(self) -> None:
        torch.manual_seed(7)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.drawn.append(float(torch.rand(())))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.drawn.append(float(torch.rand(())))
        return super().training_step(batch, batch_idx)


@pytest.mark.quick
def test_one_process_has_one_stream() -> None:
    """In one process hooks and steps draw from the program's generators, in order."""
    module = OwnNumbers()
    trainer_on(1, max_steps=3).fit(module, loader(12, 2))
    generator = torch.Generator().manual_seed(7)
    assert module.drawn == [float(torch.rand((), generator=generator)) for _ in range(6)]


class ChangingWeights(Line):
    """Changes its weights by random numbers: `kind` says where."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def on_train_epoch_start(self) -> None:
        if self.kind == "reset" and self.current_epoch == 1:
            torch.nn.init.normal_(self.get_parameter("net.0.weight"))
        if self.kind == "pruning" and self.current_epoch == 0:
            prune.random_unstructured(self.net[0], "weight", 0.5)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters() if self.kind == "gradient noise" else ():
            if parameter.grad is not None:
                parameter.grad.add_(torch.randn_like(parameter))

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        if self.kind == "optimizer hook":
            optimizer.register_step_post_hook(add_noise)
        return optimizer


@torch.no_grad()
def add_noise(optimizer: Any, *arguments: Any) -> None:
    """Add noise to all parameters of an optimizer."""
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.add_(torch.randn_like(parameter))


@pytest.mark.parametrize("kind", first(2, ["reset", "pruning", "gradient noise", "optimizer hook"]))
def test_weights_stay_the_same_on_all_ranks(kind: str) -> None:
    """Weights that hooks change by random numbers are the same on three ranks."""
    module = ChangingWeights(kind)
    trainer_on(3, max_epochs=2).fit(module, loader(12, 2))
    assert module.gathered == [module.gathered[0]] * 3


class Preparing(Line):
    """Draws where only one process does, and then on each rank."""

    drawn = 0.0

    def prepare_data(self) -> None:
        draws()

    def setup(self, stage: str) -> None:
        self.drawn = float(torch.rand(()))

    def noted(self) -> float:
        return self.drawn


def test_what_is_drawn_to_prepare_data() -> None:
    """What `prepare_data` draws in one process changes the numbers of all ranks, as in one process."""
    found = []
    for world_size in (1, 2):
        torch.manual_seed(5)
        module = Preparing()
        trainer_on(world_size, max_epochs=1).fit(module, loader(8, 2))
        found += module.gathered
    assert found == [found[0]] * 3
