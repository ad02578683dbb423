"""After training in other processes the calling process has the same state as if it had trained."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from rankwise import Trainer
from rankwise.callbacks import Callback, EarlyStopping, ModelCheckpoint
from rankwise.errors import WorkerRaisedError
from tests.helpers.bucket import Bucket
from tests.helpers.scripts import ScriptRunner
from tests.process.helpers import ddp, with_tests
from tests.process.training_tasks import Regression, dataset, loader, quiet_trainer
from tests.unit.trainer.helpers import samples
from tests.unit.trainer.test_state_transfer import Changing, OnlyThere

ELSEWHERE = [pytest.param("ddp_spawn", marks=pytest.mark.soak), "ddp_fork", "ddp_forkserver"]


def fitted(
    strategy: str, devices: int, folder: Path, ckpt_path: Path | None = None, max_epochs: int = 2
) -> tuple[Trainer, Regression]:
    """Train, an epoch of 6 optimizer steps, with Adam, a scheduler, validation and checkpoints."""
    options = {"callbacks": ModelCheckpoint(folder, monitor="val_loss"), "enable_checkpointing": True}
    trainer, module = quiet_trainer(strategy, devices, max_epochs=max_epochs, **options), Regression("adam")
    trainer.fit(module, loader(48, 8 // devices), loader(15, 4), ckpt_path=ckpt_path)
    return trainer, module


@pytest.mark.quick
@pytest.mark.parametrize("strategy", ELSEWHERE)
def test_everything_comes_back(strategy: str, tmp_path: Path) -> None:
    """After fit, fit, test, predict all counters, states, metrics and weights are in the caller."""
    expected, expected_module = fitted("single_device", 1, tmp_path / "one")
    trainer, module = fitted(strategy, 2, tmp_path / "two")
    parameters = list(module.parameters())

    for each, each_module in ((expected, expected_module), (trainer, module)):
        each.max_epochs = 3
        each.fit(each_module, loader(48, 8 if each is expected else 4), loader(15, 4))

    assert [(each.global_step, each.current_epoch) for each in (trainer, expected)] == [(18, 3)] * 2
    assert all(mine is still for mine, still in zip(parameters, module.parameters(), strict=True))
    torch.testing.assert_close(parameters, [*expected_module.parameters()], rtol=0, atol=1e-6)
    check_optimizers(trainer, expected, module)
    for name in ("train_loss", "val_loss"):
        torch.testing.assert_close(
            trainer.callback_metrics[name], expected.callback_metrics[name], rtol=0, atol=1e-9
        )
    check_checkpoint(trainer, tmp_path / "two")
    check_evaluation(trainer, module, expected, expected_module)


SPAWNED = """
    import sys
    import torch
    from tests.process.training_tasks import Regression, loader, quiet_trainer

    if __name__ == "__main__":
        trainer, module = quiet_trainer("ddp_forkserver", 2, max_steps=3), Regression("adam")
        trainer.fit(module, loader(24, 4))
        print("torch._dynamo" in sys.modules)
        [optimizer] = trainer.optimizers
        steps = {int(state["step"]) for state in optimizer.state.values()}
        print(steps, optimizer.param_groups[0]["params"][0] is next(module.parameters()))
"""


@pytest.mark.soak
def test_the_callers_optimizers_are_created_at_their_first_use(run_script: ScriptRunner) -> None:
    """Those of spawned processes: to create them imports torch's compiler, which takes a second."""
    result = run_script(SPAWNED, env=with_tests(), fresh=True)
    assert result.stdout.splitlines() == ["False", "{3} True"], result


def check_optimizers(trainer: Trainer, expected: Trainer, module: Regression) -> None:
    """The optimizer holds the module's own parameters, with Adam's state and the scheduler's rate."""
    [mine], [theirs] = trainer.optimizers, expected.optimizers
    owned = [parameter for group in mine.param_groups for parameter in group["params"]]
    assert all(left is right for left, right in zip(owned, module.parameters(), strict=True))
    assert mine.param_groups[0]["lr"] == pytest.approx(theirs.param_groups[0]["lr"]) == pytest.approx(0.00125)
    assert {float(state["step"]) for state in mine.state.values()} == {18}
    torch.testing.assert_close(mine.state_dict()["state"], theirs.state_dict()["state"], rtol=0, atol=1e-6)


def check_checkpoint(trainer: Trainer, folder: Path) -> None:
    """The callback in the caller has the path of the best file, which loads."""
    callback = trainer.checkpoint_callback
    assert isinstance(callback, ModelCheckpoint)
    assert Path(callback.best_model_path).parent == folder
    saved = torch.load(callback.best_model_path, weights_only=True)
    assert set(saved["state_dict"]) == set(Regression().state_dict())
    assert callback.best_model_score is not None
    assert float(callback.best_model_score) > 0


