"""Names of Lightning, Composer and torchrun that have another name in rankwise, or do not exist.

Each table has, for a name, what to write instead. The documentation shows the same tables.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, final

from rankwise.errors import ConfigurationError, MissingAttributeError

_SHORT_FITS = "try batch sizes in short fits: Trainer(max_steps=3)."
_DEVICES = 'rankwise trains on CPUs and CUDA devices: Trainer(accelerator="cpu") or "cuda".'

TRAINER_ARGUMENTS: Mapping[str, str] = {
    # how many processes, and where
    **dict.fromkeys(("gpus", "num_gpus"), 'Trainer(accelerator="gpu", devices={value!r}).'),
    "num_processes": "Trainer(devices={value!r}).",
    "auto_select_gpus": 'Trainer(accelerator="gpu", devices=[...]), with the indices of free devices.',
    **dict.fromkeys(("tpu_cores", "ipus", "hpus"), _DEVICES),
    "distributed_backend": "Trainer(strategy={value!r}).",
    # data
    "replace_sampler_ddp": "Trainer(use_distributed_sampler={value!r}).",
    "train_percent_check": "Trainer(limit_train_batches={value!r}).",
    "val_percent_check": "Trainer(limit_val_batches={value!r}).",
    "test_percent_check": "Trainer(limit_test_batches={value!r}).",
    "prepare_data_per_node": "leave it out: prepare_data() runs once on each node.",
    "multiple_trainloader_mode": "trainer.fit(model, CombinedLoader(loaders, mode=...)).",
    # precision
    **dict.fromkeys(("amp_backend", "amp_level"), 'Trainer(precision="16-mixed"); for Apex O2: "16-master".'),
    # the run
    "resume_from_checkpoint": "trainer.fit(model, ckpt_path={value!r}).",
    "terminate_on_nan": 'Trainer(on_nonfinite="raise").',
    "auto_lr_find": "callbacks=[LearningRateFinder()]",
    "auto_scale_batch_size": _SHORT_FITS,
    "track_grad_norm": "log it in on_before_optimizer_step of the module.",
    "stochastic_weight_avg": "Trainer(callbacks=[StochasticWeightAveraging(swa_lrs=...)]).",
    # files and what is shown
    "checkpoint_callback": "Trainer(enable_checkpointing=True), or callbacks=[ModelCheckpoint(...)].",
    "weights_save_path": "Trainer(default_root_dir={value!r}), or callbacks=[ModelCheckpoint(dirpath=...)].",
    "early_stop_callback": "Trainer(callbacks=[EarlyStopping(...)]).",
    "log_save_interval": "Trainer(log_every_n_steps=...).",
    "row_log_interval": "Trainer(log_every_n_steps={value!r}).",
    "progress_bar_refresh_rate": "Trainer(callbacks=[TQDMProgressBar(refresh_rate={value!r})]).",
    "weights_summary": "leave it out, or Trainer(callbacks=[ModelSummary()]).",
    # Composer
    "max_duration": "Trainer(max_epochs=...), max_steps=... or max_time=...",
    "ddp_sync_strategy": "Trainer(strategy=DDPStrategy(sync_mode=...)).",
    "save_folder": "Trainer(default_root_dir={value!r}), or callbacks=[ModelCheckpoint(dirpath=...)].",
    "loggers": "Trainer(logger={value!r}).",
    "progress_bar": "Trainer(enable_progress_bar={value!r}).",
    # Accelerate
    "mixed_precision": 'Trainer(precision="16-mixed") or "bf16-mixed".',
    "gradient_accumulation_steps": "Trainer(accumulate_grad_batches={value!r}).",
    # torchrun
    "nnodes": "Trainer(num_nodes={value!r}).",
    "nproc_per_node": "Trainer(devices={value!r}).",
    "max_restarts": "Trainer(strategy=DDPElasticStrategy(max_restarts={value!r})).",
}
"""Arguments of Lightning's Trainer (1.x and 2.x) and of other libraries; `{value!r}` is the given value."""

