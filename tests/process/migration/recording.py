"""Record the hooks that Lightning's Trainer, or the one here, calls: their order, arguments and progress.

Modules, data modules and callbacks are the same for both libraries, and define every hook.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from rankwise.trainer.hooks import HOOKS
from tests.process.migration import records

OWNERS = ("module", "callback", "datamodule")
Hooks = Mapping[str, set[str]]  # names by owner
_SHARED_KEYS = {"callbacks", "epoch", "global_step", "lr_schedulers", "optimizer_states", "state_dict"}
OURS = {owner: {hook.name for hook in HOOKS if owner in hook.owners} for owner in OWNERS}
for _owner in ("callback", "datamodule"):
    OURS[_owner] |= {"load_state_dict", "state_dict"}


def shared_with(hooks: Mapping[str, Iterable[str]]) -> Hooks:
    """Return the hooks, of those by owner, that rankwise has, too."""
    return {owner: OURS[owner].intersection(names) for owner, names in hooks.items()}


# ------------------------------------------------------------------ what is recorded


class Recorder:
    """Write down the calls of hooks, as lines.

    A line has the epoch and the step, who is called, and the arguments: objects by their role, tensors by
    their values.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.roles: dict[int, str] = {}
        self._kept: list[object] = []  # ids stay theirs

    def name(self, role: str, value: Any) -> Any:
        """Return `value`, which is written as `role` from now on."""
        self.roles[id(value)] = role
        self._kept.append(value)
        return value

    def note(self, owner: str, hook: str, trainer: Any, arguments: Iterable[Any]) -> None:
        """Write a call."""
        described = ", ".join(map(self.described, arguments))
        place = "-" if trainer is None else f"{trainer.current_epoch}/{trainer.global_step}"
        self.lines.append(f"{place} {owner}.{hook}({described})")

    def described(self, value: Any) -> str:
        """Return a value as text that does not depend on the library."""
        if id(value) in self.roles:
            return self.roles[id(value)]
        if isinstance(value, Tensor):
            values = [f"{number:.4g}" for number in value.detach().flatten().tolist()]
            return f"tensor({', '.join(values)}{', with graph' * (value.grad_fn is not None)})"
        if isinstance(value, enum.Enum):
            return repr(value.value)
        if isinstance(value, (str, int, float, bool, type(None), torch.device, BaseException)):
            return repr(value)
        if isinstance(value, Mapping):
            return self._described_mapping(value)
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(self.described, value))}]"
        return self._described_object(value)

    def _described_mapping(self, value: Mapping[Any, Any]) -> str:
        if "state_dict" in value:
            found = ", ".join(sorted(_SHARED_KEYS & value.keys()))
            return f"checkpoint(epoch={value['epoch']}, global_step={value['global_step']}, has {found})"
        return f"{{{', '.join(f'{name}: {self.described(value[name])}' for name in sorted(value))}}}"

    def _described_object(self, value: Any) -> str:
        if isinstance(inner := getattr(value, "optimizer", None), torch.optim.Optimizer):
            is_scheduler = isinstance(value, torch.optim.lr_scheduler.LRScheduler)
            return type(value).__name__ if is_scheduler else f"wrapped {type(inner).__name__}"
        return "closure" if inspect.isroutine(value) or callable(value) else type(value).__name__


def recorded(kind: type, owner: str, hooks: Iterable[str], recorder: Recorder) -> type:
    """Return a subclass whose hooks write their calls, and do what they did."""
    return type(kind.__name__, (kind,), {hook: _noted(kind, owner, hook, recorder) for hook in hooks})


def _noted(kind: type, owner: str, hook: str, recorder: Recorder) -> Callable[..., Any]:
    method = getattr(kind, hook)
    signature = inspect.signature(method)

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        found = [value for name, value in given.items() if name not in ("self", "args", "kwargs")]
        own = vars(self).get("_trainer") or vars(self).get("trainer")
        trainer = found[0] if owner == "callback" and len(found) > 1 else own
        recorder.note(owner, hook, trainer, [*found, *given.get("args", ())])
        return method(self, *args, **kwargs)

    noted.__signature__ = signature  # type: ignore[attr-defined]  # inspect reads it
    return noted


# ------------------------------------------------------------------ a program


def loader(count: int) -> DataLoader[Any]:
    """Return a loader of `count` batches of two samples; a batch is known by its first number."""
    x = torch.arange(2.0 * count).reshape(-1, 1) / 10
    return DataLoader(TensorDataset(x, 2 * x), batch_size=2)


