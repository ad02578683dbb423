"""`Trainer`: fits, validates, tests and predicts with a module, on any strategy."""

from __future__ import annotations

import copy
import logging
import os
import sys
from typing import Any, final

from rankwise.callbacks import Callback, EarlyStopping, ModelCheckpoint, PreparingCallback
from rankwise.callbacks.base import logging_through
from rankwise.checks import check_choice, check_value
from rankwise.compatibility.names import refuse_variables
from rankwise.errors import LifecycleError
from rankwise.loggers.base import Logger, NoLogger
from rankwise.monitoring.heartbeat import report_phase
from rankwise.processes.memory_file import read_by_name
from rankwise.processes.returned_state import ReturnedState
from rankwise.processes.signals import StoppedBySignal
from rankwise.profilers import Profiler, create_profiler
from rankwise.registry import bound_strategy
from rankwise.strategies import Strategy
from rankwise.trainer import arguments
from rankwise.trainer.arguments import TrainerOptions, with_known_keywords
from rankwise.trainer.checkpointing import CheckpointFiles, check_hyper_parameters, save_checkpoint
from rankwise.trainer.consistency import check_can_compare
from rankwise.trainer.data import DataModule
from rankwise.trainer.data.stage_loaders import StageLoaders, check_loaders
from rankwise.trainer.hooks import Hooks, check_hooks
from rankwise.trainer.loops.evaluation import GATHERINGS, Gather
from rankwise.trainer.loops.manual import check_manual
from rankwise.trainer.loops.nonfinite import check_hook
from rankwise.trainer.loops.optimizers import OptimizerSet
from rankwise.trainer.metrics.results import metrics_table
from rankwise.trainer.module import TrainingModule, no_module
from rankwise.trainer.properties import TrainerProperties
from rankwise.trainer.stages import Stage, own_classes
from rankwise.trainer.state import LoopContext, StageName, StageState, TrainerState, TrainerStatus
from rankwise.trainer.state_transfer import capture, known_to_caller, restore, state_before

_log = logging.getLogger(__name__)