MISSING_STRATEGIES: Mapping[str, str] = {
    "ddp_cpu": 'Trainer(strategy="ddp", accelerator="cpu", devices=...).',
    "horovod": 'Trainer(strategy="ddp"), started by mpirun or torchrun if you like.',
    **dict.fromkeys(
        ("dp", "ddp2"), 'Trainer(strategy="ddp"): a process for each device, instead of threads in one.'
    ),
    **dict.fromkeys(
        ("fsdp", "fsdp2", "fsdp_native", "deepspeed", "ddp_sharded", "ddp_sharded_spawn"),
        "sharding the model is out of the scope of rankwise, whose strategies are DistributedDataParallel's: "
        'Trainer(strategy="ddp") keeps the whole model on each device. ZeroRedundancyOptimizer, from '
        "configure_optimizers, shards the optimizer's state; for a larger model use another library.",
    ),
    **dict.fromkeys(
        ("single_tpu", "tpu_spawn", "xla"),
        'Trainer(strategy="auto"): rankwise trains on CPUs and CUDA devices.',
    ),
}
"""Names of Lightning's strategies."""

OTHER_PRECISIONS: Mapping[str, str] = {
    **dict.fromkeys(("fp16", "float16", "half", "amp", "amp_fp16"), "16-mixed"),
    **dict.fromkeys(("bfloat16", "amp_bf16"), "bf16-mixed"),
    **dict.fromkeys(("fp32", "float32", "float", "full"), "32-true"),
    **dict.fromkeys(("fp64", "float64", "double"), "64-true"),
}
"""Names of precisions in other libraries, and rankwise's."""

_METRICS = "trainer.callback_metrics, trainer.logged_metrics."

TRAINER_ATTRIBUTES: Mapping[str, str] = {
    "devices": "trainer.num_devices, or trainer.device_ids.",
    "fit_loop": "trainer.progress counts epochs, steps and batches; trainer.max_epochs can be assigned.",
    "validate_loop": "trainer.num_val_batches, or what trainer.validate(...) returns.",
    "test_loop": "trainer.num_test_batches, or what trainer.test(...) returns.",
    "predict_loop": "trainer.num_predict_batches, or what trainer.predict(...) returns.",
    "val_check_batch": "trainer.val_check_interval.",
    "_accelerator_connector": "trainer.strategy, trainer.num_devices, trainer.precision.",
    "_callback_connector": "trainer.callbacks.",
    "_checkpoint_connector": "trainer.save_checkpoint(path), trainer.fit(model, ckpt_path=path).",
    "_data_connector": "trainer.train_dataloader, trainer.val_dataloaders, trainer.datamodule.",
    "_logger_connector": f"trainer.loggers, {_METRICS}",
    "_results": _METRICS,
    "_signal_connector": "trainer.received_sigterm.",
    # arguments of the constructor
    "plugins": "it is an argument only; trainer.strategy and trainer.precision_plugin have the parts.",
    **dict.fromkeys(
        ("max_time", "enable_checkpointing", "enable_model_summary", "enable_progress_bar"),
        "it is an argument only; look for the callback that it adds in trainer.callbacks.",
    ),
    "model_registry": "it is an argument only.",
}
"""Attributes of Lightning's Trainer."""

STRATEGY_ATTRIBUTES: Mapping[str, str] = {
    "num_processes": "strategy.local_world_size.",
    "parallel_devices": "strategy.placement.devices; they are set by DDPStrategy(parallel_devices=...).",
    "cluster_environment": "strategy.environment; it is set by DDPStrategy(cluster_environment=...).",
    "precision_plugin": "strategy.precision; it is set by DDPStrategy(precision=...).",
}
"""Attributes of Lightning's strategies."""

FABRIC_ATTRIBUTES: Mapping[str, str] = {
    "init_module": "create the module as always; setup() moves and converts it.",
    "init_tensor": "torch.zeros(..., device=fabric.device), or fabric.to_device(tensor).",
    "sharded_model": "create the module as always; models that are split over devices are out of scope.",
}
"""Attributes of Lightning's Fabric."""

