"""Modules that are built from checkpoints: of this library, and in Lightning's format."""

import json
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from rankwise.callbacks import ModelCheckpoint
from rankwise.checkpoint import TorchCheckpointIO
from rankwise.compatibility.lightning_checkpoints import LightningState
from rankwise.errors import (
    CheckpointError,
    ConfigurationError,
    InvalidArgumentError,
    InvalidTypeError,
    MissingExtraError,
    UnknownArgumentError,
)
from rankwise.trainer.module_loading import _where_saved
from tests.helpers.needs import need_package
from tests.helpers.raising import raises
from tests.unit.trainer.helpers import Line, fitted, loader, saved


class Saved(Line):
    """Saves its hyperparameters."""

    def __init__(self, lr: float = 0.1, width: int = 2, names: Any = ()) -> None:
        super().__init__(lr)
        self.save_hyperparameters()
        self.layer = nn.Linear(width, 1)
        self.loaded: Any = None

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded = checkpoint["global_step"]


class Needs(Saved):
    """Has arguments without default."""

    def __init__(self, lr: float, net: nn.Module) -> None:
        super().__init__(lr)
        self.net = net


class TakesAny(Line):
    """Takes any argument."""

    def __init__(self, lr: float = 0.1, **given: Any) -> None:
        super().__init__(lr)
        self.given = given


class WithNamespace(Line):
    """Takes a namespace, and makes a layer in `configure_model`."""

    def __init__(self, args: Any) -> None:
        super().__init__(args.lr)
        self.save_hyperparameters(args)

    def configure_model(self) -> None:
        self.late = nn.Linear(1, 1)


def written(folder: Path, **contents: Any) -> str:
    """Write a file as Lightning does, and return its path."""
    path = folder / "lightning.ckpt"
    weights = {"layer.weight": torch.full((1, 2), 3.0), "layer.bias": torch.zeros(1)}
    torch.save({"state_dict": weights, "global_step": 6, **LIGHTNING, **contents}, path)
    return str(path)


LIGHTNING = {"epoch": 1, "pytorch-lightning_version": "2.6.6", "hparams_name": "kwargs"}


def fit_loop(begun: int, ended: int, batches: int, *, is_last: bool) -> dict[str, Any]:
    """Return the part of a checkpoint in which Lightning has its counters; those that are read."""

    def counters(ready: int, processed: int) -> dict[str, int]:
        return {"ready": ready, "completed": processed, "started": ready, "processed": processed}

    progress = {"total": counters(batches, batches), "current": counters(batches, batches)}
    return {
        "fit_loop": {
            "epoch_loop.batch_progress": {**progress, "is_last_batch": is_last},
            "epoch_progress": {"total": counters(begun, ended), "current": counters(begun, ended)},
        }
    }


def test_there_and_back(tmp_path: Path) -> None:
    """The module has its hyperparameters and weights, and its hook has seen the checkpoint.

    Tensors go where they are told; those of a device that is not there go to the CPU. An instance would not
    change: the error names the class.
    """
    module = Saved(lr=0.05, names=["a"])
    path = saved(tmp_path, module)
    loaded = Saved.load_from_checkpoint(path)
    assert type(loaded) is Saved
    assert torch.equal(loaded.layer.weight, module.layer.weight)
    assert loaded.hparams == {"lr": 0.05, "width": 2, "names": ["a"]}
    assert loaded.loaded == 4
    assert Saved.load_from_checkpoint(path, map_location="cpu").device == torch.device("cpu")
    storage = torch.zeros(1).untyped_storage()
    assert _where_saved(storage, "cuda:99") is storage
    assert _where_saved(storage, "cpu") is None
    with pytest.raises(ConfigurationError, match=r"Saved.load_from_checkpoint\(path\)"):
        loaded.load_from_checkpoint(tmp_path / "x.ckpt")


def test_other_arguments(tmp_path: Path) -> None:
    """Keywords replace what the checkpoint has; a class gets the arguments that it takes.

    Of those that it needs and nothing has, the error names the keyword.
    """
    path = saved(tmp_path, Saved(lr=0.05))
    assert Saved.load_from_checkpoint(path, lr=0.5).lr == 0.5
    with pytest.raises(UnknownArgumentError, match=r"Saved takes no argument 'ler'. Did you mean 'lr'"):
        Saved.load_from_checkpoint(path, ler=0.5)
    assert Line.load_from_checkpoint(path).lr == 0.05
    with pytest.raises(
        ConfigurationError, match=r"needs \['net'\](?s:.*)load_from_checkpoint\(path, net=\.\.\.\)"
    ):
        Needs.load_from_checkpoint(path)