@final
class Trainer(TrainerProperties):
    """Fit, validate, test and predict with a `TrainingModule`, on the processes of a strategy.

    Names and defaults are Lightning's. All arguments are checked before any process starts.

    Args:
        accelerator: `"auto"`, `"cpu"`, `"cuda"` or `"gpu"`.
        devices: processes on this node: a number, `"auto"` or device indices.
        num_nodes: nodes; `"auto"` for as many as were started.
        strategy: a registered name, or an instance, whose own arguments must not contradict the others.
        precision: `"32-true"`, `"16-mixed"`, `"bf16-mixed"`, `"16-true"`, `"bf16-true"`, `"64-true"`, or with
            32-bit master weights `"16-master"`, `"bf16-master"`; None uses the strategy's.
        plugins: a cluster environment (or its name), a precision, a checkpoint IO, a strategy; one of each.
        callbacks: one, or a list.
        logger: one, its name, or a list of them; None and True for a `CSVLogger`, False for none.
        max_epochs: after how many epochs to stop, -1 for never; 1000 if `max_steps` is not given either.
        min_epochs: how many epochs to train even if a callback wants to stop.
        max_steps: after how many optimizer steps to stop; -1 for never.
        min_steps: how many optimizer steps to train even if a callback wants to stop.
        max_time: how long to train, all fits together: a `timedelta`, `"DD:HH:MM:SS"` or `{"hours": 3}`.
        limit_train_batches: how many batches of an epoch (int), or which fraction (float), each rank runs.
        limit_val_batches: the same for validation.
        limit_test_batches: the same for test.
        limit_predict_batches: the same for prediction, but of the whole loader, for all ranks together; with
            `use_distributed_sampler=False` of each rank's.
        overfit_batches: train and validate in every epoch on that many batches, or that fraction of them,
            which are the first of the data: without shuffling. 0.0 for all.
        fast_dev_run: run that many batches (True: one) of each loader once, save and log nothing.
        val_check_interval: validate after that many batches (int), at most the epoch's, or that fraction of
            an epoch (float), where their accumulation window ends. A time (a `timedelta`, `"DD:HH:MM:SS"` or
            `{"minutes": 10}`) counts from the last validation, by rank 0's clock, and over epochs.
        check_val_every_n_epoch: validate only in every n-th epoch. With None, `val_check_interval` (int)
            counts the batches of all epochs.
        num_sanity_val_steps: how many batches of each validation loader run before training, to find errors
            early; -1 for all, None for 2. Their metrics are thrown away. A fit that continues within an epoch
            has no check.
        accumulate_grad_batches: how many batches there are in an optimizer step.
        gradient_clip_val: the limit of gradients; None or 0 for no clipping.
        gradient_clip_algorithm: `"norm"` or `"value"`.
        on_nonfinite: what all ranks do when a loss is infinite or NaN on any: `"raise"`, `"skip"` the step,
            or None for no check.
        detect_anomaly: whether autograd looks for NaN in gradients, and names the operation; it is slow.
        deterministic: whether torch uses deterministic algorithms in this trainer's stages; `"warn"` only
            warns of operations that have no such algorithm.
        benchmark: whether cuDNN measures which algorithm is fastest; None does not change the setting.
        sync_batchnorm: whether batch normalisation uses all ranks' batches in training; on CUDA only.
        inference_mode: whether `validate`, `test` and `predict` run under `torch.inference_mode` instead of
            `torch.no_grad`, as a validation within `fit` always does.
        use_distributed_sampler: whether loaders are split over the ranks; without it they are used as given.
        reload_dataloaders_every_n_epochs: after how many epochs `fit` asks for loaders of training and
            validation again, with random numbers that depend on the seed and the epoch alone; 0 for never.
        uneven_inputs: what happens when ranks have different numbers of training batches: `"error"`,
            `"truncate"` (all stop with the shortest) or `"join"` (a rank without batches repeats its last one
            with weight 0 and steps like the others; shards are then uneven instead of padded).
        log_every_n_steps: after how many optimizer steps loggers get the steps' metrics.
        check_ranks_every_n_steps: None compares the ranks' parameters and learning rates before each epoch
            and each checkpoint and at the end of `fit`; a difference is an error on all ranks. A number
            compares after so many optimizer steps, too, with the optimizers' states; 0 never compares.
        enable_progress_bar: whether there is a progress bar; None for one if tqdm is installed.
        enable_model_summary: whether to add a `ModelSummary` if `callbacks` has none; None means True.
        enable_autolog_hparams: whether loggers get the module's hyperparameters when `fit` starts.
        profiler: `"simple"` for the time that each part of a stage takes, `"advanced"` for functions of
            Python, `"pytorch"` for operators of some batches, or a `Profiler`; printed at the end of a stage.
        model_registry: only None is accepted.
        barebones: whether nothing is logged, saved or shown, to measure the training loop; `self.log` has no
            effect then.
        enable_checkpointing: whether to add a `ModelCheckpoint` if `callbacks` has none; None means True.
        default_root_dir: where logs and checkpoints go; the working directory by default.

    Attributes:
        datamodule: the last data module that a stage was given; None without any.
        strategy: the strategy, bound: the given one, or a copy of it if the trainer has a precision, a
            checkpoint IO or `sync_batchnorm` for it, or if the given one is bound already.
        profiler: the profiler, or one that measures nothing. In a module,
            `with self.trainer.profiler.profile("x"):` measures a block. It has what rank 0 measured.
        callbacks: all callbacks, those that save checkpoints last. A list that is assigned within a stage
            counts from the next hook on, in the processes of the stage.
        loggers: all loggers; a list that is assigned within a stage counts likewise.
        limit_train_batches, limit_val_batches, limit_test_batches, limit_predict_batches: the arguments; what
            is assigned counts from the next stage on.
        progress: how far training has come.
        seed: rank 0's, which determines all random numbers of the run.
        order_seed: the seed of the order of training data: of its loader's generator, or `seed`.
        gradient_order: the trainable parameters' numbers, in the order in which a backward pass reaches them;
            empty where no sum depends on it: on two ranks, without a communication hook.
        epoch_results: the values logged in the current training epoch so far.
        callback_metrics: the last value of everything logged in this stage.
        logged_metrics: the last values of what loggers get.
        optimizers: the optimizers, once `fit` has created them; also after a fit in other processes. Sharded
            ones exist within a fit only.
        lr_scheduler_configs: the learning rate schedulers, and when they step.
        should_stop: set it, on one rank or on several, to end training on all after the same optimizer step.

    Raises:
        UnknownArgumentError: for an unknown keyword; names the replacement of other libraries' keywords.
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
        logger: Logger | str | list[Logger | str] | bool | None = None,
        max_epochs: int | None = None,
        min_epochs: int | None = None,
        max_steps: int = -1,
        min_steps: int | None = None,
        max_time: Any = None,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        overfit_batches: int | float = 0.0,
        fast_dev_run: bool | int = False,
        val_check_interval: Any = None,
        check_val_every_n_epoch: int | None = 1,
        num_sanity_val_steps: int | None = 0,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
        on_nonfinite: str | None = None,
        detect_anomaly: bool = False,
        sync_batchnorm: bool = False,
        deterministic: bool | str | None = None,
        benchmark: bool | None = None,
        inference_mode: bool = True,
        use_distributed_sampler: bool = True,
        reload_dataloaders_every_n_epochs: int = 0,
        uneven_inputs: str = "error",
        log_every_n_steps: int | None = None,
        check_ranks_every_n_steps: int | None = None,
        enable_progress_bar: bool | None = None,
        enable_checkpointing: bool | None = None,
        enable_model_summary: bool | None = False,
        profiler: Profiler | str | None = None,
        enable_autolog_hparams: bool = True,
        model_registry: str | None = None,
        barebones: bool = False,
        default_root_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        refuse_variables("Trainer", "PL_TRAINER_", os.environ)
        keywords = arguments.barebones_options(locals()) if barebones else dict(locals())
        keywords["fast_dev_run"] = int(fast_dev_run)
        options = TrainerOptions.__dataclass_fields__
        self.options = TrainerOptions(**{name: keywords[name] for name in options})
        self.callbacks = arguments.collect_callbacks(keywords)
        self.profiler = create_profiler(profiler)
        self.loggers = arguments.collect_loggers(keywords["logger"], self.default_root_dir)
        if self.fast_dev_run:
            self.callbacks, self.loggers = _for_dev_run(self.callbacks), []
        self.strategy = bound_strategy(
            strategy,
            precision,
            plugins,
            sync_batchnorm=sync_batchnorm,
            accelerator=accelerator,
            devices=devices,
            num_nodes=num_nodes,
        )
        self.datamodule: DataModule | None = None
        # The last module whose `configure_callbacks` was called, and the types of the callbacks added by it.
        self._configured: tuple[TrainingModule, set[type]] | None = None
        self._is_trial = False  # it has its callbacks alone
        self._has_trained_elsewhere = False  # within `on_exception` of a process that is not a rank
        self._forget_fit()

    def _forget_fit(self) -> None:
        self._module: TrainingModule | None = None
        self._fitted_module: TrainingModule | None = None
        self.state = TrainerState()
        self._stage = StageState()
        self._optimizers = OptimizerSet()

    def fit(
        self,
        model: TrainingModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        *,
        weights_only: bool | None = None,
    ) -> None:
        """Train a module; with the module of the last fit, continue where that ended.

        With another module a new run begins: progress, optimizers, `ModelCheckpoint` and `EarlyStopping`
        start over; callbacks of your own keep their state, and a `Timer` continues.

        Afterwards module, optimizers, metrics and callbacks of this process have the state of the training,
        also if it ran in other processes.

        Args:
            model: the module.
            train_dataloaders: the training loader, or several; by default the module's own. A data module in
                its place is `datamodule`.
            val_dataloaders: a validation loader or a list, [] for none; by default the module's own, if any.
            datamodule: a data module with the loaders; in the other stages too, in place of `dataloaders`.
            ckpt_path: a checkpoint to continue from: a path, `"best"`, or `"last"` (which may not exist yet).
            weights_only: only None and True are accepted: nothing in a checkpoint is run.

        Raises:
            ConfigurationError: for a module or loaders that cannot be trained.
            CheckpointError: for a checkpoint that cannot be used.
            WorkerError: when a rank failed.
        """
        arguments.check_weights_only(weights_only)
        if model is not self._fitted_module:
            self._forget_fit()
            self.strategy.gradients.load_states([])
        self.state.should_stop = False
        if ckpt_path is None and self.context(model).warn_if_done():
            return
        given = {"train": train_dataloaders, "validate": val_dataloaders}
        self._launch(Stage(StageLoaders("fit", given, datamodule), ckpt_path=ckpt_path), model)

    def validate(
        self,
        model: TrainingModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
        *,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """Evaluate a module on validation data; raises as `fit`.

        Without a model, the module of the last stage is used; after a fit it gets the weights of the best
        checkpoint, if a `ModelCheckpoint` has saved any, and a warning says so where a metric has chosen it.

        A loader that shuffles stays shuffled; with `drop_last`, or a limit on the number of batches, the
        samples that are left out are then random.

        With `verbose`, global rank 0 prints a table of the metrics; not with `barebones`.

        Returns:
            What was logged, for each loader; each sample counted once, the same on every rank.
        """
        check_choice("verbose", verbose, (True, False))
        arguments.check_weights_only(weights_only)
        loaders = StageLoaders("validate", {"validate": dataloaders}, datamodule)
        return self._evaluate(Stage(loaders, ckpt_path=ckpt_path), model, verbose)

    def test(
        self,
        model: TrainingModule | None = None,
        dataloaders: Any = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        verbose: bool = True,
        datamodule: DataModule | None = None,
        *,
        weights_only: bool | None = None,
    ) -> list[dict[str, float]]:
        """Evaluate a module on test data; see `validate`."""
        check_choice("verbose", verbose, (True, False))
        arguments.check_weights_only(weights_only)
        loaders = StageLoaders("test", {"test": dataloaders}, datamodule)
        return self._evaluate(Stage(loaders, ckpt_path=ckpt_path), model, verbose)

    def predict(
        self,
        model: TrainingModule | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        return_predictions: bool | None = None,
        ckpt_path: str | os.PathLike[str] | None = None,
        gather: Gather = "all",
        *,
        weights_only: bool | None = None,
    ) -> list[Any]:
        """Run `predict_step` of a module over data; without a model, of the one that `validate` would use.

        Loaders are read in the order of the data set, also those with `shuffle=True` or a
        `DistributedSampler`; any other sampler keeps its order. With `use_distributed_sampler=False`
        they are read as they are, and the ranks' batches are interleaved: the first of each, then the second.

        Args:
            model: the module.
            dataloaders: a loader or a list of them; by default the module's own.
            datamodule: a data module with the loaders to use instead.
            return_predictions: False to keep no outputs, where a callback writes them; None means True.
            ckpt_path: a checkpoint whose weights to use.
            gather: which ranks get the outputs: `"all"`, or `"rank_zero"` alone (others get an empty list);
                with None each rank gets its own.
            weights_only: as in `fit`.

        Returns:
            The outputs of each batch, in dataset order, for any number of ranks; with several loaders a list
            of such lists. [] without `return_predictions`.

        Raises:
            UnshardableLoaderError: for a loader that is split by samples, whose order cannot be restored.
            Others: the same errors as `fit`.
        """
        check_choice("gather", gather, GATHERINGS)
        check_choice("return_predictions", return_predictions, (True, False, None))
        arguments.check_weights_only(weights_only)
        loaders = StageLoaders("predict", {"predict": dataloaders}, datamodule)
        stage = Stage(loaders, gather, keeps_outputs=return_predictions is not False, ckpt_path=ckpt_path)
        predictions: list[Any] = self._launch(stage, model)
        return predictions

    def save_checkpoint(
        self, filepath: str | os.PathLike[str], weights_only: bool | None = None, storage_options: Any = None
    ) -> None:
        """Write a checkpoint of the module of the last fit; with `weights_only`, none to continue it from.

        Of `storage_options` only None is accepted: a `CheckpointIO` of your own has its options.

        Collective: within a stage, every rank must call this. In `on_exception` each rank that calls it
        writes its own state; a calling process that is not a rank writes nothing.

        Raises:
            LifecycleError: when there was no fit; in hooks after a failure, for a sharded optimizer's state.
            CheckpointError: when it cannot be written.
        """
        expected = "None: Trainer(plugins=[a CheckpointIO with options of its own])"
        check_value("storage_options", storage_options, storage_options is None, expected)
        if self._fitted_module is None:
            raise LifecycleError(
                "save_checkpoint()", state="new", needed="a fit", remedy="call trainer.fit(model, ...) first."
            )
        if self._has_trained_elsewhere:
            _log.warning(
                "%s is not written by the calling process, whose module is not trained: the ranks call "
                "on_exception, too, and save there.",
                os.fspath(filepath),
            )
            return
        with own_classes(self, self._fitted_module, self.datamodule):
            save_checkpoint(self.context(self._fitted_module), filepath, weights_only=bool(weights_only))

    def _evaluate(self, stage: Stage, model: Any, verbose: bool) -> list[dict[str, float]]:
        metrics: list[dict[str, float]] = self._launch(stage, model)
        if verbose and any(metrics) and self.is_global_zero and not self.barebones:
            sys.stdout.write(f"{metrics_table(stage.name, metrics)}\n")
        return metrics

    def _launch(self, stage: Stage, model: Any) -> Any:
        """Run a stage on every rank, and restore its state here."""
        is_given = model is not None or stage.name == "fit"
        model = model if is_given else self.module
        with own_classes(self, model, stage.loaders.datamodule, self.datamodule):
            self._check_stage(stage, model)
            if stage.name == "fit":
                self._prepare_run(stage, model)
            is_fitted = model is self._fitted_module
            if not is_given and stage.ckpt_path is None and is_fitted:
                stage.ckpt_path = CheckpointFiles(self.context(model)).best_of_fit(stage.name)
            try:
                with self.state.running(stage.name):
                    value, state = self._run_stage(stage, model)
            except BaseException as error:
                if not self.strategy.runs_in_caller:
                    self._end_elsewhere(model, error)
                raise
            self._restore(model, state, TrainerStatus.FINISHED)
        return value

    def _restore(self, model: TrainingModule, state: ReturnedState | None, status: TrainerStatus) -> None:
        """Restore the state of a stage that has run in other processes, if there is one."""
        if state is not None:
            restore(self.context(model), state)
            self.state.end(status)

    def _end_elsewhere(self, model: TrainingModule, error: BaseException) -> None:
        """Restore the state with which other processes have stopped; without one, call `on_exception`."""
        returned: dict[int, tuple[Any, ReturnedState | None]] = self.strategy.results
        if returned:  # with the attributes of callbacks as the hook has left them there
            self._restore(model, returned[min(returned)][1], TrainerStatus.INTERRUPTED)
        else:
            self._has_trained_elsewhere = True
            try:
                self.context(model).hooks.call_exception_hooks(error)
            finally:
                self._has_trained_elsewhere = False

    def _run_stage(self, stage: Stage, model: TrainingModule) -> tuple[Any, ReturnedState | None]:
        """Run a stage on every rank; return its value, and its state if that is in other processes."""
        self.strategy.results = {}
        if not self.strategy.launcher.has_other_ranks:  # which would wait, where this process fails alone
            stage.load_checkpoint(self.context(model))
        if stage.loaders.datamodule is not None:
            self.datamodule = stage.loaders.datamodule
        self._set_module(model, stage.name)
        brings_state_back = not self.strategy.runs_in_caller
        with read_by_name(known_to_caller(self.context(model)).named if brings_state_back else {}):
            returned: tuple[Any, ReturnedState | None] = self.strategy.launch(
                _run_on_rank, model=model, trainer=self, stage=stage, brings_state_back=brings_state_back
            )
        return returned

    def _prepare_run(self, stage: Stage, model: TrainingModule) -> None:
        """Let callbacks prepare a run before it begins; a run that continues keeps their results."""
        preparing = [callback for callback in self.callbacks if isinstance(callback, PreparingCallback)]
        if not preparing or self.global_step > 0:
            return
        if CheckpointFiles(self.context(model)).find(stage.ckpt_path) is None:
            for callback in preparing:
                callback.prepare_run(self, model, stage.loaders.given["train"], stage.loaders.datamodule)

    def trial(self, model: TrainingModule, callback: Callback, **options: Any) -> Trainer:
        """Return a trainer for a fit of `model` that leaves this one as it is, on the same strategy.

        It logs nothing and has only this callback, without the callbacks that the model configures. `options`
        replace this trainer's.
        """
        other = copy.copy(self)
        other.strategy, other.options = self.strategy, copy.copy(self.options)
        for name, value in options.items():
            setattr(other.options, name, value)
        other.callbacks, other.loggers = [callback], [NoLogger()] if self.loggers else []
        other._forget_fit()
        other._is_trial = True
        return other

    def _check_stage(self, stage: Stage, model: Any) -> None:
        """Check model, loaders and options for a stage, before any process starts."""
        if not isinstance(model, TrainingModule):
            raise no_module(model)
        stage.check_module(model)
        self._add_callbacks_of(model)
        check_hooks(model, self.callbacks, stage.loaders.datamodule, self.loggers)
        for callback in self.callbacks:
            callback.check_stage(self, model, stage.name)
        CheckpointFiles(self.context(model)).check_paths(stage.name, stage.ckpt_path)
        if stage.name == "fit":
            if not model.automatic_optimization:
                check_manual(model, self.strategy, self.options)
            if self.strategy.gradients.hook is not None:
                check_hook(self.strategy, self.on_nonfinite)
            check_can_compare(self.strategy, self.check_ranks_every_n_steps)
            if self.world_size > 1:
                self.strategy.gradients.check_module(model, self.strategy)
            given = stage.loaders.datamodule
            check_hyper_parameters(self.context(model), self.datamodule if given is None else given)
        for phase, loaders in stage.loaders.given.items():
            check_loaders(stage.name, phase, loaders, self.options, self.world_size)

    def _add_callbacks_of(self, model: TrainingModule) -> None:
        """Add the callbacks that the module configures; callbacks of types that it had added before stay."""
        if self._is_trial:
            return
        if self._configured is None or self._configured[0] is not model:
            self._configured = model, set()
        model.trainer = self  # the hook may read it
        returned = model.configure_callbacks()
        callbacks = arguments.with_module_callbacks(self.callbacks, returned, self._configured[1])
        self.callbacks = _for_dev_run(callbacks) if self.fast_dev_run else callbacks

    def enter_stage(self, strategy: Strategy, model: TrainingModule, stage: StageName) -> LoopContext:
        """Use this rank's strategy and module, and start a stage."""
        self.strategy = strategy
        self._set_module(model, stage)
        self._stage = StageState(stage)
        self.state.begin_stage(stage)
        return self.context(model)

    def _set_module(self, model: TrainingModule, stage: StageName) -> None:
        self._module = model
        if stage == "fit":
            self._fitted_module = model
        model.trainer = self
        if self.datamodule is not None:
            self.datamodule.trainer = self

    def context(self, module: TrainingModule) -> LoopContext:
        """Return what stages, checkpoints and the transfer of state use, for a module."""
        return LoopContext(Hooks(self, module, self._stage))

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without strategy and modules, which the launcher sends with the trainer."""
        left_out = dict.fromkeys(("strategy", "_module", "_fitted_module", "_configured"))
        return {**self.__dict__, "_stage": StageState(), **left_out}


def _for_dev_run(callbacks: list[Callback]) -> list[Callback]:
    """Return the callbacks without those that save or that end training."""
    return [callback for callback in callbacks if not isinstance(callback, (ModelCheckpoint, EarlyStopping))]


def _run_on_rank(
    strategy: Strategy, *, model: TrainingModule, trainer: Trainer, stage: Stage, brings_state_back: bool
) -> tuple[Any, ReturnedState | None]:
    """Run a stage on this rank; return its value, and the state for this node's caller. Collective."""
    context = trainer.enter_stage(strategy, model, stage.name)
    before = state_before(context) if brings_state_back else None
    try:
        with logging_through(model):
            value = stage.run(context)
    except StoppedBySignal as stopped:
        if brings_state_back and strategy.worker.channel is not None:  # torch's agent takes no values then
            stopped.value = None, capture(context, before)
        raise
    finally:
        trainer._stage = StageState(loaders=trainer._stage.loaders)
        report_phase("running")
    return value, capture(context, before) if brings_state_back else None
