"""Hooks that are never called are refused before a stage starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rankwise import TrainingModule
from rankwise.callbacks import Callback
from rankwise.errors import ConfigurationError
from rankwise.trainer import unused_hooks
from tests.unit.trainer.helpers import Line, loader, trainer

NAMES = ["optimizer_step", "configure_gradient_clipping", "training_epoch_end", "on_after_batch_transfer"]
TABLES = [
    (unused_hooks._REPLACEMENTS, TrainingModule),
    (unused_hooks._REPLACEMENTS_IN_CALLBACKS, Callback),
]


def with_hook(base: type[Any], name: str) -> Any:
    """Return an instance of a subclass that defines a method of this name."""
    return type(f"With{base.__name__}", (base,), {name: lambda self, *arguments: None})()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stage", ["fit", "test"])
def test_of_modules(tmp_path: Path, name: str, stage: str) -> None:
    """The error names the method and what to write instead; every stage raises it."""
    model = with_hook(Evaluated, name)
    with pytest.raises(
        ConfigurationError, match=rf"WithEvaluated\.{name}\(\) would never be called"
    ) as caught:
        getattr(trainer(tmp_path), stage)(model, loader())
    assert unused_hooks._REPLACEMENTS[name] in str(caught.value)


class Evaluated(Line):
    """Has a test step, too."""

    def test_step(self, batch: Any, batch_idx: int) -> None:
        pass


@pytest.mark.parametrize("name", ["on_after_backward", "on_before_optimizer_step", "on_batch_end"])
def test_of_callbacks(tmp_path: Path, name: str) -> None:
    """Callbacks are checked as modules are."""
    train = trainer(tmp_path, callbacks=with_hook(Callback, name))
    with pytest.raises(ConfigurationError, match=rf"WithCallback\.{name}\(\) would never be called"):
        train.fit(Line(), loader())


def test_of_instances(tmp_path: Path) -> None:
    """A function that is assigned is a hook, too; a submodule of that name is none."""
    model, callback = Line(), Callback()
    model.backward = nn.Identity()
    trainer(tmp_path, callbacks=callback).fit(model, loader())
    for owner, name in ((callback, "on_after_backward"), (model, "optimizer_step")):
        owner.__dict__[name] = lambda *_: None
        with pytest.raises(ConfigurationError, match=rf"{type(owner).__name__}\.{name}\(\) would never"):
            trainer(tmp_path, callbacks=callback).fit(model, loader())
        del owner.__dict__[name]


@pytest.mark.parametrize("value", [None, 1, torch.ones(2), -1])
def test_an_epoch_that_a_hook_would_end(tmp_path: Path, value: object) -> None:
    """The value with which Lightning skips the rest of an epoch is refused; any other has no meaning."""
    train, model = trainer(tmp_path), type("Ends", (Line,), {"on_train_batch_start": lambda *_: value})()
    if isinstance(value, int) and value < 0:
        with pytest.raises(ConfigurationError, match=r"Ends\.on_train_batch_start\(\) has returned -1"):
            train.fit(model, loader())
    else:
        train.fit(model, loader())


@pytest.mark.parametrize(("table", "base"), TABLES, ids=["module", "callback"])
def test_hooks_that_exist_are_not_refused(table: dict[str, str], base: type[Any]) -> None:
    """No name of the tables is one of the base class."""
    assert not [name for name in table if name in dir(base)]
