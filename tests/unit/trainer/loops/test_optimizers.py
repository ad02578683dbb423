"""What configure_optimizers may return, and when schedulers step."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau

from rankwise.callbacks import LambdaCallback
from rankwise.errors import ConfigurationError, InvalidArgumentError, InvalidTypeError, UnknownArgumentError
from rankwise.trainer import Trainer, TrainingModule
from rankwise.trainer.loops.optimizers import SchedulerConfig, configure
from tests.helpers.raising import raises
from tests.unit.trainer.helpers import Line, fitted, loader, trainer


class Returning(Line):
    """Returns what a function makes of its optimizer and a scheduler."""

    def __init__(self, make: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=1e-3)
        return self.make(optimizer, ExponentialLR(optimizer, 0.5))


@pytest.mark.parametrize(
    ("make", "schedulers"),
    [
        (lambda optimizer, scheduler: optimizer, 0),
        (lambda optimizer, scheduler: [optimizer], 0),
        (lambda optimizer, scheduler: ([optimizer], [scheduler]), 1),
        (lambda optimizer, scheduler: [[optimizer], [{"scheduler": scheduler}]], 1),
        (lambda optimizer, scheduler: ([optimizer], {"scheduler": scheduler}), 1),
        (lambda optimizer, scheduler: {"optimizer": optimizer}, 0),
        (lambda optimizer, scheduler: {"optimizer": optimizer, "lr_scheduler": scheduler}, 1),
        (lambda optimizer, scheduler: {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler}}, 1),
        (lambda optimizer, scheduler: [{"optimizer": optimizer, "lr_scheduler": scheduler}], 1),
    ],
)
def test_forms(make: Any, schedulers: int) -> None:
    """Every form that Lightning takes means the same."""
    optimizers, configs = configure(Returning(make))
    assert [isinstance(optimizer, Optimizer) for optimizer in optimizers] == [True]
    assert len(configs) == schedulers


def _with_options(options: dict[str, Any], optimizer: Any, scheduler: Any) -> Any:
    return [optimizer], [{"scheduler": scheduler, **options}]


def test_a_dictionary_for_each_optimizer() -> None:
    """Several optimizers may be dictionaries, each with a scheduler or without."""
    module = Returning(lambda first, scheduler: [{"optimizer": first, "lr_scheduler": scheduler}, second])
    second = {"optimizer": SGD(module.parameters(), lr=0.1)}
    module.automatic_optimization = False
    optimizers, [config] = configure(module)
    assert [optimizer.param_groups[0]["lr"] for optimizer in optimizers] == [1e-3, 0.1]
    assert config.scheduler.optimizer is optimizers[0]


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda optimizer, scheduler: "adam", InvalidTypeError),
        (lambda optimizer, scheduler: {"optimiser": optimizer}, UnknownArgumentError),
        (lambda optimizer, scheduler: [optimizer, optimizer], ConfigurationError),
        (lambda optimizer, scheduler: ([optimizer], [optimizer]), InvalidTypeError),
        (lambda optimizer, scheduler: ([optimizer], [{"schedule": scheduler}]), UnknownArgumentError),
        (partial(_with_options, {"interval": "day"}), InvalidArgumentError),
        (partial(_with_options, {"frequency": 0}), InvalidArgumentError),
        (lambda optimizer, scheduler: ([optimizer], [ReduceLROnPlateau(optimizer)]), ConfigurationError),
    ],
)
def test_mistakes(make: Any, error: type[Exception]) -> None:
    """What cannot be meant is refused."""
    raises(error, None, configure, Returning(make))


@pytest.mark.parametrize(
    ("batches", "accumulate", "options", "halvings"),
    [
        (4, 1, {}, 2),
        (4, 1, {"interval": "step"}, 8),
        (4, 1, {"interval": "step", "frequency": 3}, 2),
        (4, 1, {"frequency": 2}, 1),
        *((5, 1, {"interval": "step", "frequency": n}, halvings) for n, halvings in ((2, 4), (5, 2), (6, 0))),
        *((5, 2, {"interval": "step", "frequency": n}, halvings) for n, halvings in ((2, 4), (3, 0), (5, 2))),
    ],
)
def test_when_schedulers_step(
    tmp_path: Path, batches: int, accumulate: int, options: dict[str, Any], halvings: int
) -> None:
    """After every n-th epoch, or every n-th batch, also with accumulation; each epoch counts anew."""
    model = Returning(partial(_with_options, options))
    train = fitted(tmp_path, model, loader(2 * batches), max_epochs=2, accumulate_grad_batches=accumulate)
    assert train.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-3 * 0.5**halvings)


@pytest.mark.parametrize("where", ["training_step", "on_train_batch_end"])
def test_plateau_by_step(tmp_path: Path, where: str) -> None:
    """ReduceLROnPlateau by step sees the metric of the step before it, the first one too."""
    seen = []

    class Noting(ReduceLROnPlateau):
        def step(self, metrics: Any, epoch: Any = None) -> None:  # type: ignore[override]  # as torch's
            seen.append(float(metrics))
            super().step(metrics)

    class Numbered(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if where == "training_step":
                self.log("number", batch_idx)
            return self.loss(batch)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if where == "on_train_batch_end":
                self.log("number", batch_idx)

        def configure_optimizers(self) -> Any:
            optimizer = SGD(self.parameters(), lr=1.0)
            plateau = {"scheduler": Noting(optimizer), "interval": "step", "monitor": "number"}
            return {"optimizer": optimizer, "lr_scheduler": plateau}

    trainer(tmp_path, accumulate_grad_batches=2).fit(Numbered(), loader(10))
    assert seen == [1, 3, 4]


def test_schedulers_of_a_manual_loop() -> None:
    """The module gives the metric itself; when the Trainer should step has no effect, and is refused."""
    module = Returning(lambda optimizer, _: ([optimizer], [ReduceLROnPlateau(optimizer)]))
    module.automatic_optimization = False
    _, [config] = configure(module)
    assert config.monitor is None
    for options in ({"interval": "step"}, {"frequency": 2}):
        module.make = partial(_with_options, options)
        raises(ConfigurationError, "has no effect in manual optimisation", configure, module)


def test_plateau_without_metric(tmp_path: Path) -> None:
    """A metric that nobody logs is an error, unless strict=False."""

    def make(optimizer: Any, scheduler: Any, **options: Any) -> Any:
        return [optimizer], [{"scheduler": ReduceLROnPlateau(optimizer), "monitor": "accuracy", **options}]

    with pytest.raises(ConfigurationError, match="monitors 'accuracy', which was not logged"):
        trainer(tmp_path).fit(Returning(make), loader())
    trainer(tmp_path).fit(Returning(lambda *given: make(*given, strict=False)), loader())


def test_config_is_public() -> None:
    """What a module's scheduler became can be read."""
    _, [config] = configure(Returning(lambda optimizer, scheduler: ([optimizer], [scheduler])))
    assert (type(config), config.interval, config.frequency) == (SchedulerConfig, "epoch", 1)


