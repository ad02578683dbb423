"""The arguments of the Trainer, checked."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec

from torch.nn.parallel import DistributedDataParallel

from rankwise.callbacks import Callback, EarlyStopping, ModelCheckpoint, Timer, TQDMProgressBar
from rankwise.checkpoint import CheckpointIO
from rankwise.environments import ClusterEnvironment
from rankwise.errors import ConfigurationError, UnknownArgumentError
from rankwise.loggers import CSVLogger, Logger
from rankwise.precision import Precision, create_precision
from rankwise.registry import StrategyRegistry
from rankwise.strategies import DDPStrategy, Strategy
from rankwise.trainer.options import check_is_a

__all__ = [
    "Plugins",
    "collect_callbacks",
    "collect_loggers",
    "collect_precision",
    "collect_strategy",
    "with_known_keywords",
]


class Plugins:
    """What `plugins=[...]` holds, by kind; at most one of each.

    Raises:
        InvalidTypeError: for something that is no plug-in, or a class where an instance is needed.
        ConfigurationError: for two of a kind.
    """

    def __init__(self, plugins: Any) -> None:
        if plugins is None:
            plugins = []
        self._plugins = list(plugins) if isinstance(plugins, (list, tuple)) else [plugins]
        for plugin in self._plugins:
            check_is_a(
                "plugins",
                plugin,
                (str, ClusterEnvironment, Precision, CheckpointIO, Strategy),
                "a ClusterEnvironment or its name, a Precision, a CheckpointIO or a Strategy",
            )
        self.environment = self._only((ClusterEnvironment, str), "cluster environment")
        self.precision: Precision | None = self._only(Precision, "precision")
        self.checkpoint_io: CheckpointIO | None = self._only(CheckpointIO, "checkpoint IO")
        self.strategy: Strategy | None = self._only(Strategy, "strategy")

    def _only(self, kind: Any, name: str) -> Any:
        found = [plugin for plugin in self._plugins if isinstance(plugin, kind)]
        if len(found) > 1:
            raise ConfigurationError(
                message=f"plugins holds {len(found)} of one kind ({name}).",
                facts=", ".join(repr(plugin) for plugin in found),
                remedy="keep one of them.",
            )
        return found[0] if found else None


def collect_strategy(strategy: Any, plugins: Plugins) -> Strategy:
    """Return the strategy that is meant: a name, an instance, or one among the plug-ins."""
    check_is_a("strategy", strategy, (str, Strategy), "a name, or an instance of Strategy")
    if plugins.strategy is not None:
        if strategy != "auto":
            raise ConfigurationError(
                message=f"strategy={strategy!r} and a strategy among the plug-ins contradict each other.",
                facts=f"plugins holds {plugins.strategy!r}.",
                remedy="keep one of them.",
            )
        return plugins.strategy
    return StrategyRegistry.create(strategy) if isinstance(strategy, str) else strategy


def collect_precision(precision: Any, plugins: Plugins) -> Precision | None:
    """Return the precision that is meant, or None to leave it to the strategy."""
    if precision is not None and plugins.precision is not None:
        raise ConfigurationError(
            message=f"precision={precision!r} and a precision among the plug-ins contradict each other.",
            facts=f"plugins holds {plugins.precision!r}.",
            remedy="keep one of them.",
        )
    if precision is None:
        return plugins.precision
    check_is_a("precision", precision, (str, int), 'a name such as "32-true"')
    return create_precision(precision)


def collect_callbacks(
    callbacks: Any, *, enable_checkpointing: bool, enable_progress_bar: bool | None, max_time: Any = None
) -> list[Callback]:
    """Return the user's callbacks and those that every run has; those that save checkpoints come last."""
    given: list[Callback] = _as_list("callbacks", callbacks, Callback)
    if max_time is not None:
        given.append(Timer(max_time))
    saving = [callback for callback in given if isinstance(callback, ModelCheckpoint)]
    if saving and not enable_checkpointing:
        raise ConfigurationError(
            message="callbacks holds a ModelCheckpoint, but enable_checkpointing=False.",
            remedy="leave out one of the two.",
        )
    others = [callback for callback in given if not isinstance(callback, ModelCheckpoint)]
    if enable_checkpointing and not saving:
        saving = [ModelCheckpoint()]
    has_bar = any(isinstance(callback, TQDMProgressBar) for callback in given)
    wants_bar = TQDMProgressBar.is_available() if enable_progress_bar is None else enable_progress_bar
    if has_bar and enable_progress_bar is False:
        raise ConfigurationError(
            message="callbacks holds a TQDMProgressBar, but enable_progress_bar=False.",
            remedy="leave out one of the two.",
        )
    bars = [TQDMProgressBar()] if wants_bar and not has_bar else []
    collected = [*others, *bars, *saving]
    _check_states(collected)
    return collected


def without_side_effects(callbacks: list[Callback]) -> list[Callback]:
    """Return the callbacks of a `fast_dev_run`, which writes nothing and stops by itself."""
    return [callback for callback in callbacks if not isinstance(callback, (ModelCheckpoint, EarlyStopping))]


def collect_loggers(logger: Any, default_root_dir: str) -> list[Logger]:
    """Return the loggers that are meant: the user's, a `CSVLogger` for None and True, none for False."""
    if logger is None or logger is True:
        return [CSVLogger(default_root_dir)]
    return [] if logger is False else _as_list("logger", logger, Logger)


def _check_states(callbacks: list[Callback]) -> None:
    keys = [item.state_key for item in callbacks if type(item).state_dict is not Callback.state_dict]
    if twice := {key for key in keys if keys.count(key) > 1}:
        raise ConfigurationError(
            message=f"Two callbacks would keep their state under one name: {sorted(twice)}.",
            remedy="give them different arguments, or override state_key.",
        )


