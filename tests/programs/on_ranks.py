"""A program as rankwise runs it: what a script does on each rank."""

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rankwise import Trainer, TrainingModule
from rankwise.callbacks import Callback, ModelCheckpoint
from tests.process.training_tasks import quiet_trainer
from tests.programs import hook_bodies, learning
from tests.programs.learning import Samples
from tests.programs.program import Action, Deed, Job, Program, Run
from tests.programs.reference import Outcome, new_fold, new_net

MakeStrategy = Callable[..., Any]
MOST_LOADERS = 2


class Module(TrainingModule):
    """The program's network, which logs what the reference computes."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.net = new_net(program)
        self.program = program
        self.automatic_optimization = not program.learning.is_manual
        names = {"val": program.metrics, "test": program.metrics, "train": program.train_metrics}
        self.metrics: Any = nn.ModuleDict()
        for prefix, loader in itertools.product(names, range(MOST_LOADERS)):
            self.metrics[f"{prefix}{loader}"] = nn.ModuleDict(learning.make_metrics(names[prefix]))
        self.validations: list[float] = []
        self.seen: list[tuple[int, list[int]]] = []
        self.notes: list[float] = []
        self.draws: list[float] = []

    def perform(self, owner: str, hook: str, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Do what the program does in a hook."""
        for deed in self.program.deeds:
            if (deed.owner, deed.hook) == (owner, hook):
                self._perform(deed, [optimizer] if optimizer is not None else self.trainer.optimizers)

    def _perform(self, deed: Deed, optimizers: list[torch.optim.Optimizer]) -> None:
        def add_up() -> float:
            return float(self.all_gather(self.trainer.global_rank + 1.0).sum())

        def draw() -> float:
            self.draws.append(hook_bodies.draw())
            return self.draws[-1]

        self.notes.append(hook_bodies.perform(deed, self.net, optimizers, add_up=add_up, draw=draw))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for change in self.program.changes:
            if (change.epoch, change.batch) == (self.current_epoch, batch_idx):
                learning.apply_change(self.net, self.trainer.optimizers[0], change, self.trainer.global_rank)
        self.perform("module", "on_train_batch_start")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        samples = learning.read_batch(self.program.train.shape, batch)
        self.seen.append((self.current_epoch, samples.numbers.tolist()))
        is_by_token = self.program.options.weighting == "logged"
        weight = samples.tokens.sum() if is_by_token else None
        if self.program.learning.is_manual:
            predicted, loss = self._optimize(samples, weight, self.optimizers()[batch_idx % 2])
        else:
            predicted, loss = learning.predict(self.net, samples, is_by_token=is_by_token)
            if weight is not None:
                self.log_weight(weight)
        options: dict[str, Any] = {"on_step": False, "on_epoch": True, "sync_dist": True}
        self.log("train", loss, batch_size=self._said(samples), **options)
        self.log("train_max", samples.x.max(), reduce_fx="max", **options)
        self.log("train_sum", len(samples), reduce_fx="sum", **options)
        options = {"batch_size": self._said(samples), "on_step": True, "sync_dist": True}
        self.log("last", loss, **options)
        self.log("last_max", loss, reduce_fx="max", **options)
        self._log_metrics("train", 0, predicted, samples)
        return loss

    def _optimize(self, samples: Samples, weight: Tensor | None, optimizer: Any) -> tuple[Tensor, Tensor]:
        with optimizer.toggled():
            predicted, loss = learning.predict(self.net, samples, is_by_token=weight is not None)
            optimizer.zero_grad()
            self.manual_backward(loss, weight=weight)
            if clip := self.program.options.clip:
                self.clip_gradients(optimizer, clip, self.program.options.clip_algorithm)
            optimizer.step()
        return predicted, loss.detach()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._measure("val", batch, dataloader_idx)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._measure("test", batch, dataloader_idx)

    def _measure(self, prefix: str, batch: Any, loader: int) -> None:
        samples = learning.read_batch(self.program.evaluation.shape, batch)
        predicted = self.net(samples.x)
        errors = (predicted - samples.y).square()
        self.log(prefix, errors.mean(), batch_size=self._said(samples))
        self.log(f"{prefix}_max", errors.max(), reduce_fx="max")
        self.log(f"{prefix}_sum", len(samples), reduce_fx="sum")
        self._log_metrics(prefix, loader, predicted, samples)

    def _log_metrics(self, prefix: str, loader: int, predicted: Tensor, samples: Samples) -> None:
        for name, metric in self.metrics[f"{prefix}{loader}"].items():
            learning.update_metric(metric, predicted, samples)
            self.log(f"{prefix}_metric_{name}", metric)

    def _said(self, samples: Samples) -> int | None:
        return len(samples) if self.program.says_batch_size else None

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        predicted: Tensor = self.net(learning.read_batch(self.program.evaluation.shape, batch).x)
        return predicted

    def on_validation_end(self) -> None:
        if self.trainer.is_fitting:
            self.validations.append(float(self.trainer.callback_metrics["val"]))

    def configure_optimizers(self) -> Any:
        optimizers = learning.make_optimizers(self.net, self.program.learning)
        for optimizer in optimizers:
            optimizer.register_step_post_hook(self._after_step)
        scheduler = learning.make_scheduler(optimizers[0], self.program.learning)
        if scheduler is None:
            return optimizers
        interval = "step" if self.program.learning.schedule == "step" else "epoch"
        scheduling = {"scheduler": scheduler, "interval": interval, "monitor": "val"}
        return {"optimizer": optimizers[0], "lr_scheduler": scheduling}

    def _after_step(self, optimizer: torch.optim.Optimizer, arguments: Any, options: Any) -> None:
        self.perform("optimizer", "step", optimizer)


