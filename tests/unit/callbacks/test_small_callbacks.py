"""`LambdaCallback`, `GradientAccumulationScheduler` and `ModelSummary`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rankwise.callbacks import Callback, GradientAccumulationScheduler, LambdaCallback, ModelSummary
from rankwise.callbacks.model_summary import summary_of
from rankwise.errors import ConfigurationError, InvalidArgumentError, InvalidTypeError, UnknownArgumentError
from tests.helpers.raising import raises
from tests.unit.trainer.helpers import Line, fitted, loader, trainer


def test_functions_as_hooks(tmp_path: Path) -> None:
    """Each gets the hook's arguments; names of no hook, and what cannot be called, are refused."""
    seen: list[Any] = []
    callback = LambdaCallback(
        on_train_start=lambda trainer, module: seen.append(type(module)),
        on_train_batch_end=lambda trainer, module, outputs, batch, batch_idx: seen.append(batch_idx),
        on_train_end=None,
    )
    trainer(tmp_path, callbacks=callback).fit(Line(), loader())
    assert seen == [Line, 0, 1, 2, 3]
    raises(UnknownArgumentError, "on_train_begin", LambdaCallback, on_train_begin=print)
    raises(InvalidTypeError, "on_train_start.*1", LambdaCallback, on_train_start=1)


def test_accumulation_by_epoch(tmp_path: Path) -> None:
    """Each epoch has as many optimizer steps as its number of batches allows."""
    steps: list[int] = []
    noting = LambdaCallback(on_train_epoch_end=lambda trainer, module: steps.append(trainer.global_step))
    scheduling = GradientAccumulationScheduler({1: 4, 3: 2})
    train = fitted(tmp_path, callbacks=[scheduling, noting], max_epochs=4)
    assert steps == [4, 5, 6, 8]
    assert train.accumulate_grad_batches == 1


def test_callbacks_log(tmp_path: Path) -> None:
    """They log as the module does, in the hooks of a stage; elsewhere it is an error."""
    callback = Callback()
    vars(callback).update(
        on_train_batch_end=lambda *_: callback.log("batches", 1.0, on_step=False, reduce_fx="sum"),
        on_validation_epoch_end=lambda *_: callback.log_dict({"epoch's": 3.0}),
    )
    metrics = fitted(tmp_path, None, loader(), loader(), callbacks=callback).callback_metrics
    assert (float(metrics["batches"]), float(metrics["epoch's"])) == (4.0, 3.0)
    raises(RuntimeError, r"Callback\.log was called in state 'no stage'", callback.log, "x", 1.0)


class ByHand(Line):
    automatic_optimization = False


class WithClosure(Line):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


def test_no_accumulation(tmp_path: Path) -> None:
    """It is refused where it has no effect, contradicts another argument, or cannot work."""
    scheduling = GradientAccumulationScheduler({2: 4})
    with pytest.raises(ConfigurationError, match="no effect in manual optimisation"):
        trainer(tmp_path, callbacks=scheduling).fit(ByHand(), loader())
    with pytest.raises(ConfigurationError, match="contradict each other"):
        trainer(tmp_path, callbacks=scheduling, accumulate_grad_batches=2).fit(Line(), loader())
    train = trainer(tmp_path, callbacks=scheduling)
    raises(ConfigurationError, "accumulate_grad_batches", train.fit, WithClosure(), loader())
    assert train.accumulate_grad_batches == 1


@pytest.mark.parametrize(
    ("error", "schedulings"),
    [(InvalidArgumentError, [{}, {-1: 2}, {0: 0}]), (InvalidTypeError, [4, {"0": 2}, {0: 2.0}])],
)
def test_wrong_schedulings(error: type[Exception], schedulings: list[Any]) -> None:
    """What is no dictionary of whole numbers is refused, and so are numbers that are too small."""
    for scheduling in schedulings:
        raises(error, None, GradientAccumulationScheduler, scheduling)


def test_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table is printed when a fit starts."""
    trainer(tmp_path, callbacks=ModelSummary()).fit(Line(), loader())
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["layer", "Linear", "3", "3", "train"]
    assert lines[2] == "3 parameters (3 trainable, 0 frozen), 0.000 MB"


def test_depth_sharing_and_unknown_shapes() -> None:
    """Rows go as deep as asked; shared parameters count once in total; lazy ones are marked."""
    inner = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(4))
    module = nn.ModuleDict({"one": inner, "other": inner[0]})
    inner[0].bias.requires_grad_(False)
    rows = summary_of(module, max_depth=-1).splitlines()
    assert [row.split()[0] for row in rows[1:4]] == ["one", "one.0", "one.1"]
    assert rows[1].split()[2:6] == ["6", "?", "4", "?"]
    assert "6 parameters (4 trainable, 2 frozen)" in rows[-2]
    assert rows[-1].startswith("? has parameters")
    assert len(summary_of(module, max_depth=0).splitlines()) == 2
    raises(InvalidArgumentError, None, ModelSummary, -2)
