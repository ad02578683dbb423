"""Parts of a stage that only some stages ask for: torch's flags, profiling, what loggers get of a run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from rankwise.errors import ConfigurationError
from rankwise.trainer.arguments import TrainerOptions
from rankwise.trainer.state import LoopContext, StageName

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def torch_flags_set(options: TrainerOptions) -> Iterator[None]:
    """Set torch's flags as `deterministic`, `benchmark` and `detect_anomaly` say, for the block.

    With `deterministic` alone, also set cuBLAS's environment variable.
    """
    deterministic, benchmark = options.deterministic, options.benchmark
    with ExitStack() as stack:
        if options.detect_anomaly:
            stack.enter_context(torch.autograd.set_detect_anomaly(True))
        if deterministic:
            was_on = torch.are_deterministic_algorithms_enabled()
            was_warning = torch.is_deterministic_algorithms_warn_only_enabled()
            stack.callback(torch.use_deterministic_algorithms, was_on, warn_only=was_warning)
            torch.use_deterministic_algorithms(True, warn_only=deterministic == "warn")
            if _CUBLAS not in os.environ:
                stack.callback(os.environ.pop, _CUBLAS, None)
                os.environ[_CUBLAS] = ":4096:8"  # without it cuBLAS is not deterministic
            benchmark = False if benchmark is None else benchmark  # which chooses by measuring
        if benchmark is not None:
            stack.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
            torch.backends.cudnn.benchmark = benchmark
        yield


@contextmanager
def profiled(context: LoopContext, stage: StageName) -> Iterator[None]:
    """Measure a stage, and the parts of it that are the strategy's; describe it if it succeeds."""
    profiler, strategy = context.profiler, context.strategy
    names = ("backward", "optimizer_step", "batch_to_device", "save_checkpoint")
    methods = {**{name: name for name in names}, "call_method": "training_step"}
    profiler.setup(stage, strategy.local_rank, context.trainer.log_dir)
    profiler.instrument(strategy, **methods)
    try:
        yield
    finally:
        for method in methods:
            delattr(strategy, method)
        profiler.teardown(stage)
    profiler.describe()


def describe_run(context: LoopContext) -> None:
    """Give the hyperparameters and the module to the loggers, on rank 0; on all ranks, check the former."""
    own, of_data = (
        {} if each is None or each._hyperparameters is None else each.logged_hparams
        for each in (context.module, context.datamodule)
    )
    for name in own.keys() & of_data.keys():
        if own[name] is not of_data[name] and own[name] != of_data[name]:
            raise ConfigurationError(
                message=f"Module and data module have different values of the hyperparameter {name!r}.",
                facts=f"{own[name]!r} and {of_data[name]!r}; loggers take one.",
                remedy="self.save_hyperparameters(logger=False) in one of them, or another name.",
            )
    logged = {**of_data, **own}
    for logger in context.loggers if context.strategy.is_global_zero else ():
        if logged and context.options.enable_autolog_hparams:
            logger.log_hyperparams(logged)
        logger.log_graph(context.module)