def _performing(owner: str, hook: str) -> Callable[..., None]:
    """Return a hook that does what the program does in it."""

    def perform(one: Any, *arguments: Any) -> None:
        trainer, module, *others = arguments if owner == "callback" else (one.trainer, one, *arguments)
        if trainer.is_fitting:
            module.perform(owner, hook, *others[: hook == "on_before_optimizer_step"])

    return perform


HOOKS = [hook for hook in hook_bodies.HOOKS if hook != "step"]  # which is an optimizer's
Performing = type("Performing", (Callback,), {hook: _performing("callback", hook) for hook in HOOKS})
"""Calls what the program does in the hooks of a callback."""
for _hook in HOOKS:
    if _hook not in vars(Module):
        setattr(Module, _hook, _performing("module", _hook))


def run_job(
    program: Program, job: Job, folder: Path, make_strategy: MakeStrategy, rank: int = 0
) -> list[Outcome]:
    """Do what the script does; return what is there after each action.

    Checkpoints are left in `folder`; runs that resume read the newest of the run before.
    """
    outcomes: list[Outcome] = []
    note = folder / "newest.txt"
    newest = Path(note.read_text()) if note.exists() else None
    torch.manual_seed(program.seed if program.is_seeded else program.seed + rank)
    for run in job.runs:
        with learning.without_warnings():
            found, newest = _run(program, job, run, folder, newest, make_strategy)
        outcomes += found
    if newest is not None and rank == 0:
        note.write_text(str(newest))
    return outcomes


def _run(
    program: Program, job: Job, run: Run, folder: Path, newest: Path | None, make_strategy: MakeStrategy
) -> tuple[list[Outcome], Path | None]:
    """Return the outcomes, and the newest checkpoint."""
    module = Module(program)
    subset = new_fold(program, run)
    interval = program.options.save_every_n_steps
    saving = ModelCheckpoint(folder / "steps", every_n_train_steps=interval or None)
    trainer = _trainer(program, job, make_strategy, [Performing(), saving] if interval else [Performing()])
    path = newest if run.resumes else None
    outcomes = []
    for action in run.actions:
        result = _act(program, action, trainer, module, subset, path, has_validation=run.has_validation)
        path = None if action.name == "fit" else path
        outcomes.append({**_state(trainer, module), **result, "random": torch.rand(2)})
    if run.has_fit and saving.best_model_path:
        newest = Path(saving.best_model_path)
    elif run.has_fit:
        newest = folder / "last.ckpt"
        trainer.save_checkpoint(newest)
    return outcomes, newest


def _act(
    program: Program,
    action: Action,
    trainer: Trainer,
    module: Module,
    subset: list[int] | None,
    path: Path | None,
    *,
    has_validation: bool,
) -> Outcome:
    loaders = [learning.make_loader(data) for data in program.evaluation_loaders(action.num_loaders)]
    evaluation: Any = loaders[0] if action.num_loaders == 1 else loaders
    match action.name:
        case "fit":
            epoch, step = _position(trainer, path)
            trainer.max_epochs = epoch + action.epochs
            trainer.max_steps = step + action.steps if action.steps else -1
            module.validations, module.seen, module.notes, module.draws = [], [], [], []
            train = learning.make_loader(program.train, subset)
            trainer.fit(module, train, evaluation if has_validation else None, ckpt_path=path)
            metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
            noted = {"validations": list(module.validations), "notes": list(module.notes)}
            return {"metrics": metrics, **noted, "seen": module.seen, "draws": module.draws}
        case "predict":
            return {"predictions": trainer.predict(module, evaluation)}
        case name:
            return {"metrics": getattr(trainer, name)(module, evaluation)}


def _position(trainer: Trainer, path: Path | None) -> tuple[int, int]:
    """Return the epoch and the step where a fit begins."""
    if path is None:
        return trainer.current_epoch, trainer.global_step
    saved = torch.load(path, weights_only=True)
    return saved["epoch"], saved["global_step"]


def _trainer(program: Program, job: Job, make_strategy: MakeStrategy, callbacks: list[Callback]) -> Trainer:
    options = program.options
    strategy = make_strategy(
        gradient_weighting=options.weighting,
        sync_mode=options.sync_mode,
        bucket_cap_mb=options.bucket_cap_mb,
        find_unused_parameters=program.learning.net == "branching",
    )
    interval = {"val_check_interval": options.val_check_interval} if options.val_check_interval else {}
    return quiet_trainer(
        strategy,
        job.world_size,
        accumulate_grad_batches=options.accumulate,
        gradient_clip_val=0 if program.learning.is_manual else options.clip,
        gradient_clip_algorithm=options.clip_algorithm,
        uneven_inputs=options.uneven_inputs,
        check_val_every_n_epoch=options.check_val_every_n_epoch,
        callbacks=callbacks,
        enable_checkpointing=len(callbacks) > 1,
        **interval,
    )


def _state(trainer: Trainer, module: Module) -> Outcome:
    state: Outcome = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    state["position"] = [trainer.current_epoch, trainer.global_step]
    state["optimizers"] = copy.deepcopy([optimizer.state_dict() for optimizer in trainer.optimizers])
    return state
