"""Optimizers that compute gradients several times in a step, in automatic and in manual optimisation."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from rankwise.callbacks import ModelCheckpoint
from rankwise.errors import ConfigurationError
from rankwise.precision import MasterWeightsPrecision, MixedPrecision, Precision
from tests.helpers.exactness import weights
from tests.unit.gradient_sync.helpers import Sums, assert_each, batch, fit_on_ranks, loss_of
from tests.unit.trainer.helpers import Line, Stream, loader, trainer

STEPS = 3
SIZES = ((3, 1), (2, 2), (1, 4))  # of the two ranks' batches, step by step
Sizes = tuple[tuple[int, ...], ...]


class Fit(Sums):
    """Fits sums by L-BFGS, and counts its losses."""

    def __init__(self, *, by_hand: bool = False, **options: Any) -> None:
        super().__init__(by_hand=by_hand)
        self.options = options
        self.evaluations = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not self.automatic_optimization:
            return self.step_with_closure(batch)
        self.evaluations += 1
        self.log("count", 1, on_epoch=True, on_step=False, reduce_fx="sum")
        return {"loss": loss_of(self.net, batch), **self.weight_of(batch)}

    def weight_of(self, batch: Tensor) -> dict[str, Any]:
        is_logged = self.trainer.strategy.gradient_weighting == "logged"
        return {"weight": len(batch)} if is_logged else {}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        options = {"line_search_fn": "strong_wolfe", "max_iter": 4, **self.options}
        return torch.optim.LBFGS(self.parameters(), **options)

    def step_with_closure(self, batch: Tensor) -> None:
        optimizer: Any = self.optimizers()

        def closure() -> Tensor:
            self.evaluations += 1
            optimizer.zero_grad()
            loss = loss_of(self.net, batch)
            self.manual_backward(loss, **self.weight_of(batch))
            return loss

        optimizer.step(closure)


def batches(rank: int, sizes: Sizes) -> DataLoader[Any]:
    """Return a loader of one rank's batches."""
    of_rank = [step[rank] for step in sizes if len(step) > rank]
    return DataLoader(Stream(batch(rank, n, size) for n, size in enumerate(of_rank)), batch_size=None)


def fitted(is_manual: bool, sizes: Sizes, policy: str = "error", **options: Any) -> list[Tensor]:
    """Fit on as many threads as the first step has batches; return each rank's weights."""
    modules = [Fit(by_hand=is_manual) for _ in sizes[0]]
    found = fit_on_ranks(
        modules,
        lambda rank: batches(rank, sizes),
        options,
        uneven_inputs=policy,
        use_distributed_sampler=False,
    )
    for module in modules:
        assert module.trainer.global_step == STEPS
        assert module.evaluations == modules[0].evaluations > STEPS
    return found


def by_hand(sizes: Sizes, clip: float | None = None, **options: Any) -> Tensor:
    """Train one process on the global batch of each step."""
    model = Fit(**options)
    optimizer = model.configure_optimizers()
    for number, step in enumerate(sizes):
        samples = torch.cat([batch(rank, number, size) for rank, size in enumerate(step)])

        def closure(samples: Tensor = samples) -> Any:
            optimizer.zero_grad()
            loss = loss_of(model.net, samples)
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            return loss.item()

        optimizer.step(closure)
    return weights(model)


@pytest.mark.full
@pytest.mark.parametrize("is_manual", [False, True])
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        (((2, 2),) * STEPS, {"sync_mode": "auto"}),
        (((2, 2),) * STEPS, {"sync_mode": "forced_sync"}),
        (SIZES, {"gradient_weighting": "logged"}),
        (((2, 2), (2, 2), (2,)), {"policy": "join"}),  # a rank without a batch has no part in the loss
    ],
)
def test_ranks_decide_as_one_process(sizes: Sizes, options: dict[str, Any], is_manual: bool) -> None:
    """The line search sees the loss of the global batch, with its weights, on every rank."""
    assert_each(fitted(is_manual, sizes, **options), by_hand(sizes), 1e-9)


def test_clipping_and_logging(tmp_path: Path) -> None:
    """Each gradient is clipped; a batch is logged once, however often it is evaluated."""
    sizes, model = ((2,),) * STEPS, Fit(max_iter=2)
    train = trainer(tmp_path, gradient_clip_val=0.05)
    train.fit(model, batches(0, sizes))
    torch.testing.assert_close(weights(model), by_hand(sizes, 0.05, max_iter=2), rtol=0, atol=1e-12)
    assert train.callback_metrics["count"] == STEPS < model.evaluations


def test_resuming(tmp_path: Path) -> None:
    """A run that goes on from a checkpoint ends the same."""
    data = batches(0, ((2,),) * STEPS)
    saving = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=1)
    expected, resumed = Fit(), Fit()
    trainer(tmp_path, callbacks=saving).fit(expected, data)
    trainer(tmp_path).fit(resumed, data, ckpt_path=tmp_path / "step=1.ckpt")
    assert torch.equal(weights(resumed), weights(expected))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("accumulate_grad_batches", 2), ("on_nonfinite", "skip")),
        *(("precision", "16-mixed"), ("precision", "bf16-master")),
    ],
)
def test_what_cannot_be_combined(tmp_path: Path, name: str, value: Any) -> None:
    """It is refused by name, before the first batch."""
    model = Fit()
    with pytest.raises(ConfigurationError, match=f"{name}.* cannot be used with LBFGS"):
        trainer(tmp_path, **{name: value}).fit(model, batches(0, ((2,),)))
    assert model.evaluations == 0


class Stepping(torch.optim.SGD):
    """Has an option of its own."""

    scales: list[float]

    def step(self, closure: Any = None, *, scale: float = 1.0) -> Any:
        self.scales = [*getattr(self, "scales", []), scale]
        return super().step(closure)


class WithOptions(Line):
    """Gives options to `step` and `zero_grad`."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch))
        optimizer.step(scale=2.0)
        optimizer.zero_grad(set_to_none=batch_idx != 3)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Stepping(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    "precision",
    [
        Precision(),
        MixedPrecision("bf16-mixed"),
        MixedPrecision("16-mixed", init_scale=4.0),
        MasterWeightsPrecision("16-master", init_scale=4.0),
        MasterWeightsPrecision("bf16-master"),
    ],
)
def test_options_of_step_and_zero_grad(tmp_path: Path, precision: Precision) -> None:
    """The optimizer gets what the module gives, in every precision."""
    train, model = trainer(tmp_path, plugins=precision), WithOptions()
    train.fit(model, loader())
    [optimizer] = train.optimizers
    assert optimizer.scales == [2.0] * 4  # type: ignore[attr-defined]  # of the class above
    gradients = [parameter.grad for parameter in optimizer.param_groups[0]["params"]]
    assert all(gradient is not None and not gradient.any() for gradient in gradients)
    train.max_epochs = 2
    train.limit_train_batches = 2
    train.fit(model, loader())
    assert [parameter.grad for parameter in optimizer.param_groups[0]["params"]] == [None, None]