class ModuleOfEither:
    """What a program needs of a module; the class of a library is the second base."""

    failing: tuple[int, int] | None = None
    ending: tuple[int, int] | None = None
    is_monitored = True  # by a scheduler
    lr = 0.1
    current_epoch: int
    log: Any
    manual_backward: Any
    optimizers: Any
    parameters: Any

    def __init__(self, is_automatic: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(1, 1)
        self.automatic_optimization = is_automatic

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.failing == (self.current_epoch, batch_idx):
            raise ValueError("bad batch")
        loss = self.loss(batch)
        if self.automatic_optimization:
            return {"loss": loss, "size": len(batch[0])}
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if self.ending == (self.current_epoch, batch_idx) else None

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        if dataloader_idx == 0:
            self.log("val_loss", self.loss(batch), add_dataloader_idx=False)
        return {"number": batch_idx}

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.loss(batch)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.layer(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        if not self.automatic_optimization:
            return optimizer
        each_step = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}
        epoch = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        monitoring = [{"scheduler": plateau, "monitor": "val_loss"}] * self.is_monitored
        return [optimizer], [each_step, epoch, *monitoring]

    def train_dataloader(self) -> Any:
        return loader(4)

    def val_dataloader(self) -> Any:
        return [loader(2), loader(1)]

    def test_dataloader(self) -> Any:
        return [loader(1), loader(1)]

    def predict_dataloader(self) -> Any:
        return [loader(1), loader(1)]


class DataOfEither:
    """Loaders for all stages, and a state; the class of a library is the second base."""

    def train_dataloader(self) -> Any:
        return loader(9)

    def val_dataloader(self) -> Any:
        return loader(3)

    def test_dataloader(self) -> Any:
        return loader(3)

    def predict_dataloader(self) -> Any:
        return loader(3)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": 1}


class CallbackOfEither:
    """A state; the class of a library is the second base."""

    def state_dict(self) -> dict[str, Any]:
        return {"count": 1}


OPTIONS: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "max_epochs": 2,
}


LIMITS: dict[str, Any] = {
    "accumulate_grad_batches": 2,
    "gradient_clip_val": 0.5,
    "gradient_clip_algorithm": "norm",
    "num_sanity_val_steps": 1,
    "limit_train_batches": 4,
    "limit_val_batches": 2,
    "limit_test_batches": 1,
    "limit_predict_batches": 1,
}


class Program:
    """Runs stages of one library in a folder, and records the hooks that both libraries have."""

    def __init__(self, library: str, folder: Path, options: Mapping[str, Any], shared: Hooks) -> None:
        self.library: Any = importlib.import_module(LIBRARIES[library])
        self.folder, self.recorder, self._shared = folder, Recorder(), shared
        self._options = {**OPTIONS, **options}  # of its trainers

    def _made(self, owner: str, kind: type) -> type:
        return recorded(kind, owner, sorted(self._shared[owner]), self.recorder)

    def module(self, *, without: Iterable[str] = (), **options: Any) -> Any:
        """Return a new module, which is `module` in the lines; it lacks the hooks of `without`."""
        kind = type("Module", (ModuleOfEither, self.library.LightningModule), {})
        names = sorted(self._shared["module"] - set(without))
        made = recorded(kind, "module", names, self.recorder)(**options)
        return self.recorder.name("module", made)

    def data(self) -> Any:
        """Return a new data module, which is `datamodule` in the lines."""
        kind = self._made("datamodule", type("Data", (DataOfEither, self.library.LightningDataModule), {}))
        return self.recorder.name("datamodule", kind())

    def trainer(self, **options: Any) -> Any:
        """Return a new trainer, which is `trainer` in the lines, with a recorded callback."""
        callback = self._made("callback", type("Counting", (CallbackOfEither, self.library.Callback), {}))()
        options = {**self._options, "default_root_dir": self.folder, **options}
        callbacks = [callback, *options.pop("callbacks", ())]
        return self.recorder.name("trainer", self.library.Trainer(callbacks=callbacks, **options))

    def saving(self, **options: Any) -> Any:
        """Return a callback that saves checkpoints."""
        return self.library.callbacks.ModelCheckpoint(self.folder, **options)

    def mark(self, text: str) -> None:
        """Write a line of the program's own."""
        self.recorder.lines.append(f"--- {text}")


def with_a_data_module(program: Program) -> None:
    """Every stage, with windows, limits, clipping, a sanity check and schedulers; save and load."""
    module, data = program.module(), program.data()
    trainer = program.trainer(**LIMITS, callbacks=[program.saving(monitor="val_loss", save_last=True)])
    program.mark("fit")
    trainer.fit(module, datamodule=data)
    path = program.folder / "saved.ckpt"
    program.mark("save")
    trainer.save_checkpoint(path)
    program.mark("save weights")
    trainer.save_checkpoint(program.folder / "weights.ckpt", weights_only=True)
    program.mark("validate")
    trainer.validate(module, datamodule=data, ckpt_path=path, verbose=False)
    program.mark("test")
    trainer.test(module, datamodule=data, verbose=False)
    program.mark("predict")
    trainer.predict(module, datamodule=data)


