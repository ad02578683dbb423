"""`Trainer`: fits, validates, tests and predicts with a module, on any strategy."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch

from rankwise.callbacks import Callback
from rankwise.errors import InvalidArgumentError, InvalidTypeError, LifecycleError
from rankwise.trainer import arguments
from rankwise.trainer.arguments import with_known_keywords
from rankwise.trainer.checkpointing import check_hyper_parameters, find_checkpoint, make_checkpoint
from rankwise.trainer.data_loaders import check_loaders
from rankwise.trainer.loops.batch_schedule import UNEVEN_INPUTS
from rankwise.trainer.loops.manual import check_manual
from rankwise.trainer.loops.nonfinite import POLICIES, check_hook
from rankwise.trainer.loops.prediction import GATHERINGS, Gather
from rankwise.trainer.module import TrainingModule
from rankwise.trainer.stages import StageName, StageSpec, check_module, run_stage
from rankwise.trainer.state import TrainerState
from rankwise.trainer.state_transfer import restore

if TYPE_CHECKING:
    from rankwise.loggers import Logger
    from rankwise.strategies import Strategy

__all__ = ["Trainer"]


@final
class Trainer(TrainerState):
    """Run a `TrainingModule` through its stages, on the processes that a strategy provides.

    Names and defaults are Lightning's. Everything is checked here, before any process starts.

    Args:
        accelerator: `"auto"`, `"cpu"`, `"cuda"` or `"gpu"`.
        devices: processes on this node: a number, `"auto"` or device indices.
        num_nodes: nodes; `"auto"` for as many as were started.
        strategy: a registered name, or an instance.
        precision: `"32-true"`, `"16-mixed"`, `"bf16-mixed"`, `"16-true"`, `"bf16-true"`, `"64-true"`, or with
            32-bit master weights `"16-master"`, `"bf16-master"`; None leaves it to the strategy.
        plugins: a cluster environment (or its name), a precision, a checkpoint IO, a strategy; one of each.
        callbacks: one, or a list.
        logger: one, or a list; None and True for a `CSVLogger`, False for none.
        max_epochs: after how many epochs to stop, -1 for never; 1000 if `max_steps` is not given either.
        min_epochs: how many epochs to train even if a callback wants to stop.
        max_steps: after how many optimizer steps to stop; -1 for never.
        max_time: how long to train, all fits together: a `timedelta`, `"DD:HH:MM:SS"` or `{"hours": 3}`.
        limit_train_batches: how many batches of an epoch (int), or which fraction (float), each rank runs.
        limit_val_batches: the same for validation.
        limit_test_batches: the same for test.
        limit_predict_batches: the same for prediction, but of the whole loader, for all ranks together; with
            `use_distributed_sampler=False` of each rank's.
        fast_dev_run: run that many batches (True: one) of each loader once, save and log nothing.
        val_check_interval: validate after that many batches (int) or that fraction of an epoch (float), where
            their accumulation window ends.
        check_val_every_n_epoch: validate only in every n-th epoch.
        num_sanity_val_steps: accepted for Lightning's sake; only 0, as no validation runs before training.
        accumulate_grad_batches: how many batches an optimizer step is made of.
        gradient_clip_val: clip gradients to that; None or 0 for no clipping.
        gradient_clip_algorithm: `"norm"` or `"value"`.
        on_nonfinite: what all ranks do when a loss is infinite or NaN on any: `"raise"`, `"skip"` the step,
            or None to look at none.
        deterministic: whether torch uses deterministic algorithms in this trainer's stages; `"warn"` only
            warns of operations that have none.
        benchmark: whether cuDNN measures which algorithm is fastest; None leaves that as it is.
        sync_batchnorm: whether batch normalisation uses all ranks' batches in training; on CUDA only.
        use_distributed_sampler: whether loaders are split over the ranks; without it they are used as given.
        uneven_inputs: what happens when ranks have different numbers of training batches: `"error"`,
            `"truncate"` (all stop with the shortest) or `"join"` (a rank that ran out repeats its last batch
            at weight 0 and steps like the others; shards are then left uneven instead of padded).
        log_every_n_steps: after how many optimizer steps loggers get the steps' metrics.
        enable_progress_bar: None shows one where tqdm is installed.
        enable_checkpointing: whether there is a `ModelCheckpoint` if none is among the callbacks.
        default_root_dir: where logs and checkpoints go; the working directory by default.

    Attributes:
        strategy: the strategy, bound.
        callbacks: all callbacks, those that save checkpoints last.
        loggers: all loggers.
        progress: how far training has come.
        seed: rank 0's, on which all random numbers of the run depend.
        order_seed: what the order of shuffled training data depends on: its loader's generator, or `seed`.
        gradient_order: the trainable parameters' numbers, in the order in which a backward pass reaches them.
        epoch_results: what was logged in the current training epoch so far.
        callback_metrics: the last value of everything logged.
        logged_metrics: the last values that loggers got.
        optimizers: the optimizers, once `fit` has made them; there also after a fit in other processes.
        lr_scheduler_configs: the learning rate schedulers, and when they step.
        should_stop: set it, on one rank or on several, to end training on all after the same optimizer step.

    Raises:
        UnknownArgumentError: for a keyword that there is not; says what another system's is called here.
        InvalidArgumentError, InvalidTypeError, UnknownNameError, ConfigurationError: for wrong arguments.
        WorldSizeMismatchError: when other processes exist than were asked for.
        MissingExtraError: when a progress bar is asked for and tqdm is not installed.
    """

    @with_known_keywords
    def __init__(
        self,
        *,
        accelerator: str = "auto",
        devices: Any = "auto",
        num_nodes: Any = "auto",
        strategy: str | Strategy = "auto",
        precision: str | int | None = None,
        plugins: Any = None,
        callbacks: Callback | list[Callback] | None = None,
        logger: Logger | list[Logger] | bool | None = None,
        max_epochs: int | None = None,
        min_epochs: int | None = None,
        max_steps: int = -1,
        max_time: Any = None,
        limit_train_batches: int | float = 1.0,
        limit_val_batches: int | float = 1.0,
        limit_test_batches: int | float = 1.0,
        limit_predict_batches: int | float = 1.0,
        fast_dev_run: bool | int = False,
        val_check_interval: int | float = 1.0,
        check_val_every_n_epoch: int = 1,
        num_sanity_val_steps: int = 0,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str = "norm",
        on_nonfinite: str | None = None,
        sync_batchnorm: bool = False,
        deterministic: bool | str = False,
        benchmark: bool | None = None,
        use_distributed_sampler: bool = True,
        uneven_inputs: str = "error",
        log_every_n_steps: int = 50,
        enable_progress_bar: bool | None = None,
        enable_checkpointing: bool = True,
        default_root_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        self.max_steps = max_steps
        self.max_epochs = max_epochs
        self.min_epochs = arguments.check_whole("min_epochs", min_epochs or 0, 0)
        self.limits = {
            "train": arguments.check_limit("limit_train_batches", limit_train_batches),
            "validate": arguments.check_limit("limit_val_batches", limit_val_batches),
            "test": arguments.check_limit("limit_test_batches", limit_test_batches),
            "predict": arguments.check_limit("limit_predict_batches", limit_predict_batches),
        }
        self.val_check_interval = arguments.check_interval("val_check_interval", val_check_interval)
        self.check_val_every_n_epoch = arguments.check_whole(
            "check_val_every_n_epoch", check_val_every_n_epoch, 1
        )
        if num_sanity_val_steps != 0:
            raise InvalidArgumentError(
                argument="num_sanity_val_steps", value=num_sanity_val_steps, expected="0: there are none"
            )
        self.accumulate_grad_batches = arguments.check_whole(
            "accumulate_grad_batches", accumulate_grad_batches, 1
        )
        self.gradient_clip_val = arguments.check_number("gradient_clip_val", gradient_clip_val or 0)
        self.gradient_clip_algorithm = arguments.check_choice(
            "gradient_clip_algorithm", gradient_clip_algorithm, ("norm", "value")
        )
        self.on_nonfinite = (
            None if on_nonfinite is None else arguments.check_choice("on_nonfinite", on_nonfinite, POLICIES)
        )
        self.deterministic = arguments.check_choice("deterministic", deterministic, (True, False, "warn"))
        self.benchmark = (
            None if benchmark is None else arguments.check_choice("benchmark", benchmark, (True, False))
        )
        self.use_distributed_sampler = use_distributed_sampler
        self.uneven_inputs = arguments.check_choice("uneven_inputs", uneven_inputs, UNEVEN_INPUTS)
        self.log_every_n_steps = arguments.check_whole("log_every_n_steps", log_every_n_steps, 1)
        self.default_root_dir = str(Path(default_root_dir or Path.cwd()).absolute())
        self.callbacks = arguments.collect_callbacks(
            callbacks,
            enable_checkpointing=enable_checkpointing,
            enable_progress_bar=enable_progress_bar,
            max_time=max_time,
        )
        self.loggers = arguments.collect_loggers(logger, self.default_root_dir)
        self.fast_dev_run = arguments.check_whole("fast_dev_run", int(fast_dev_run), 0)
        if self.fast_dev_run:
            self._restrict_to(self.fast_dev_run)
        found = arguments.Plugins(plugins)
        self.strategy = arguments.collect_strategy(strategy, found)
        self.strategy.precision = arguments.collect_precision(precision, found) or self.strategy.precision
        if arguments.check_choice("sync_batchnorm", sync_batchnorm, (True, False)):
            self.strategy.sync_batchnorm = True
        self.strategy.checkpoint_io = found.checkpoint_io or self.strategy.checkpoint_io
        self.strategy.bind(
            accelerator=accelerator, devices=devices, num_nodes=num_nodes, environment=found.environment
        )

    # ------------------------------------------------------------------ stages

    def fit(
        self,
        model: TrainingModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        ckpt_path: str | os.PathLike[str] | None = None,
    ) -> None:
        """Train a module; with the one of the last fit, go on where that ended.

        Afterwards module, optimizers, metrics and callbacks of this process are as training left them,
        wherever it ran.

        Args:
            model: the module.
            train_dataloaders: the training loader; by default the module's own.
            val_dataloaders: one or several validation loaders; by default the module's own, if it has any.
            ckpt_path: a checkpoint to go on from: a path, `"best"`, or `"last"` (which may not exist yet).

        Raises:
            ConfigurationError: for a module or loaders that cannot be trained.
            CheckpointError: for a checkpoint that cannot be used.
            WorkerError: when a rank failed.
        """
        if model is not self._fitted_module:
            self._forget_fit()
            self.strategy.load_comm_hook_states([])
        self.should_stop = False
        if ckpt_path is None and self.warn_if_done():
            return
        self._launch("fit", model, {"train": train_dataloaders, "validate": val_dataloaders}, ckpt_path)

    def validate(
        self,
        model: TrainingModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | os.PathLike[str] | None = None,
    ) -> list[dict[str, float]]:
        """Evaluate a module (by default the one of the last stage) on validation data.

        A loader that shuffles stays shuffled; with `drop_last`, or a limit on the number of batches, chance
        then decides which samples are left out.

        Returns:
            What was logged, for each loader; each sample counted once, the same on every rank.

        Raises:
            The same errors as `fit`.
        """
        metrics: list[dict[str, float]] = self._evaluate("validate", model, dataloaders, ckpt_path)
        return metrics

    def test(
        self,
        model: TrainingModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | os.PathLike[str] | None = None,
    ) -> list[dict[str, float]]:
        """Evaluate a module (by default the one of the last stage) on test data; see `validate`."""
        metrics: list[dict[str, float]] = self._evaluate("test", model, dataloaders, ckpt_path)
        return metrics

    def predict(
        self,
        model: TrainingModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        gather: Gather = "all",
    ) -> list[Any]:
        """Run `predict_step` of a module (by default the one of the last stage) over data.

        Loaders are read in the order of the data set, also those with `shuffle=True` or a
        `DistributedSampler`; any other sampler gives its own order. With `use_distributed_sampler=False`
        they are read as they are, and the ranks' batches come in turn: the first of each, then the second.

        Args:
            model: the module.
            dataloaders: one or several loaders; by default the module's own.
            ckpt_path: a checkpoint whose weights to use.
            gather: who gets the outputs: `"all"` ranks, `"rank_zero"` alone (other ranks get an empty list,
                and need no memory for them), or with None each rank its own.

        Returns:
            What it returned for each batch, in dataset order, whatever the number of ranks; with several
            loaders a list of such lists.

        Raises:
            UnshardableLoaderError: for a loader that is split by samples, whose order nobody can restore.
            Others: the same errors as `fit`.
        """
        arguments.check_choice("gather", gather, GATHERINGS)
        predictions: list[Any] = self._evaluate("predict", model, dataloaders, ckpt_path, gather)
        return predictions

    def save_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Write a checkpoint of the module of the last fit.

        Collective: within a stage, every rank must call this.

        Raises:
            LifecycleError: when there was no fit.
            CheckpointError: when it cannot be written.
        """
        if self._fitted_module is None:
            raise LifecycleError(
                call="save_checkpoint()",
                state="new",
                needed="a fit",
                remedy="call trainer.fit(model, ...) first.",
            )
        self.strategy.save_checkpoint(make_checkpoint(self, self._fitted_module, path), path)

    def _evaluate(
        self, stage: StageName, model: Any, dataloaders: Any, ckpt_path: Any, gather: Gather = "all"
    ) -> Any:
        model = self.module if model is None else model
        return self._launch(stage, model, {stage: dataloaders}, ckpt_path, gather)

    def _launch(
        self, stage: StageName, model: Any, loaders: dict[str, Any], ckpt_path: Any, gather: Gather = "all"
    ) -> Any:
        """Check all that can be checked here, run the stage on every rank, take its state over."""
        if not isinstance(model, TrainingModule):
            raise InvalidTypeError(
                argument="model",
                value=model,
                expected="an instance of TrainingModule",
                remedy="for torch.compile(model): model.compile(), and fit(model)"
                if type(model).__name__ == "OptimizedModule"
                else "",
            )
        check_module(model, stage, loaders)
        if stage == "fit":
            check_manual(model, self.strategy, self)
            check_hook(self.strategy, self.on_nonfinite)
            check_hyper_parameters(self, model)
        for phase, given in loaders.items():
            check_loaders(self, phase, given)
        path = find_checkpoint(self, ckpt_path)
        spec = StageSpec(
            stage,
            seed=torch.initial_seed(),
            brings_state_back=not self.strategy.runs_in_caller,
            checkpoint=None if path is None else self.strategy.load_checkpoint(path),
            checkpoint_path=path or "",
            gather=gather,
        )
        self._adopt(model, stage)
        self.ckpt_path = path
        value, state = self.strategy.launch(run_stage, model=model, trainer=self, loaders=loaders, spec=spec)
        if state is not None:
            restore(self, model, state)
        return value

    # ------------------------------------------------------------------ within a stage, on every rank

    def enter_stage(self, strategy: Strategy, model: TrainingModule, stage: StageName) -> None:
        """Become the trainer of this rank, for a stage."""
        self.strategy = strategy
        self._adopt(model, stage)
        self._stage = stage

    def leave_stage(self) -> None:
        """Let go of what belongs to a stage alone."""
        self._forget_stage()

    def _adopt(self, model: TrainingModule, stage: StageName) -> None:
        self._module = model
        if stage == "fit":
            self._fitted_module = model
        model.trainer = self

    def _restrict_to(self, num_batches: int) -> None:
        self.max_epochs, self.max_steps = 1, num_batches
        self.limits = dict.fromkeys(self.limits, num_batches)
        self.val_check_interval, self.check_val_every_n_epoch = 1.0, 1
        self.loggers = []
        self.callbacks = arguments.without_side_effects(self.callbacks)