def test_what_checkpoints_leave_out(tmp_path: Path) -> None:
    """A module among the arguments is a warning, not in the checkpoint, and given when it is loaded."""
    module, saving = Needs(0.05, nn.Linear(1, 1)), ModelCheckpoint(tmp_path)
    with pytest.warns(UserWarning, match=r"net \(Linear\)(?s:.*)load_from_checkpoint\(path, net=\.\.\.\)"):
        fitted(tmp_path, module, callbacks=saving)
    assert "net" not in TorchCheckpointIO().load_checkpoint(saving.best_model_path)["hyper_parameters"]
    loaded = Needs.load_from_checkpoint(saving.best_model_path, net=nn.Linear(1, 1))
    assert torch.equal(loaded.net.weight, module.net.weight)  # type: ignore[arg-type]  # a tensor


def test_a_namespace(tmp_path: Path) -> None:
    """An argument with all hyperparameters gets them with items and attributes; keywords go into it.

    Layers of `configure_model` are made before the weights are loaded.
    """
    module = WithNamespace(Namespace(lr=0.05, depth=3))
    path = saved(tmp_path, module)
    loaded = WithNamespace.load_from_checkpoint(path)
    assert loaded.hparams == {"lr": 0.05, "depth": 3}
    assert torch.equal(loaded.late.weight, module.late.weight)
    assert WithNamespace.load_from_checkpoint(path, depth=4).hparams == {"lr": 0.05, "depth": 4}
    assert WithNamespace.load_from_checkpoint(path, args=Namespace(lr=1)).hparams == {"lr": 1}


def test_other_weights(tmp_path: Path) -> None:
    """Weights that do not fit are an error; with `strict=False` other names are a warning."""
    path = saved(tmp_path, Saved())
    with pytest.raises(CheckpointError, match=r"does not fit Saved: .*\n.*layer\.weight"):
        Saved.load_from_checkpoint(path, width=5)
    with pytest.raises(CheckpointError, match=r"does not fit Needs: .*\n.*net\.weight"):
        Needs.load_from_checkpoint(path, net=nn.Linear(1, 1))
    with pytest.warns(UserWarning, match=r"Only the module has \['net.weight', 'net.bias'\]"):
        Needs.load_from_checkpoint(path, net=nn.Linear(1, 1), strict=False)


