"""A program as rankwise runs it: what a script does on each rank."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from rankwise import Trainer, TrainingModule
from tests.process.training_tasks import quiet_trainer
from tests.programs import learning
from tests.programs.learning import Samples
from tests.programs.program import Action, Job, Program, Run
from tests.programs.reference import Outcome, new_fold, new_net

MakeStrategy = Callable[..., Any]


class Module(TrainingModule):
    """The program's network, which logs what the reference computes."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.net = new_net(program)
        self.program = program
        self.automatic_optimization = not program.learning.is_manual
        self.metrics: Any = nn.ModuleDict(
            {prefix: nn.ModuleDict(learning.make_metrics(program.metrics)) for prefix in ("val", "test")}
        )
        self.validations: list[float] = []
        self.seen: list[tuple[int, list[int]]] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for change in self.program.changes:
            if (change.epoch, change.batch) != (self.current_epoch, batch_idx):
                continue
            learning.apply_change(self.net, self.trainer.optimizers[0], change)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        samples = learning.read_batch(self.program.train.shape, batch)
        self.seen.append((self.current_epoch, samples.numbers.tolist()))
        is_by_token = self.program.options.weighting == "logged"
        weight = samples.tokens.sum() if is_by_token else None
        if self.program.learning.is_manual:
            loss = self._optimize(samples, weight, self.optimizers()[batch_idx % 2])
        else:
            loss = learning.loss_of(self.net, samples, is_by_token=is_by_token)
            if weight is not None:
                self.log_weight(weight)
        options: dict[str, Any] = {"on_step": False, "on_epoch": True, "sync_dist": True}
        self.log("train", loss, batch_size=self._said(samples), **options)
        self.log("train_max", samples.x.max(), reduce_fx="max", **options)
        self.log("train_sum", len(samples), reduce_fx="sum", **options)
        return loss

    def _optimize(self, samples: Samples, weight: Tensor | None, optimizer: Any) -> Tensor:
        with optimizer.toggled():
            loss = learning.loss_of(self.net, samples, is_by_token=weight is not None)
            optimizer.zero_grad()
            self.manual_backward(loss, weight=weight)
            if clip := self.program.options.clip:
                self.clip_gradients(optimizer, clip, self.program.options.clip_algorithm)
            optimizer.step()
        return loss.detach()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._measure("val", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._measure("test", batch)

    def _measure(self, prefix: str, batch: Any) -> None:
        samples = learning.read_batch(self.program.evaluation.shape, batch)
        predicted = self.net(samples.x)
        errors = (predicted - samples.y).square()
        self.log(prefix, errors.mean(), batch_size=self._said(samples))
        self.log(f"{prefix}_max", errors.max(), reduce_fx="max")
        self.log(f"{prefix}_sum", len(samples), reduce_fx="sum")
        for name, metric in self.metrics[prefix].items():
            learning.update_metric(metric, predicted, samples)
            self.log(f"{prefix}_metric_{name}", metric)

    def _said(self, samples: Samples) -> int | None:
        return len(samples) if self.program.says_batch_size else None

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        predicted: Tensor = self.net(learning.read_batch(self.program.evaluation.shape, batch).x)
        return predicted

    def on_validation_end(self) -> None:
        self.validations.append(float(self.trainer.callback_metrics["val"]))

    def configure_optimizers(self) -> Any:
        optimizers = learning.make_optimizers(self.net, self.program.learning)
        scheduler = learning.make_scheduler(optimizers[0], self.program.learning)
        if scheduler is None:
            return optimizers
        interval = "step" if self.program.learning.schedule == "step" else "epoch"
        return {
            "optimizer": optimizers[0],
            "lr_scheduler": {"scheduler": scheduler, "interval": interval, "monitor": "val"},
        }


def run_job(
    program: Program, job: Job, folder: Path, make_strategy: MakeStrategy, rank: int = 0
) -> list[Outcome]:
    """Do what the script does; return what is there after each action.

    A checkpoint of the last run is left in `folder`; runs that resume read it.
    """
    outcomes: list[Outcome] = []
    torch.manual_seed(program.seed if program.is_seeded else program.seed + rank)
    for number, run in enumerate(job.runs):
        if job.world_size == 1:
            torch.manual_seed(program.seed + number)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="find_unused_parameters")  # not what this is about
            outcomes += _run(program, job, run, folder / "last.ckpt", make_strategy)
    return outcomes


def _run(
    program: Program, job: Job, run: Run, checkpoint: Path, make_strategy: MakeStrategy
) -> list[Outcome]:
    module = Module(program)
    subset = new_fold(program, run)
    trainer = _trainer(program, job, make_strategy)
    path = checkpoint if run.resumes else None
    outcomes = []
    for action in run.actions:
        result = _act(program, action, trainer, module, subset, path, has_validation=run.has_validation)
        path = None if action.name == "fit" else path
        outcomes.append({**_state(trainer, module), **result, "random": torch.rand(2)})
    if run.has_fit:
        trainer.save_checkpoint(checkpoint)
    return outcomes


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
    evaluation: DataLoader[Any] = learning.make_loader(program.evaluation)
    match action.name:
        case "fit":
            epoch, step = _position(trainer, path)
            trainer.max_epochs = epoch + action.epochs
            trainer.max_steps = step + action.steps if action.steps else -1
            module.validations, module.seen = [], []
            train = learning.make_loader(program.train, subset)
            trainer.fit(module, train, evaluation if has_validation else None, ckpt_path=path)
            metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
            return {"metrics": metrics, "validations": list(module.validations), "seen": module.seen}
        case "predict":
            return {"predictions": trainer.predict(module, evaluation)}
        case name:
            [found] = getattr(trainer, name)(module, evaluation)
            return {"metrics": found}


def _position(trainer: Trainer, path: Path | None) -> tuple[int, int]:
    """Return the epoch and the step where a fit begins."""
    if path is None:
        return trainer.current_epoch, trainer.global_step
    saved = torch.load(path, weights_only=True)
    return saved["epoch"], saved["global_step"]


def _trainer(program: Program, job: Job, make_strategy: MakeStrategy) -> Trainer:
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
        **interval,
    )


def _state(trainer: Trainer, module: Module) -> Outcome:
    state: Outcome = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    state["position"] = [trainer.current_epoch, trainer.global_step]
    state["optimizers"] = copy.deepcopy([optimizer.state_dict() for optimizer in trainer.optimizers])
    return state