_HOOKS_OF_ALL: Mapping[str, str] = {
    "on_epoch_start": "on_train_epoch_start.",
    "on_epoch_end": "on_train_epoch_end.",
    "on_batch_start": "on_train_batch_start.",
    "on_batch_end": "on_train_batch_end.",
    "on_pretrain_routine_start on_pretrain_routine_end": "on_fit_start.",
    "on_hpc_save": "on_save_checkpoint.",
    "on_hpc_load": "on_load_checkpoint.",
    "on_predict_model_train": "on_predict_end.",
    "on_test_model_zero_grad": "on_test_start.",
    "on_predict_model_zero_grad": "on_predict_start.",
}
_WRAPPER = "configure_ddp(self, module, device_ids), which returns the wrapper."
_LAUNCHER = "DDPStrategy(start_method=...), or DDPStrategy(launcher=...)."
_CONNECTED = "setup_environment(self), in which super().setup_environment() connects the ranks."
_PREPARED = "setup_module(self, module), and on_after_setup_optimizers(self, optimizers)."
_IN_A_CALLBACK = "the hook of that name of a Callback."
_DONE = "leave it out: rankwise does it by itself."
_BACKWARD = "backward(self, loss, **options), around super().backward(loss, **options)."
_STEP = "optimizer_step(self, optimizer, closure=None, **options)."
_CLIP_NORM = "clip_gradients_norm(self, optimizer, max_norm, norm_type=2.0)"
_CLIP_VALUE = "clip_gradients_value(self, optimizer, clip_value)"
_SANITY_CHECK = "on_validation_start, where self.trainer.sanity_checking tells; or a callback."


