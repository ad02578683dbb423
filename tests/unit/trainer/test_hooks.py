"""The table of hooks is the classes'; hooks that cannot be called are refused before a stage starts."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rankwise import DataModule, TrainingModule, callbacks
from rankwise.callbacks import Callback, ModelCheckpoint
from rankwise.compatibility.names import CALLBACK_METHODS, SETTINGS
from rankwise.errors import ConfigurationError, InvalidTypeError
from rankwise.trainer import hooks
from tests.helpers.raising import raises
from tests.unit.trainer.helpers import Line, fitted, loader, trainer

NAMES = ["configure_sharded_model", "training_step_end", "training_epoch_end", "on_hpc_save"]
OWNERS = {"module": TrainingModule, "callback": Callback, "datamodule": DataModule}


def with_hook(base: type[Any], name: str) -> Any:
    """Return an instance of a subclass that defines a method of this name."""
    return type(f"With{base.__name__}", (base,), {name: lambda self, *arguments: None})()


# ------------------------------------------------------------------ the table


@pytest.mark.parametrize("hook", hooks.HOOKS, ids=lambda hook: hook.name)
def test_the_table_has_the_arguments_of_the_methods(hook: hooks.Hook) -> None:
    """Every hook is a method of its owners, which takes the arguments of the table."""
    for owner in hook.owners:
        first = ["self", "trainer", "module"] if owner == "callback" else ["self"]
        parameters = inspect.signature(getattr(OWNERS[owner], hook.name)).parameters.values()
        names = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
        optional = {"dataloader_idx"} if hook.name.endswith("_step") else set()
        assert names == [*first, *(name for name in hook.names if name not in optional)]


@pytest.mark.parametrize("owner", list(OWNERS))
def test_the_table_is_complete(owner: hooks.Owner) -> None:
    """Every method `on_...` of the classes is in the table, and every hook is there once; none is refused."""
    names = [hook.name for hook in hooks.HOOKS]
    own = {hook.name for hook in hooks.HOOKS if owner in hook.owners}
    assert len(names) == len(set(names))
    assert {name for name in dir(OWNERS[owner]) if name.startswith("on_")} <= own
    assert not [name for name in hooks.REFUSED[owner] if name in dir(OWNERS[owner])]


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stage", ["fit", "test"])
def test_of_modules(tmp_path: Path, name: str, stage: str) -> None:
    """The error names the method and what to write instead; every stage raises it."""
    with pytest.raises(ConfigurationError, match=rf"\.{name}\(\) would never be called") as caught:
        getattr(trainer(tmp_path), stage)(with_hook(Line, name), loader())
    assert hooks.REFUSED["module"][name] in str(caught.value)


@pytest.mark.parametrize("name", ["on_after_batch_transfer", "on_validation_model_eval", "on_batch_end"])
def test_of_callbacks(tmp_path: Path, name: str) -> None:
    """Callbacks are checked as modules are; so are hooks that only modules have."""
    with pytest.raises(ConfigurationError, match=rf"WithCallback\.{name}\(\) would never be called"):
        fitted(tmp_path, callbacks=with_hook(Callback, name))


TABLES = [(CALLBACK_METHODS, print, r"\(\) would never be called"), (SETTINGS, "x", " has no effect")]


@pytest.mark.parametrize(("table", "value", "text"), TABLES)
def test_of_derived_callbacks(table: Any, value: object, text: str) -> None:
    """A method that only Lightning's callback of that name calls, or an attribute that only it reads."""
    for kind in table.keys() - OWNERS.keys():
        for name, remedy in table[kind].items():
            users: Any = type("Users", (getattr(callbacks, kind),), {"make_bar": print, name: value})
            problem = rf"(?s)Users\.{name}{text}.*{re.escape(remedy)}"
            raises(ConfigurationError, problem, hooks.check_hooks, Line(), [object.__new__(users)], None, [])


def test_misspelt_names(tmp_path: Path) -> None:
    """A warning has the hook that was meant; names of the user's own bring none."""
    with pytest.warns(UserWarning, match=r"WithLine\.on_trian_start\(\) is not .* mean on_train_start"):
        fitted(tmp_path, with_hook(Line, "on_trian_start"))
    fitted(tmp_path, with_hook(Line, "on_training_event"), callbacks=with_hook(Callback, "on_event"))