def test_files_that_are_refused(tmp_path: Path) -> None:
    """A file without weights, and what is no path, are refused.

    A class that could run code is named, with what to do, and `weights_only=False` is refused.
    """
    torch.save({"weights": 1}, tmp_path / "x.ckpt")
    with pytest.raises(CheckpointError, match=r"holds no 'state_dict', but \['weights'\]"):
        Line.load_from_checkpoint(tmp_path / "x.ckpt")
    raises(InvalidTypeError, "checkpoint_path", Line.load_from_checkpoint, 3)
    with pytest.raises(CheckpointError, match="its hyperparameters cannot be restored"):
        Line.load_from_checkpoint(written(tmp_path, hyper_parameters=3))
    path = written(tmp_path, hyper_parameters={"net": nn.Linear(1, 1)})
    with pytest.raises(
        CheckpointError, match=r"torch.nn.modules.linear.Linear(?s:.*)add_safe_globals\(\[Linear\]"
    ):
        Line.load_from_checkpoint(path)
    raises(InvalidArgumentError, "weights_only=False", Line.load_from_checkpoint, path, weights_only=False)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hparams.json", json.dumps({"lr": 0.7, "names": ["x"]})),
        ("hparams.csv", "key,value\nlr,0.7\nnames,['x']\n"),
        ("hparams.yaml", "lr: 0.7\nnames: [x]\n"),
    ],
)
def test_hparams_file(name: str, text: str, tmp_path: Path) -> None:
    """Hyperparameters from a file replace the checkpoint's."""
    if name.endswith("yaml"):
        need_package("yaml")
    file = tmp_path / name
    file.write_text(text)
    loaded = Saved.load_from_checkpoint(saved(tmp_path, Saved()), hparams_file=file)
    assert loaded.hparams == {"lr": 0.7, "width": 2, "names": ["x"]}


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("hparams.json", "[1]", "holds a list, not a mapping"),
        ("hparams.json", "{", "could not be read"),
        ("hparams.csv", "a,b\n1,2\n", "could not be read"),
        ("none.json", None, "could not be read"),
    ],
)
def test_unreadable_hparams_file(
    name: str, text: str | None, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file without a mapping is refused by its name; without a package the error names the extra."""
    if text is not None:
        (tmp_path / name).write_text(text)
    path = written(tmp_path)
    with pytest.raises(CheckpointError, match=rf"{name}.*{problem}"):
        Line.load_from_checkpoint(path, hparams_file=tmp_path / name)
    with pytest.raises(InvalidArgumentError, match="hparams_file"):
        Line.load_from_checkpoint(path, hparams_file=tmp_path / "hparams.txt")
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(MissingExtraError, match=r"rankwise\[yaml\]"):
        Line.load_from_checkpoint(path, hparams_file=tmp_path / "hparams.yaml")


def test_a_file_of_lightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's own mapping, namespaces and paths load, though Lightning is not installed."""
    module = ModuleType("lightning.fabric.utilities.data")
    module.AttributeDict = type("AttributeDict", (dict,), {"__module__": module.__name__})  # type: ignore[attr-defined]
    for name in ("lightning", "lightning.fabric", "lightning.fabric.utilities"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    names = {"own": module.AttributeDict(a=1), "space": Namespace(b=2), "path": Path("c")}
    path = written(tmp_path, hyper_parameters={"lr": 0.7, "names": names, "other": 1})
    monkeypatch.undo()
    loaded = Saved.load_from_checkpoint(path)
    assert (loaded.lr, loaded.hparams.names["own"]["a"], loaded.hparams.names["space"].b) == (0.7, 1, 2)
    assert loaded.hparams.names["path"] == Path("c")
    assert float(loaded.layer.weight.detach()[0, 0]) == 3


def test_arguments_of_lightnings_command_line(tmp_path: Path) -> None:
    """Classes that a command line has named are not imported, but may be given; its keys are no arguments."""
    nested = {"net": {"class_path": "os.system", "init_args": {}}, "lr": 0.7, "_instantiator": "x"}
    with pytest.raises(ConfigurationError, match=r"load_from_checkpoint\(path, net=\.\.\.\)"):
        Needs.load_from_checkpoint(written(tmp_path, hyper_parameters=nested))
    given = {"lr": 0.7, "depth": 2, "_instantiator": "x", "_class_path": "some.Module"}
    path = written(tmp_path, hyper_parameters=given)
    assert Line.load_from_checkpoint(path).lr == 0.7
    assert TakesAny.load_from_checkpoint(path).given == {"depth": 2}


def of_a_fit(**changes: Any) -> dict[str, Any]:
    """Return what Lightning writes of a fit that has ended its second epoch of 3 batches."""
    optimizer = torch.optim.SGD(Line().parameters(), lr=0.01).state_dict()
    loops = fit_loop(2, 2, 3, is_last=True)
    return {"loops": loops, "optimizer_states": [optimizer], "lr_schedulers": [], "callbacks": {}, **changes}


def test_a_fit_of_lightnings_continues(tmp_path: Path) -> None:
    """Weights, optimizer and counters continue in the next epoch."""
    train = fitted(tmp_path, max_epochs=3, ckpt_path=written(tmp_path, **of_a_fit()))
    assert (train.current_epoch, train.global_step) == (3, 10)
    assert train.optimizers[0].param_groups[0]["lr"] == 0.01
    assert float(train.validate(Line(), loader(), ckpt_path=written(tmp_path))[0]["val_loss"]) > 1


@pytest.mark.parametrize("key", ["MixedPrecision", "MixedPrecisionPlugin"])
def test_the_loss_scaling_of_lightning(key: str) -> None:
    """Its state is found under the name that Lightning 2.0 gives it, and under that of later versions."""
    checkpoint = of_a_fit(**LIGHTNING, global_step=6, **{key: {"scale": 8.0}})
    assert LightningState(checkpoint, "a.ckpt").scaler == {"scale": 8.0}


@pytest.mark.parametrize(("is_last", "total"), [(True, 7), (False, 4)])
def test_the_batches_of_earlier_epochs_of_lightning(is_last: bool, total: int) -> None:
    """Those of an epoch that begins again are not counted."""
    loops = fit_loop(2, 1, 3, is_last=is_last)
    loops["fit_loop"]["epoch_loop.batch_progress"]["total"]["ready"] = 7
    state = LightningState(of_a_fit(**LIGHTNING, global_step=7, loops=loops), "a.ckpt")
    assert (state.total_batches, state.epoch) == (total, 2 if is_last else 1)


def test_what_does_not_continue(tmp_path: Path) -> None:
    """The state of callbacks, and a position within an epoch, are named in a warning."""
    contents = of_a_fit(loops=fit_loop(2, 1, 3, is_last=False), callbacks={"EarlyStopping{...}": {}})
    with pytest.warns(UserWarning, match=r"EarlyStopping(?s:.*)after batch 3 of epoch 1, which begins again"):
        train = fitted(tmp_path, max_epochs=3, ckpt_path=written(tmp_path, **contents))
    assert (train.current_epoch, train.global_step) == (3, 14)


@pytest.mark.parametrize(
    ("contents", "problem"),
    [
        (of_a_fit(global_step=-1), "counters cannot be restored"),
        (of_a_fit(loops={"fit_loop": {}}), "counters cannot be restored"),
        (of_a_fit(optimizer_states=[]), "does not fit the optimizers"),
        (of_a_fit(optimizer_states=[3]), "optimizers cannot be restored"),
        ({"loops": fit_loop(2, 2, 3, is_last=True)}, r"holds no \['optimizer_states', 'lr_schedulers'\]"),
    ],
)
def test_damaged_files_of_lightning(contents: dict[str, Any], problem: str, tmp_path: Path) -> None:
    """What does not fit is an error with the path; so is a file that has weights only."""
    with pytest.raises(CheckpointError, match=rf"lightning.ckpt(?s:.*){problem}"):
        fitted(tmp_path, ckpt_path=written(tmp_path, **contents))