def replace(trainer: Trainer, module: TrainingModule) -> None:
    """Replace optimizer and scheduler."""
    trainer.optimizers = [SGD(module.parameters(), lr=0.0)]
    trainer.lr_scheduler_configs = [SchedulerConfig(ExponentialLR(trainer.optimizers[0], 0.5))]


def test_a_callback_may_replace_them(tmp_path: Path) -> None:
    """The fit steps the optimizer and the scheduler that the trainer has then."""
    model = Line()
    before = model.layer.weight.detach().clone()
    train = fitted(tmp_path, model, callbacks=LambdaCallback(on_fit_start=replace))
    assert torch.equal(model.layer.weight, before)
    assert train.lr_scheduler_configs[0].scheduler.last_epoch == 1


def _halving(optimizer: Optimizer) -> Any:
    return ExponentialLR(optimizer, 0.5)


@pytest.mark.parametrize(
    ("make", "rate"),
    [
        (lambda own: (own,), 1.0),
        (lambda own: [[own], [_halving(own)]], 0.25),
        (lambda own: ([own], [{"scheduler": _halving(own), "interval": "step"}]), 2**-8),
        (lambda own: ([own], {"scheduler": _halving(own), "interval": "step"}), 2**-8),
        (
            lambda own: {
                "optimizer": own,
                "lr_scheduler": {"scheduler": _halving(own), "interval": "step", "frequency": 2},
            },
            2**-4,
        ),
        (lambda own: ({"optimizer": own, "lr_scheduler": {"scheduler": _halving(own), "name": "x"}},), 0.25),
        (lambda own: ([own], [_halving(own), _halving(own)]), 2**-4),
        (lambda own: torch.optim.LBFGS(own.param_groups[0]["params"], lr=1.0), 1.0),
    ],
)
def test_learning_rates_are_lightnings(tmp_path: Path, make: Any, rate: float) -> None:
    """After two epochs of four batches they are what Lightning 2.6 gives for the same form."""

    class Module(Line):
        def configure_optimizers(self) -> Any:
            return make(SGD(self.parameters(), lr=1.0))

    train = fitted(tmp_path, Module(), max_epochs=2)
    assert (train.optimizers[0].param_groups[0]["lr"], train.global_step) == (rate, 8)


class WithMetric:
    """A scheduler of one's own, which gets a metric."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def step(self, metric: float) -> None:
        self.seen.append(metric)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Has none."""


def test_reduce_on_plateau(tmp_path: Path) -> None:
    """A scheduler of one's own gets the metric if its dictionary says so."""
    scheduler = WithMetric()

    class Module(Line):
        def configure_optimizers(self) -> Any:
            config = {"scheduler": scheduler, "monitor": "loss", "reduce_on_plateau": True}
            return {"optimizer": SGD(self.parameters(), lr=0.1), "lr_scheduler": config}

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            scheduler.step(metric)

    train = fitted(tmp_path, Module())
    assert scheduler.seen == [float(train.callback_metrics["loss"])]


def test_a_scheduler_of_another_optimizer() -> None:
    """It would change nothing that is trained with."""
    with pytest.raises(ConfigurationError, match=r"returned a ExponentialLR of another optimizer"):
        configure(Returning(lambda own, scheduler: ([SGD(own.param_groups, lr=0.1)], [scheduler])))


def test_frequency_of_an_optimizer() -> None:
    """It is Lightning 1.x's, and the error says what there is now."""
    with pytest.raises(UnknownArgumentError, match=r"no argument 'frequency'.*\n  Fix: leave it out"):
        configure(Returning(lambda own, scheduler: {"optimizer": own, "frequency": 2}))