def test_of_instances(tmp_path: Path) -> None:
    """A function that is assigned is a hook, too; a submodule of that name is none, and hides no other."""
    model, callback = Line(), Callback()
    model.tbptt_split_batch = nn.Identity()
    fitted(tmp_path, model, callbacks=callback)
    for owner, name in ((callback, "on_init_end"), (model, "on_epoch_end")):
        owner.__dict__[name] = lambda *_: None
        with pytest.raises(ConfigurationError, match=rf"{type(owner).__name__}\.{name}\(\) would never"):
            fitted(tmp_path, model, callbacks=callback)
        del owner.__dict__[name]
    with pytest.raises(InvalidTypeError, match=r"Odd\.on_fit_end=5.* expected a method"):
        fitted(tmp_path, model, callbacks=type("Odd", (Callback,), {"on_fit_end": 5})())
    model._modules["backward"] = model._modules.pop("tbptt_split_batch")  # `self.backward` would be the hook
    raises(ConfigurationError, "submodule with the name of a hook: 'backward'", fitted, tmp_path, model)


@pytest.mark.parametrize("name", [hook.name for hook in hooks.HOOKS if hook.is_automatic])
def test_of_modules_that_optimise_manually(tmp_path: Path, name: str) -> None:
    """Hooks of automatic optimisation would not be called there."""
    model = with_hook(Line, name)
    model.automatic_optimization = False
    with pytest.raises(ConfigurationError, match=rf"{name}\(\) would never be called: WithLine optimises"):
        fitted(tmp_path, model)


def test_arguments_of_an_older_lightning(tmp_path: Path) -> None:
    """A method that takes other arguments is refused, with those that it would get; so is an iterator."""

    class Older(Line):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_idx, closure):  # type: ignore[no-untyped-def, override]
            pass

    class Short(Callback):
        def on_train_batch_end(self, trainer, module):  # type: ignore[no-untyped-def, override]
            pass

    class Reading(Line):
        def training_step(self, dataloader_iter):  # type: ignore[no-untyped-def, override]
            return next(dataloader_iter)  # would get a batch

    expected = r"(?s)Older\.optimizer_step\(\) cannot .*\(epoch, batch_idx, optimizer, optimizer_closure\)"
    raises(ConfigurationError, expected, fitted, tmp_path, Older())
    with pytest.raises(ConfigurationError, match=r"Short\.on_train_batch_end\(\) cannot be called"):
        fitted(tmp_path, callbacks=Short())
    with pytest.raises(ConfigurationError, match=r"Reading\.training_step\(\) takes dataloader_iter"):
        fitted(tmp_path, Reading())


# ------------------------------------------------------------------ steps


def test_steps_without_batch_idx(tmp_path: Path) -> None:
    """Every step may take the batch alone."""

    class Short(Line):
        def training_step(self, batch: Any) -> Tensor:  # type: ignore[override]  # as in Lightning
            self.seen.append("train")
            return self.loss(batch)

        def validation_step(self, batch: Any) -> None:  # type: ignore[override]
            self.seen.append("validate")

        def test_step(self, batch: Any) -> None:  # type: ignore[override]
            self.seen.append("test")

        def predict_step(self, batch: Any) -> Any:  # type: ignore[override]
            return 7

    model, train = Short(), trainer(tmp_path)
    train.fit(model, loader(2), loader(2))
    train.test(model, loader(2))
    assert model.seen == ["train", "validate", "test"]
    assert train.predict(model, loader(2)) == [7]


def test_a_step_that_is_assigned(tmp_path: Path) -> None:
    """The constructor may choose the step, as a method or a function."""

    class Choosing(Line):
        def __init__(self) -> None:
            super().__init__()
            self.training_step = self.other_step  # type: ignore[method-assign]
            self.validation_step = lambda batch: self.seen.append("assigned")  # type: ignore[assignment, method-assign, misc]

        def other_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.seen.append(f"other {batch_idx}")
            return self.loss(batch)

    model = Choosing()
    trainer(tmp_path).fit(model, loader(4), loader(2))
    assert model.seen == ["other 0", "other 1", "assigned"]


