"""Names and small functions of `lightning.pytorch.utilities` and `lightning.fabric.utilities`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_deprecation
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from rankwise.callbacks import ModelSummary
from rankwise.checks import check_value
from rankwise.data import CombinedLoader
from rankwise.environments import ClusterEnvironment
from rankwise.gradient_sync import register_ddp_comm_hook
from rankwise.hyperparameters import AttributeDict
from rankwise.lightning._modules import complete_module
from rankwise.nested import to_device as move_data_to_device
from rankwise.process_group import (
    AllGatherGrad,
    all_gather_ddp_if_available,
    gather_all_tensors,
    init_process_group,
    sync_ddp,
    sync_ddp_if_available,
)
from rankwise.ranks import rank_zero_info, rank_zero_only, rank_zero_warn
from rankwise.seed import random_state_kept, seed_everything

__all__ = [
    "EVAL_DATALOADERS",
    "STEP_OUTPUT",
    "TRAIN_DATALOADERS",
    "AllGatherGrad",
    "AttributeDict",
    "CombinedLoader",
    "LRScheduler",
    "LRSchedulerConfigType",
    "LRSchedulerTypeUnion",
    "ModelSummary",
    "OptimizerConfig",
    "OptimizerLRScheduler",
    "OptimizerLRSchedulerConfig",
    "ReduceLROnPlateau",
    "all_gather_ddp_if_available",
    "gather_all_tensors",
    "grad_norm",
    "init_dist_connection",
    "isolate_rng",
    "move_data_to_device",
    "rank_zero_deprecation",
    "rank_zero_info",
    "rank_zero_only",
    "rank_zero_warn",
    "register_ddp_comm_hook",
    "seed_everything",
    "sync_ddp",
    "sync_ddp_if_available",
]

# For annotations; the Trainer accepts what its documentation says.
STEP_OUTPUT = Tensor | dict[str, Any] | None
LRSchedulerTypeUnion = LRScheduler | ReduceLROnPlateau
EVAL_DATALOADERS = TRAIN_DATALOADERS = Any
OptimizerLRScheduler = OptimizerLRSchedulerConfig = OptimizerConfig = LRSchedulerConfigType = Any

_CPU = torch.device("cpu")


def init_dist_connection(
    cluster_environment: ClusterEnvironment,
    torch_distributed_backend: str,
    global_rank: int | None = None,
    world_size: int | None = None,
    **kwargs: Any,
) -> None:
    """Call `rankwise.process_group.init_process_group`, by Lightning's names."""
    init_process_group(cluster_environment, torch_distributed_backend, global_rank, world_size, **kwargs)


def grad_norm(module: nn.Module, norm_type: float | str, group_separator: str = "/") -> dict[str, Tensor]:
    """Return the norm of each parameter's gradient, and of all of them, by names for loggers.

    Raises:
        InvalidArgumentError: if `norm_type` is not a positive number, or `"inf"`.
    """
    kind = float(norm_type)
    check_value("norm_type", norm_type, kind > 0, "more than 0, or 'inf'")
    gradients = {name: each.grad for name, each in module.named_parameters() if each.grad is not None}
    norms = {f"grad_{kind}_norm{group_separator}{name}": grad.norm(kind) for name, grad in gradients.items()}
    return norms and {**norms, f"grad_{kind}_norm_total": torch.stack([*norms.values()]).norm(kind)}


def isolate_rng(include_cuda: bool = True) -> AbstractContextManager[None]:
    """Restore the state of Python's, NumPy's and torch's random generators after the block."""
    return random_state_kept(torch.device("cuda") if include_cuda and torch.cuda.is_initialized() else _CPU)


__getattr__ = complete_module(__name__)