def check_evaluation(trainer: Trainer, module: Regression, expected: Trainer, other: Regression) -> None:
    """Each of 15 samples counts once, and predictions are whole and in order."""
    [mine], [theirs] = trainer.test(module, loader(15, 4)), expected.test(other, loader(15, 4))
    assert mine == pytest.approx(theirs, abs=1e-9)
    assert mine["samples"] == 15
    predictions = trainer.predict(module, loader(15, 4))
    assert predictions is not None
    assert [len(batch) for batch in predictions] == [4, 4, 4, 3]
    with torch.no_grad():
        torch.testing.assert_close(torch.cat(predictions), module(dataset(15).tensors[0]))


@pytest.mark.parametrize("scheme", ["", "bucket://"])
def test_a_second_run_has_a_last_checkpoint_of_its_own(scheme: str, tmp_path: Path) -> None:
    """The ranks of a second run in a folder agree on another file; a run that resumes replaces its own."""
    folder, io = (f"{scheme}run", Bucket(tmp_path)) if scheme else (str(tmp_path / "run"), None)
    expected = [{"last.ckpt": 3}, {"last.ckpt": 3, "last-v1.ckpt": 6}, {"last.ckpt": 3, "last-v1.ckpt": 9}]
    for max_epochs, (steps, ckpt_path) in enumerate(zip(expected, [None, None, "last"], strict=True), 1):
        saving = ModelCheckpoint(folder, save_top_k=0, save_last=True)
        options = {"max_epochs": max_epochs, "callbacks": saving, "enable_checkpointing": True}
        train = quiet_trainer("ddp_fork", 2, plugins=io, **options)
        train.fit(Regression(), loader(24, 4), ckpt_path=ckpt_path)
        found = {path.name: torch.load(path)["global_step"] for path in (tmp_path / "run").iterdir()}
        assert found == steps
        assert saving.last_model_path == f"{folder}/{list(steps)[-1]}"


