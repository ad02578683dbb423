"""The private members of torch that rankwise uses, and what happens where a version of torch lacks one.

torch has no public function for these. A test checks that this table is complete. What a job needs is checked
before any process starts; for everything else the table says what happens.
"""

from __future__ import annotations

from functools import cache
from pkgutil import resolve_name
from types import FunctionType
from typing import Any, NamedTuple, final

import torch

from rankwise.errors import ConfigurationError
from rankwise.ranks import warn

OLDEST, NEWEST = "2.6", "2.15"
"""The versions of torch that rankwise is tested with, both inclusive."""

_REFUSED = "refused before anything starts"


@final
class Internal(NamedTuple):
    """Private names of one module or class of torch."""

    owner: str  # a module, or a module and a class of it with a colon between
    names: str  # of the owner; or of its instances, where its methods use them
    used_for: str
    without: str = _REFUSED  # what happens where one is missing


_C10D = "torch.distributed.distributed_c10d"
_DDP = "torch.nn.parallel.distributed:DistributedDataParallel"
_REWRAP = "unfreezing parameters raises ConfigurationError, which names sync_mode='forced_sync'"

JOB, ELASTIC, LOSS_SCALING, SHARDED = "several ranks", "ddp_elastic", "loss scaling", "sharded optimizers"

INTERNALS = (
    # ------------------------------------------------------------------ process groups
    Internal(_C10D, "_world _get_default_store", JOB),
    Internal(f"{_C10D}:ProcessGroup", "_get_backend _device_types", JOB),
    Internal(
        f"{_C10D}:ProcessGroupGloo", "_Options", JOB, "ProcessGroupError: ranks cannot be authenticated"
    ),
    Internal(f"{_C10D}:ProcessGroupGloo._Options", "_timeout _devices _threads", JOB),
    Internal(
        "torch.distributed",
        "_broadcast_coalesced _verify_params_across_processes",
        "check_collectives",
        "a call of DDP's constructor is not compared",
    ),
    Internal("torch._C._distributed_c10d", "_dump_fr_trace", "flight records", "none is written"),
    Internal("torch", "_GLOBAL_DEVICE_CONTEXT", "torch.set_default_device", "taken for unset"),
    Internal("torch.distributed.optim.zero_redundancy_optimizer", "_broadcast_object", SHARDED),
    # ------------------------------------------------------------------ gradient synchronisation
    Internal("torch.distributed", "_register_comm_hook", "unfreezing", _REWRAP),
    Internal(
        _DDP,
        "_build_params_for_reducer _build_debug_param_to_name_mapping _ddp_init_helper",
        "unfreezing",
        _REWRAP,
    ),
    Internal(_DDP, "_comm_hooks _module_parameters _static_graph_delay_allreduce_enqueued", JOB),
    Internal(
        _DDP,
        "_assign_modules_buffers _check_reducer_finalized _get_ddp_logging_data _sync_buffers "
        "_use_python_reducer _ddp_params_and_buffers_to_ignore",
        JOB,
    ),
    Internal("torch.distributed:Reducer", "_set_static_graph", JOB),
    Internal("torch.distributed.utils", "_sync_params_and_buffers", JOB),
    Internal("torch._utils", "_flatten_dense_tensors _unflatten_dense_tensors", JOB),
    Internal("torch", "_foreach_copy_ _foreach_div_ _foreach_clamp_min_ _foreach_clamp_max_", JOB),
    Internal("torch:Tensor", "_values _version _backward_hooks _post_accumulate_grad_hooks", JOB),
    Internal(
        "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook",
        "_should_compress",
        "comm_hook='power_sgd'",
        "ImportError when the hook is registered, before the first step",
    ),
    # ------------------------------------------------------------------ modules, and their state
    Internal(
        "torch.nn:Module",
        "_buffers _parameters _modules _forward_pre_hooks _non_persistent_buffers_set _call_impl "
        "_compiled_call_impl",
        JOB,
    ),
    Internal("torch.nn.modules.batchnorm", "_BatchNorm", JOB),
    Internal(
        "torch._dynamo.eval_frame:OptimizedModule", "_orig_mod", "torch.compile", "the module is wrapped"
    ),
    Internal("torch._utils", "_rebuild_tensor_v3", JOB),
    Internal("torch:UntypedStorage", "_cdata", JOB),
    Internal("torch:TypedStorage", "_untyped_storage", JOB),
    # ------------------------------------------------------------------ optimizers, precision, elastic jobs
    Internal(
        "torch.optim:Optimizer",
        "_optimizer_step_pre_hooks _optimizer_step_post_hooks",
        "random numbers in hooks of optimizers",
        "each rank draws its own",
    ),
    Internal("torch.amp:GradScaler", "_found_inf_per_device _per_optimizer_states", LOSS_SCALING),
    Internal(
        "torch.distributed.elastic.rendezvous.dynamic_rendezvous", "_RendezvousState _NodeDesc", ELASTIC
    ),
)


@cache
def check_torch(used_for: str) -> None:
    """Raise `ConfigurationError` where torch lacks a needed private member; warn where torch is newer.

    `used_for` is `JOB`, `ELASTIC`, `LOSS_SCALING` or `SHARDED`.
    """
    needed = [each for each in INTERNALS if each.used_for == used_for and each.without == _REFUSED]
    if lost := [name for internal in needed for name in missing(internal)]:
        raise ConfigurationError(
            message=f"torch {torch.__version__} lacks what rankwise needs for {used_for}: {', '.join(lost)}.",
            facts=f"rankwise is tested with torch {OLDEST} to {NEWEST}.",
            remedy=f"pip install 'torch~={NEWEST}.0', or use a newer rankwise.",
        )
    if _minor(torch.__version__) > _minor(NEWEST):
        warn(
            f"torch {torch.__version__} is newer than the versions that rankwise is tested with ({OLDEST} to "
            f"{NEWEST}); it has what rankwise uses.",
        )


def missing(internal: Internal) -> list[str]:
    """Return the names that this version of torch lacks."""
    names = internal.names.split()
    try:
        owner: Any = resolve_name(internal.owner)
    except (ImportError, AttributeError):
        lost = names
    else:
        gone = (name for name in names if getattr(owner, name, owner) is owner)
        lost = [name for name in gone if not _is_used_by_methods(owner, name)]
    return [f"{internal.owner}.{name}".replace(":", ".") for name in lost]


def _is_used_by_methods(owner: Any, name: str) -> bool:
    """Return whether a class's methods use an attribute: it shows attributes that only instances have."""
    methods = [each for each in vars(owner).values() if isinstance(each, FunctionType)]
    return any(name in method.__code__.co_names for method in methods)


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])