def test_dataloader_idx(tmp_path: Path) -> None:
    """One loader: steps and hooks that require the argument get 0. Several: a step needs to take it."""
    seen: list[tuple[str, int]] = []

    class Numbered(Line):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:  # type: ignore[override]
            seen.append(("step", dataloader_idx))

        def on_validation_batch_end(  # type: ignore[override]
            self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int
        ) -> None:
            seen.append(("module", dataloader_idx))

        def on_validation_batch_start(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            seen.append(("short", batch_idx))

    class Counting(Callback):
        def on_validation_batch_end(  # type: ignore[override]
            self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int
        ) -> None:
            seen.append(("callback", dataloader_idx))

    train, loaders = trainer(tmp_path, callbacks=Counting()), [loader(2), loader(2)]
    expected = [[("short", 0), *((name, idx) for name in ("step", "callback", "module"))] for idx in (0, 1)]
    train.validate(Numbered(), loader(2))
    assert seen == expected[0]
    train.validate(Numbered(), loaders)
    assert seen == [*expected[0], *expected[0], *expected[1]]
    with pytest.raises(ConfigurationError, match=r"Line\.validation_step\(\) does not take the number"):
        trainer(tmp_path).validate(Line(), loaders)


# ------------------------------------------------------------------ callbacks of the module


class Own(Callback):
    """A callback that counts fits."""

    fits = 0

    def on_fit_end(self, *_: Any) -> None:
        self.fits += 1


class Derived(Own):
    """Replaces `Own`."""


def test_configure_callbacks(tmp_path: Path) -> None:
    """Each stage asks for them. They replace those of their class or its bases, and keep their state."""

    class Configuring(Line):
        def configure_callbacks(self) -> list[Callback]:
            self.seen.append("configured")
            return [Derived(), Callback()][: self.seen.count("configured")]

    other, model = Callback(), Configuring()
    train = trainer(tmp_path, callbacks=[Own()], enable_checkpointing=True)
    train.callbacks.insert(0, other)
    train.fit(model, loader())
    train.test(model, loader())
    assert train.callbacks[0] is other
    names = [type(callback).__name__ for callback in train.callbacks[1:]]
    assert names == ["Derived", "Callback", "ModelCheckpoint"]
    assert vars(train.callbacks[1])["fits"] == 1  # the test has not replaced it


def test_checks_of_configured_callbacks(tmp_path: Path) -> None:
    """They are those of the trainer's own. A `ModelCheckpoint` is the only one; `fast_dev_run` has none."""
    model, saving = Line(), ModelCheckpoint(dirpath=tmp_path)
    stateful = type("Stateful", (Own,), {"state_dict": lambda self: {}})
    model.configure_callbacks = lambda: with_hook(Callback, "on_batch_end")  # type: ignore[method-assign]
    raises(ConfigurationError, r"WithCallback\.on_batch_end", fitted, tmp_path, model)
    model.configure_callbacks = lambda: [stateful(), stateful()]  # type: ignore[method-assign]
    raises(ConfigurationError, "Stateful", fitted, tmp_path, model)
    model.configure_callbacks = lambda: saving  # type: ignore[method-assign]
    assert fitted(tmp_path, model, enable_checkpointing=True).callbacks == [saving]
    model._trainer = None
    assert fitted(tmp_path, model, enable_checkpointing=True, fast_dev_run=True).callbacks == []


@pytest.mark.parametrize("num_batches", [1, 4])
def test_outputs_for_hooks(num_batches: int) -> None:
    """Hooks get a loss of their own, detached and divided; a change of it changes nothing else."""
    loss = nn.Linear(1, 1)(torch.ones(1, 1)).sum()
    returned = {"loss": loss, "size": 3}
    outputs = hooks.training_outputs(returned, num_batches)
    assert (outputs["loss"].item(), outputs["size"]) == (loss.item() / num_batches, 3)
    assert not outputs["loss"].requires_grad
    before = loss.item()
    outputs["loss"].add_(1)
    assert returned["loss"] is loss
    assert loss.item() == before