@pytest.mark.parametrize(
    ("way", "ends", "strategy"),
    [
        *(("adapter", [3], "ddp_fork"), ("parametrized", [2, 4], "ddp_fork")),
        pytest.param("parametrized", [2, 4], "ddp_spawn", marks=pytest.mark.soak),
    ],
)
def test_changed_layers_come_back(way: str, ends: list[int], strategy: str) -> None:
    """What `setup` makes of the layers is in the caller, around those that it has, and in the next fit."""
    expected = Changing(way)
    module = copy.deepcopy(expected)
    first, name = module.layer, f"{strategy}_find_unused_parameters_true"
    for each, kind, devices in ((expected, "single_device", 1), (module, name, 2)):
        trainer = quiet_trainer(kind, devices)
        for max_steps in ends:
            trainer.max_steps = max_steps
            trainer.fit(each, DataLoader(samples(16), 8 // devices))
    assert first in [*module.modules()]
    assert list(module.state_dict()) == list(expected.state_dict())
    torch.testing.assert_close(module.state_dict(), expected.state_dict())
    x = samples().tensors[0]
    torch.testing.assert_close(module.layer(x), expected.layer(x))


class ChangesItsClass(Regression):
    """Gives a layer a class that no other process can import."""

    def setup(self, stage: str) -> None:
        class Local(nn.Linear):
            pass

        self.net[0].__class__ = Local


def test_a_class_that_cannot_come_back() -> None:
    """A warning names the class; the weights come back, and the layer keeps its class."""
    module, expected = ChangesItsClass(), Regression()
    with pytest.warns(UserWarning, match=r"net\.0\.class \(.*ChangesItsClass.setup.<locals>.Local"):
        quiet_trainer("ddp_fork", 2, max_steps=1).fit(module, loader(24, 4))
    quiet_trainer("ddp_fork", 2, max_steps=1).fit(expected, loader(24, 4))
    assert torch.equal(module.state_dict()["net.0.weight"], expected.state_dict()["net.0.weight"])
    assert type(module.net[0]) is nn.Linear


class Wrapped(torch.optim.Optimizer):
    """A wrapper whose state cannot be pickled."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {"wrapped": lambda: self.optimizer}


class FailsToSend(Callback):
    """Has a state that cannot be had; keeps a wrapped network; adds a layer that cannot be pickled."""

    probe: Any = None
    note = "old"

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.probe, self.note = nn.parallel.DistributedDataParallel(nn.Linear(3, 2)), "new"
        trainer.optimizers = [Wrapped(optimizer) for optimizer in trainer.optimizers]

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        module.added = nn.Linear(2, 2)
        module.added.function = lambda: None
        module.unreadable = nn.Linear(2, 2)
        module.unreadable.only_there = OnlyThere()
        module.fine = nn.Linear(2, 2).requires_grad_(False)
        module.net[1].fine = module.fine

    def state_dict(self) -> dict[str, Any]:
        raise KeyError("no state")


class FailsToLoad(Callback):
    """Has states that cannot be pickled, read or loaded, as `state_key` says."""

    state_key = ""

    def __init__(self, state_key: str) -> None:
        self.state_key = state_key

    def state_dict(self) -> dict[str, Any]:
        return {"value": {"pickle": lambda: None, "read": OnlyThere(), "load": None}[self.state_key]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise RuntimeError("cannot be loaded")


def fit_with_faults(strategy: str, module: Regression) -> tuple[Trainer, str]:
    """Fit with callbacks that fail after it; return the trainer, and the texts of the warnings."""
    callbacks = [FailsToSend(), *map(FailsToLoad, ("pickle", "read", "load"))]
    trainer = quiet_trainer(strategy, 2, max_epochs=1, callbacks=callbacks)
    with pytest.warns(UserWarning, match="cannot be (returned|read)") as caught:
        trainer.fit(module, loader(24, 4))
    return trainer, "\n".join(str(each.message) for each in caught)


@pytest.mark.parametrize("strategy", ["ddp_fork", "ddp_forkserver"])
def test_what_cannot_come_back_fails_alone(strategy: str) -> None:
    """Weights, buffers and counters of a finished training are in the caller; a warning names the rest."""
    module, expected = Regression("adam"), Regression("adam")
    trainer, texts = fit_with_faults(strategy, module)
    quiet_trainer("ddp_fork", 2, max_epochs=1).fit(expected, loader(24, 4))
    for name, value in expected.state_dict().items():
        assert torch.equal(module.state_dict()[name], value)
    assert trainer.global_step == 3
    assert "train_loss" in trainer.callback_metrics
    sender: Any = trainer.callbacks[0]
    assert (sender.note, sender.probe) == ("new", None)
    assert not {"added", "unreadable"} & module._modules.keys()
    assert isinstance(module.fine, nn.Linear)
    for lost in (
        "probe: ValueError: Default process group",
        "optimizers (AttributeError: Can't pickle local object",
        "module.added (AttributeError: Can't pickle local object",
        "module.unreadable (ImportError: no module named 'there')",
        "state of FailsToSend (KeyError: 'no state')",
        "state of FailsToLoad 1 (AttributeError: Can't pickle local object",
        "state of FailsToLoad 2 (ImportError: no module named 'there')",
        "state of FailsToLoad 3 (RuntimeError: cannot be loaded)",
    ):
        assert lost in texts, texts


@pytest.mark.quick
def test_the_next_fit_after_a_lost_optimizer() -> None:
    """It has new optimizers, as the warning says that those were not returned."""
    module = Regression("adam")
    trainer, _ = fit_with_faults("ddp_fork", module)
    trainer.callbacks, trainer.max_epochs = [], 2
    trainer.fit(module, loader(24, 4))
    assert trainer.global_step == 6


def test_a_result_that_cannot_be_pickled() -> None:
    """What a launched function returns is all that there is: an error, as before."""
    with pytest.raises(WorkerRaisedError, match="pickle"):
        ddp("fork").launch(lambda strategy: lambda: None)


@pytest.mark.parametrize("strategy", ["ddp_fork", "ddp_forkserver"])
def test_a_checkpoint_resumes(strategy: str, tmp_path: Path) -> None:
    """A run resumed from the first epoch's checkpoint ends with the weights of an uninterrupted one."""
    whole, expected = fitted(strategy, 2, tmp_path / "whole")
    first, _ = fitted(strategy, 2, tmp_path / "first", max_epochs=1)
    first.save_checkpoint(tmp_path / "first.ckpt")
    resumed, module = fitted(strategy, 2, tmp_path / "resumed", tmp_path / "first.ckpt")
    assert (resumed.global_step, resumed.current_epoch) == (whole.global_step, whole.current_epoch) == (12, 2)
    torch.testing.assert_close(list(module.parameters()), list(expected.parameters()), rtol=0, atol=0)


class StopsOnOneRank(Regression):
    """Logs a loss that gets worse, on rank 1 only."""

    def on_train_epoch_end(self) -> None:
        self.log("mine", float(self.current_epoch if self.global_rank == 1 else -self.current_epoch))


def test_early_stopping_is_everybodys() -> None:
    """If one rank stops early, all of them stop, at the same epoch."""
    stopping = EarlyStopping("mine", patience=1)
    trainer = quiet_trainer("ddp_fork", 2, max_epochs=10, callbacks=[stopping])
    trainer.fit(StopsOnOneRank(), loader(32, 4))
    assert trainer.should_stop
    assert trainer.current_epoch < 10