def _by_kind(tables: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """Return the remedy for each name of each table; the keys of `tables` hold several names."""
    return {
        kind: {name: remedy for names, remedy in remedies.items() for name in names.split()}
        for kind, remedies in tables.items()
    }


_HOOKS: Mapping[str, Mapping[str, str]] = {
    "module": {
        "configure_sharded_model": "configure_model().",
        "get_progress_bar_dict": "self.log(name, value, prog_bar=True).",
        "tbptt_split_batch": "self.automatic_optimization = False, and step by hand in training_step.",
        "training_step_end": "the end of training_step: each process has one device.",
        "validation_step_end": "the end of validation_step: each process has one device.",
        "test_step_end": "the end of test_step: each process has one device.",
        "training_epoch_end": "on_train_epoch_end(); collect what it needs in training_step.",
        "validation_epoch_end": "on_validation_epoch_end(); collect what it needs in validation_step.",
        "test_epoch_end": "on_test_epoch_end(); collect what it needs in test_step.",
        "on_sanity_check_start on_sanity_check_end": _SANITY_CHECK,
        **_HOOKS_OF_ALL,
    },
    "callback": {
        "on_init_start on_init_end": "setup(trainer, module, stage).",
        "on_keyboard_interrupt": "on_exception.",
        **_HOOKS_OF_ALL,
    },
    "datamodule": {
        "on_save_checkpoint": "state_dict().",
        "on_load_checkpoint": "load_state_dict(state_dict).",
        **_HOOKS_OF_ALL,
    },
    "strategy": {
        # the wrapper
        "_setup_model pre_configure_ddp": _WRAPPER,
        "_determine_ddp_device_ids": "determine_ddp_device_ids(self).",
        "_register_ddp_hooks": "DDPStrategy(comm_hook=..., comm_state=..., comm_wrapper=...).",
        "_enable_model_averaging": "DDPStrategy(model_averaging_period=...).",
        "configure_sync_batchnorm": "DDPStrategy(sync_batchnorm=True).",
        "model_to_device": "module_to_device(self, module).",
        "get_model_from_plugin": "unwrap_module(self, module).",
        "block_backward_sync": "no_backward_sync(self, module, enabled=True).",
        # processes
        "setup_distributed _setup_distributed init_ddp_connection": _CONNECTED,
        "set_world_ranks _set_world_ranks": "DDPStrategy(cluster_environment=...): it has the ranks.",
        "_get_process_group_backend": "DDPStrategy(process_group_backend=...).",
        "_configure_launcher _call_children_scripts _check_can_spawn_children": _LAUNCHER,
        "start_training start_evaluating start_predicting": "launch(self, function, *args, **kwargs).",
        "reconciliate_processes new_process transfer_distrib_spawn_state_on_fit_end": _DONE,
        # before training
        "connect setup pre_dispatch dispatch post_dispatch setup_optimizers init_optimizers setup_optimizer "
        "_setup_optimizer setup_module_and_optimizers _setup_model_and_optimizers": _PREPARED,
        "setup_precision_plugin": "configure(self, module, optimizers) of a Precision.",
        "module_init_context tensor_init_context": "module_init_context(self) of a Precision.",
        "model_sharded_context call_configure_sharded_model_hook": "configure_model() of the module.",
        "process_dataloader": "train_dataloader() of the module.",
        # steps
        "on_before_forward input_to_device": "batch_to_device(self, batch).",
        "is_running_single_process_per_device": _DONE,
        "training_step": "call_method(self, wrapped, method, /, *args, **kwargs), which runs that step.",
        "validation_step test_step predict_step": "the module's method of that name.",
        "post_training_step": "on_train_batch_end of a Callback.",
        "pre_backward post_backward on_before_manual_backward on_after_manual_backward": _BACKWARD,
        "pre_optimizer_step post_optimizer_step": _STEP,
        "clip_gradients_norm": f"{_CLIP_NORM} of a Precision.",
        "clip_gradients_value": f"{_CLIP_VALUE} of a Precision.",
        "handles_gradient_accumulation": "gradient_sync_context(self, module, optimizers, ...).",
        "reduce": 'all_reduce(self, tensor, group=None, reduce_op="mean").',
        "on_train_batch_start on_train_start on_train_end on_validation_start on_validation_end "
        "on_test_start on_test_end on_predict_start on_predict_end on_exception": _IN_A_CALLBACK,
        # checkpoints
        "lightning_module_state_dict": "get_module_state_dict(self, module).",
        "load_model_state_dict": "load_module_state_dict(self, module, state_dict, strict=True).",
        "optimizer_state": "get_optimizer_state(self, optimizer).",
        "load_optimizer_state_dict": "on_load_checkpoint of a Callback.",
        "remove_checkpoint": "remove_checkpoint(self, path) of a CheckpointIO.",
        "restore_checkpoint_after_setup lightning_restore_optimizer": _DONE,
    },
    "precision": {
        "main_params master_params": "main_parameters(self, optimizer).",
        "clip_gradients _clip_gradients": f"{_CLIP_NORM}; {_CLIP_VALUE}.",
        "clip_grad_by_norm": f"{_CLIP_NORM}.",
        "clip_grad_by_value": f"{_CLIP_VALUE}.",
        "connect configure_apex pre_dispatch dispatch": "configure(self, module, optimizers).",
        "pre_backward post_backward after_backward": _BACKWARD,
        "pre_optimizer_step post_optimizer_step _wrap_closure _after_closure": _STEP,
        "train_step_context val_step_context test_step_context predict_step_context "
        "autocast_context_manager": "forward_context(self).",
        "tensor_init_context": "module_init_context(self).",
        "on_save_checkpoint": "state_dict(self).",
        "on_load_checkpoint": "load_state_dict(self, state_dict).",
        "teardown post_dispatch": "teardown of a Callback.",
    },
    "environment": {
        "creates_children": "the property creates_processes_externally, with the opposite value.",
        "master_address resolve_root_node_address _get_main_address": "the property main_address.",
        "master_port _get_main_port": "the property main_port.",
        "_get_node_rank": "the property node_rank.",
        "set_world_size set_global_rank": "define both, with methods for all ranks, as in Lightning.",
    },
    "checkpoint_io": {},
    "launcher": {
        "_call_children_scripts _check_can_spawn_children _wrapping_function kill "
        "is_interactive_compatible": "launch(self, entry, described, rendezvous).",
        "_collect_rank_zero_results _recover_results_in_main_process get_extra_results "
        "update_main_process_results": _DONE,
    },
    "logger": {
        "after_save_checkpoint": "a Callback, with trainer.checkpoint_callback.best_model_path.",
        "agg_and_log_metrics": "log_metrics(self, metrics, step).",
        "update_agg_funcs": "self.log(name, value, reduce_fx=...) in the module.",
        "close": "finalize(self, status).",
        "group_separator": "log_metrics(self, metrics, step), which gets the names.",
    },
    "profiler": {
        "profile_iterable": "iterated(self, action_name, items).",
        "_prepare_filename": "path(self, extension).",
        "_stats_to_str _make_report _make_report_extended": "summary(self), which returns the text.",
        "_prepare_streams _rank_zero_info": "describe(self), which shows the text.",
    },
}
MISSING_HOOKS: Mapping[str, Mapping[str, str]] = _by_kind(_HOOKS)
"""Methods of Lightning's classes (1.x and 2.x) that rankwise never calls, by the kind of class."""

NOT_IGNORED = frozenset(
    ("configure_sharded_model", "training_epoch_end", "validation_epoch_end", "test_epoch_end")
)
"""Those that Lightning 2 calls or refuses. It ignores the others: programs may use these names themselves."""

_MAKE_BAR = "make_bar(self, title, total, leave), which returns the bar."
_STOP = "trainer.should_stop = True in a hook of a Callback."
_CHECKPOINT_IO = "save_checkpoint and remove_checkpoint of a CheckpointIO: Trainer(plugins=[...])."

_CALLBACK_METHODS: Mapping[str, Mapping[str, str]] = {
    "EarlyStopping": {
        "_evaluate_stopping_criteria _run_early_stopping_check _validate_condition_metric": _STOP
    },
    "GradientAccumulationScheduler": {
        "get_accumulate_grad_batches going_to_accumulate_grad_batches": "the argument scheduling, which has "
        "a number of batches for each epoch."
    },
    "LearningRateMonitor": {"_extract_stats": "a Callback of yours that reads trainer.optimizers."},
    "ModelCheckpoint": {
        "format_checkpoint_name": 'ModelCheckpoint(filename="{epoch}-{val_loss:.2f}").',
        "check_monitor_top_k _update_best_and_save": "is_better(self, score, other, min_delta=0.0).",
        "_save_checkpoint _save_last_checkpoint _save_topk_checkpoint _save_monitor_checkpoint "
        "_save_none_monitor_checkpoint _remove_checkpoint file_exists": _CHECKPOINT_IO,
        "_should_skip_saving_checkpoint _should_save_on_train_epoch_end": "the arguments every_n_epochs, "
        "every_n_train_steps and save_on_train_epoch_end.",
        "to_yaml": "write best_k_models yourself, in on_fit_end.",
    },
    "ModelSummary": {"summarize": "a Callback of yours that prints in on_fit_start."},
    "ProgressBar": {
        "init_train_tqdm init_validation_tqdm init_test_tqdm init_predict_tqdm init_sanity_tqdm "
        "configure_columns train_description validation_description test_description "
        "predict_description sanity_check_description": _MAKE_BAR,
        "get_metrics": "self.log(name, value, prog_bar=True) in the module: the bar shows these.",
        "disable enable is_disabled is_enabled": "Trainer(enable_progress_bar=False).",
        "print": "self.print(...) in the module.",
        "refresh has_dataloader_changed reset_dataloader_idx_tracker": "leave it out: the bar does it.",
    },
    "StochasticWeightAveraging": {
        "avg_fn update_parameters transfer_weights reset_momenta reset_batch_norm_and_save_state "
        "pl_module_contains_batch_norm": "WeightAveraging(avg_fn=...), or a Callback of yours."
    },
    "Timer": {"start_time end_time": "time_elapsed().", "_check_time_remaining": _STOP},
}
CALLBACK_METHODS: Mapping[str, Mapping[str, str]] = _by_kind(_CALLBACK_METHODS)
"""Methods of Lightning's callbacks that rankwise never calls, by the base class of a user's callback."""

_EMPTY_LOADERS = {
    "allow_zero_length_dataloader_with_multiple_devices": "leave it out: an empty loader of some ranks is an "
    'error on all; Trainer(uneven_inputs="join") lets ranks have fewer batches than others.'
}
_SETTINGS: Mapping[str, Mapping[str, str]] = {
    "module": _EMPTY_LOADERS,
    "datamodule": _EMPTY_LOADERS,
    "ModelCheckpoint": {
        "CHECKPOINT_EQUALS_CHAR CHECKPOINT_JOIN_CHAR FILE_EXTENSION STARTING_VERSION": "ModelCheckpoint("
        'filename="{epoch}-{val_loss:.2f}", auto_insert_metric_name=False).',
        "CHECKPOINT_NAME_LAST": 'leave it out: ckpt_path="last" finds last.ckpt.',
    },
    "ProgressBar": {"BAR_FORMAT": _MAKE_BAR},
}
SETTINGS: Mapping[str, Mapping[str, str]] = _by_kind(_SETTINGS)
"""Attributes that change what Lightning does, and have no effect in rankwise, by the kind of object."""

_NO_CLI = "build the Trainer in code; jsonargparse's CLI, Hydra and argparse can call it."
_NO_PLUGIN = "derive from DDPStrategy, or from Strategy: Trainer(strategy=MyDDP())."
_MODEL_SHARDING = 'Trainer(strategy="ddp"): models that are split over devices are out of scope.'
_TUNER = f"LearningRateFinder().lr_find(trainer, model, loader); {_SHORT_FITS}"
_NOT_PUBLIC = "use the hooks of the module, its callbacks and the strategy, which are public."

MISSING_MODULES: Mapping[str, str] = {
    "accelerators": _DEVICES,
    "cli": _NO_CLI,
    **dict.fromkeys(("demos", "demos.boring_classes"), "write the module in your script."),
    **dict.fromkeys(("loops", "overrides"), _NOT_PUBLIC),
    **dict.fromkeys(("tuner", "tuner.tuning"), _TUNER),
    "serve": "serve the module with a server of your choice; it is a torch.nn.Module.",
}
"""Modules of the packages of Lightning."""

MISSING_NAMES: Mapping[str, str] = {
    **MISSING_MODULES,
    "LightningCLI": _NO_CLI,
    "Tuner": _TUNER,
    "BatchSizeFinder": _SHORT_FITS,
    **dict.fromkeys(("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy"), _MODEL_SHARDING),
    **dict.fromkeys(("FSDPPrecision", "DeepSpeedPrecision"), _MODEL_SHARDING),
    **dict.fromkeys(("XLAPrecision", "XLAEnvironment", "XLACheckpointIO", "XLAProfiler"), _DEVICES),
    **dict.fromkeys(("LayerSync", "TorchSyncBatchNorm"), "Trainer(sync_batchnorm=True)."),
    **dict.fromkeys(("CometLogger", "LitLogger"), "derive from Logger, or use another logger."),
    **dict.fromkeys(("DataParallelStrategy", "DataParallelPlugin", "DDP2Plugin"), 'Trainer(strategy="ddp").'),
    "ParallelStrategy": "derive from Strategy, or from DDPStrategy.",
    **dict.fromkeys(("DDPPlugin", "ParallelPlugin", "TrainingTypePlugin"), _NO_PLUGIN),
    "DDPSpawnPlugin": 'DDPSpawnStrategy, or Trainer(strategy="ddp_spawn").',
    "SingleDevicePlugin": 'SingleDeviceStrategy, or Trainer(strategy="single_device").',
    **dict.fromkeys(
        ("NativeAMPPlugin", "NativeMixedPrecisionPlugin", "MixedPrecisionPlugin"),
        'MixedPrecision("16-mixed"), or Trainer(precision="16-mixed").',
    ),
    **dict.fromkeys(
        ("ApexPlugin", "ApexMixedPrecisionPlugin"),
        'MasterWeightsPrecision(), or Trainer(precision="16-master").',
    ),
    "DoublePrecisionPlugin": 'DoublePrecision(), or Trainer(precision="64-true").',
    "PrecisionPlugin": "derive from Precision.",
    "BitsandbytesPrecision": "quantise the layers in configure_model().",
    "TransformerEnginePrecision": 'Trainer(precision="bf16-mixed").',
    "Checkpoint": "derive from Callback, or use ModelCheckpoint.",
    "ModelPruning": "torch.nn.utils.prune in a hook of the module.",
    "OnExceptionCheckpoint": "trainer.save_checkpoint(path) in Callback.on_exception.",
    "SpikeDetection": 'Trainer(on_nonfinite="skip"), or a callback of your own.',
    "RichModelSummary": "ModelSummary.",
    "MisconfigurationException": "rankwise.errors.ConfigurationError.",
    "SIGTERMException": "except SystemExit.",
    "measure_flops": "torch.utils.flop_counter.FlopCounterMode.",
    "GradClipAlgorithmType": 'the strings "norm" and "value".',
    "LightningEnum": "enum.Enum.",
    "is_picklable": "pickle.dumps(value), which raises.",
    "set_shared_parameters": "assign one parameter to both layers in configure_model().",
    "is_shared_filesystem": "leave it out, or ask the file system.",
    "find_shared_parameters": "torch.nn.Module.named_parameters(remove_duplicate=False).",
    "suggested_max_num_workers": "give num_workers yourself, for example 4.",
    "disable_possible_user_warnings": "warnings.filterwarnings of Python.",
    "distributed_available": "torch.distributed.is_initialized(), or call the collective: it needs no group.",
    "get_default_process_group_backend_for_device": "rankwise.process_group.default_backend(device.type).",
}
"""Names in the modules of Lightning, and the modules themselves."""

SUBMODULES: Mapping[str, str] = {
    "callbacks": "callback device_stats_monitor early_stopping finetuning gradient_accumulation_scheduler "
    "lambda_function lr_finder lr_monitor model_checkpoint model_summary prediction_writer progress "
    "progress.progress_bar progress.rich_progress progress.tqdm_progress stochastic_weight_avg "
    "throughput_monitor timer weight_averaging",
    "core": "datamodule mixins module",
    "fabric": "",
    "loggers": "csv_logs logger mlflow tensorboard wandb",
    "plugins": "environments environments.cluster_environment environments.kubeflow "
    "environments.kubeflow_environment environments.lightning environments.lightning_environment "
    "environments.lsf environments.lsf_environment environments.mpi environments.slurm "
    "environments.slurm_environment environments.torchelastic environments.torchelastic_environment "
    "io io.async_plugin io.checkpoint_io io.checkpoint_plugin io.torch_io io.torch_plugin precision "
    "precision.amp precision.double precision.half precision.precision "
    "apex ddp_plugin native_amp training_type",
    "profilers": "advanced profiler pytorch simple",
    "strategies": "ddp single_device strategy",
    "trainer": "trainer states",
    "utilities": "apply_func combined_loader grads model_summary parsing rank_zero seed types distributed",
}
"""The modules of `rankwise.lightning`, and the submodules that Lightning has in place of each."""


def missing_attributes(owner: str, instead: Mapping[str, str]) -> dict[str, property]:
    """Return the properties of a class that say for the names in `instead` what to write."""
    return {name: MissingAttribute(owner, name, remedy) for name, remedy in instead.items()}


@final
class MissingAttribute(property):
    """An attribute that does not exist: to read and to assign it raise MissingAttributeError."""

    def __init__(self, owner: str, name: str, remedy: str) -> None:
        super().__init__()
        self._fields = {"owner": owner, "attribute": name, "remedy": remedy}

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        if instance is None:
            return self
        raise MissingAttributeError(**self._fields)

    def __set__(self, instance: object, value: object) -> None:
        self.__get__(instance)


def refuse_variables(owner: str, prefix: str, names: Iterable[str]) -> None:
    """Raise `ConfigurationError` for a variable that Lightning's `owner` takes for an argument."""
    for variable in names:
        if variable.startswith(prefix) and (value := os.environ.get(variable)):
            raise ConfigurationError(
                message=f"{variable}={value!r} is set, which Lightning's {owner} reads; rankwise does not.",
                remedy=f"unset it, and write {owner}({variable.removeprefix(prefix).lower()}=...).",
            )