def _as_list(name: str, given: Any, kind: type[Any]) -> list[Any]:
    items = [] if given is None else list(given) if isinstance(given, (list, tuple)) else [given]
    for item in items:
        check_is_a(name, item, kind, f"an instance of {kind.__name__}, or a list of them")
    return items


P = ParamSpec("P")

_ELSEWHERE: Mapping[str, str] = {
    # how many processes, and where
    "gpus": 'Trainer(accelerator="gpu", devices={value!r}).',
    "num_processes": "Trainer(devices={value!r}).",
    "num_gpus": 'Trainer(accelerator="gpu", devices={value!r}).',
    "auto_select_gpus": 'Trainer(accelerator="gpu", devices=[...]), with the indices of those that are free.',
    "tpu_cores": 'rankwise trains on CPUs and CUDA devices: Trainer(accelerator="auto").',
    "ipus": 'rankwise trains on CPUs and CUDA devices: Trainer(accelerator="auto").',
    "hpus": 'rankwise trains on CPUs and CUDA devices: Trainer(accelerator="auto").',
    "distributed_backend": "Trainer(strategy={value!r}).",
    "nnodes": "Trainer(num_nodes={value!r}).",
    "nproc_per_node": "Trainer(devices={value!r}).",
    "max_restarts": "Trainer(strategy=DDPElasticStrategy(max_restarts={value!r})).",
    # data
    "replace_sampler_ddp": "Trainer(use_distributed_sampler={value!r}).",
    "overfit_batches": "Trainer(limit_train_batches={value!r}), over a loader that does not shuffle.",
    "train_percent_check": "Trainer(limit_train_batches={value!r}).",
    "val_percent_check": "Trainer(limit_val_batches={value!r}).",
    "test_percent_check": "Trainer(limit_test_batches={value!r}).",
    "prepare_data_per_node": "leave it out: prepare_data() runs once on each node.",
    "reload_dataloaders_every_n_epochs": "an iterable data set with set_epoch(epoch): it is told.",
    "multiple_trainloader_mode": "give fit() one loader, over a data set that reads several.",
    # precision
    "amp_backend": 'Trainer(precision="16-mixed"); for Apex O2: "16-master".',
    "amp_level": 'Trainer(precision="16-mixed"); for Apex O2: "16-master".',
    "mixed_precision": 'Trainer(precision="16-mixed") or "bf16-mixed".',
    # the run
    "resume_from_checkpoint": "trainer.fit(model, ckpt_path={value!r}).",
    "max_duration": "Trainer(max_epochs=...), max_steps=... or max_time=...",
    "min_steps": "Trainer(min_epochs=...).",
    "terminate_on_nan": 'Trainer(on_nonfinite="raise").',
    "detect_anomaly": 'Trainer(on_nonfinite="raise"), and torch.autograd.set_detect_anomaly(True).',
    "gradient_accumulation_steps": "Trainer(accumulate_grad_batches={value!r}).",
    "auto_lr_find": "leave it out: rankwise does not look for a learning rate.",
    "auto_scale_batch_size": "leave it out: rankwise does not look for a batch size.",
    "inference_mode": "leave it out: evaluation runs under torch.no_grad().",
    "track_grad_norm": "log it in on_before_optimizer_step of the module.",
    "stochastic_weight_avg": "torch.optim.swa_utils, in hooks of the module.",
    "profiler": "torch.profiler.profile() around fit().",
    "ddp_sync_strategy": "Trainer(strategy=DDPStrategy(sync_mode=...)).",
    # files and what is shown
    "checkpoint_callback": "Trainer(enable_checkpointing=True), or callbacks=[ModelCheckpoint(...)].",
    "weights_save_path": "Trainer(default_root_dir={value!r}), or callbacks=[ModelCheckpoint(dirpath=...)].",
    "save_folder": "Trainer(default_root_dir={value!r}), or callbacks=[ModelCheckpoint(dirpath=...)].",
    "early_stop_callback": "Trainer(callbacks=[EarlyStopping(...)]).",
    "loggers": "Trainer(logger={value!r}).",
    "log_save_interval": "Trainer(log_every_n_steps=...).",
    "row_log_interval": "Trainer(log_every_n_steps={value!r}).",
    "progress_bar": "Trainer(enable_progress_bar={value!r}).",
    "progress_bar_refresh_rate": "Trainer(callbacks=[TQDMProgressBar(refresh_rate={value!r})]).",
    "enable_model_summary": "leave it out: no summary is printed.",
    "weights_summary": "leave it out: no summary is printed.",
    "barebones": "Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False).",
}
"""What Lightning (1.x and 2.x), Composer and torchrun call things, and what to write here."""


def with_known_keywords(init: Callable[P, None]) -> Callable[P, None]:
    """Have a constructor of keywords say more of one that it does not take than Python does.

    Raises, out of the constructor:
        UnknownArgumentError: for such a keyword.
    """
    known = tuple(name for name in inspect.signature(init).parameters if name != "self")

    @functools.wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        for name, value in kwargs.items():
            if name not in known:
                raise UnknownArgumentError(
                    target="Trainer", name=name, known=known, remedy=_remedy(name, value)
                )
        init(*args, **kwargs)

    return checked


def _remedy(name: str, value: object) -> str:
    if name in _ELSEWHERE:
        return _ELSEWHERE[name].format(value=value)
    for owner in (DDPStrategy, DistributedDataParallel):
        if name in inspect.signature(owner).parameters and name not in ("module", "ddp_kwargs"):
            return f"it is the strategy's: Trainer(strategy=DDPStrategy({name}={value!r}))."
    return ""