def that_continues(program: Program) -> None:
    """Another trainer continues from a checkpoint: with a sanity check, and without."""
    path = program.folder / "saved.ckpt"
    trainer = program.trainer(**LIMITS, enable_checkpointing=False)
    trainer.fit(program.module(), datamodule=program.data())
    trainer.save_checkpoint(path)
    for steps in (1, 0):
        program.mark(f"continue, {steps} sanity steps")
        options = {**LIMITS, "max_epochs": 3, "num_sanity_val_steps": steps, "gradient_clip_algorithm": None}
        trainer = program.trainer(**options, enable_checkpointing=False)
        trainer.fit(program.module(), datamodule=program.data(), ckpt_path=path)


def with_loaders_of_the_module(program: Program) -> None:
    """Several loaders, a validation within the epoch, loaders that are asked for again; every stage."""
    module = program.module()
    options = {"val_check_interval": 2, "reload_dataloaders_every_n_epochs": 1, "enable_checkpointing": False}
    trainer = program.trainer(**options)
    for stage in ("fit", "validate", "test", "predict"):
        program.mark(stage)
        verbose = {"verbose": False} if stage in ("validate", "test") else {}
        getattr(trainer, stage)(module, **verbose)


def with_a_shorter_window(program: Program) -> None:
    """The last window of an epoch has fewer batches; only the second epoch is validated."""
    options = {"accumulate_grad_batches": 2, "limit_train_batches": 3, "check_val_every_n_epoch": 2}
    module = program.module()
    module.is_monitored, module.lr = False, 0.0  # the same losses, though windows have other weights
    trainer = program.trainer(**options, enable_checkpointing=False)
    trainer.fit(module, datamodule=program.data())


def with_an_exception(program: Program) -> None:
    """A step raises."""
    module = program.module()
    module.failing = (0, 1)
    try:
        program.trainer(enable_checkpointing=False).fit(module, datamodule=program.data())
    except ValueError:
        program.mark("raised")


def with_an_epoch_that_ends(program: Program) -> None:
    """`on_train_batch_start` ends an epoch."""
    module = program.module()
    module.ending, module.is_monitored, module.lr = (0, 1), False, 0.0
    trainer = program.trainer(enable_checkpointing=False, limit_train_batches=2)
    trainer.fit(module, datamodule=program.data())


def with_manual_optimization(program: Program) -> None:
    """The module steps its optimizer."""
    without = ("configure_gradient_clipping", "lr_scheduler_step", "optimizer_step", "optimizer_zero_grad")
    module = program.module(without=without, is_automatic=False)
    trainer = program.trainer(enable_checkpointing=False, limit_train_batches=2)
    trainer.fit(module, datamodule=program.data())


PROGRAMS: Mapping[str, Callable[[Program], None]] = {
    function.__name__: function
    for function in (
        with_a_data_module,
        that_continues,
        with_loaders_of_the_module,
        with_a_shorter_window,
        with_an_exception,
        with_an_epoch_that_ends,
        with_manual_optimization,
    )
}
LIBRARIES = {"lightning": "lightning.pytorch", "rankwise": "rankwise.lightning"}


def record(name: str, library: str, folder: Path, shared: Hooks) -> list[str]:
    """Run a program in one process; return the lines that it has recorded of shared hooks."""
    environments = importlib.import_module(f"{LIBRARIES[library]}.plugins.environments")
    alone = environments.LightningEnvironment()  # detection may start MPI
    program = Program(library, folder, {"devices": 1, "plugins": [alone]}, shared)
    PROGRAMS[name](program)
    return program.recorder.lines


def main() -> None:
    """Run all programs on a rank of torchrun; write what it has recorded: recording.py LIBRARY FOLDER."""
    library, folder, rank = sys.argv[1], Path(sys.argv[2]), os.environ["RANK"]
    # Each rank has the same batches: the libraries distribute them in other orders.
    options = {"devices": 2, "strategy": "ddp", "use_distributed_sampler": False}
    shared = shared_with(records.read("hooks")["hooks"])
    for name, run in PROGRAMS.items():
        program = Program(library, folder / name, options, shared)
        run(program)
        (folder / f"{name}.{rank}").write_text("\n".join(program.recorder.lines))


if __name__ == "__main__":
    main()
