"""The communication hooks that are registered by default."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist

from rankwise.errors import ConfigurationError, InvalidArgumentError, MissingExtraError
from rankwise.gradient_sync.hook_registry import CommHookRegistry, HookPlace
from rankwise.gradient_sync.powersgd import PowerSGDMemory, powersgd_hook

__all__ = ["CompressHook", "allreduce_hook", "averaged"]


def averaged(group: Any, tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Average a tensor over the ranks, in place."""
    work: Any = dist.all_reduce(tensor.div_(dist.get_world_size(group)), group=group, async_op=True)
    future: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda done: done.value()[0])
    return future


@final
@dataclass(frozen=True)
class CompressHook:
    """A hook that averages gradients in `dtype`."""

    dtype: torch.dtype

    def __call__(self, state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket over the process group, which is the state."""
        buffer = bucket.buffer()
        future = averaged(state, buffer.to(self.dtype))
        return future.then(lambda done: buffer.copy_(done.value()))


def allreduce_hook(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over the process group, which is the state."""
    return averaged(state, bucket.buffer())


def _noop_hook(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _make_powersgd_state(
    place: HookPlace,
    *,
    matrix_approximation_rank: int = 1,
    start_powerSGD_iter: int = 1000,  # noqa: N803  torch's name
    min_compression_rate: float = 2,
    use_error_feedback: bool = True,
    warm_start: bool = True,
    orthogonalization_epsilon: float = 0,
    random_seed: int = 0,
    batch_tensors_with_same_shape: bool = False,
) -> PowerSGDMemory:
    options = {name: value for name, value in locals().items() if name != "place"}
    try:
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

        return PowerSGDMemory(PowerSGDState(place.process_group, **options))
    except ImportError:
        raise MissingExtraError(package="numpy", extra="powersgd", purpose="PowerSGD") from None


def _check_powersgd(**options: Any) -> None:
    rank = options.get("matrix_approximation_rank", 1)
    if not isinstance(rank, int) or rank < 1:
        raise InvalidArgumentError(argument="matrix_approximation_rank", value=rank, expected="1 or more")
    try:
        _make_powersgd_state(HookPlace(None, 1), **options)
    except (ValueError, TypeError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(message=f"comm_hook 'powersgd' cannot work: {error}") from None


def _make_local_sgd_state(
    place: HookPlace,
    *,
    start_localSGD_iter: int = 100,  # noqa: N803  torch's name
    post_local_gradient_allreduce: bool = True,
    subgroup_size: int | None = None,
) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState

    subgroup = _subgroup(place, subgroup_size) if post_local_gradient_allreduce else None
    return PostLocalSGDState(
        place.process_group, subgroup, start_localSGD_iter, post_local_gradient_allreduce
    )


def _subgroup(place: HookPlace, size: int | None) -> Any:
    """Return the group of the ranks on this node, or of `size` ranks in a row."""
    world_size = dist.get_world_size(place.process_group)
    size = place.local_world_size if size is None else size
    if size == world_size:
        return place.process_group or dist.group.WORLD
    if world_size % size or world_size != dist.get_world_size():
        raise ConfigurationError(
            message=f"{world_size} ranks cannot be split into groups of {size} for local SGD.",
            facts=f"{place.local_world_size} of them are on this node.",
            remedy=f'comm_hook="post_localsgd:subgroup_size=..." with a divisor of {world_size}, over all '
            "ranks.",
        )
    return dist.new_subgroups(group_size=size)[0]


def _check_local_sgd(**options: Any) -> None:
    for name, smallest in (("start_localSGD_iter", 0), ("subgroup_size", 1)):
        value = options.get(name)
        if value is not None and (not isinstance(value, int) or value < smallest):
            raise InvalidArgumentError(argument=name, value=value, expected=f"{smallest} or more")


def _local_sgd_hook(state: Any, bucket: Any) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import post_localSGD_hook

    return post_localSGD_hook(state, bucket)


for _name, _hook, _description in (
    ("allreduce", allreduce_hook, "average, as DDP does without a hook"),
    ("fp16_compress", CompressHook(torch.float16), "average in 16-bit floating point"),
    ("bf16_compress", CompressHook(torch.bfloat16), "average in bfloat16"),
    ("noop", _noop_hook, "communicate nothing, to measure what communication costs"),
):
    CommHookRegistry.register(_name, _hook, description=_description, averages=_name != "noop")
CommHookRegistry.register(
    "powersgd",
    powersgd_hook,
    _make_powersgd_state,
    "send low-rank approximations, with error feedback (https://arxiv.org/abs/1905.13727)",
    check=_check_powersgd,
    averages=True,
)
CommHookRegistry.register(
    "post_localsgd",
    _local_sgd_hook,
    _make_local_sgd_state,
    "after some steps average gradients per node, and models periodically (https://arxiv.org/abs/1808.07217)",
    check=_check_local_sgd,
)
