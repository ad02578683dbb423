"""Explain a keyword that the Trainer does not take: the nearest one, or what another system's is here."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import ParamSpec

from torch.nn.parallel import DistributedDataParallel

from rankwise.errors import UnknownArgumentError
from rankwise.strategies import DDPStrategy

__all__ = ["with_known_keywords"]

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
