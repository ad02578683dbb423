"""Validate the name of a process group's back end, and choose the default one."""

from __future__ import annotations

import torch.distributed as dist

from rankwise.errors import ConfigurationError, InvalidTypeError, UnknownNameError

__all__ = ["check_backend", "default_backend"]

_BUILT_IN = ("gloo", "nccl", "mpi", "ucc", "xccl")


def check_backend(name: object) -> str:
    """Return a back end's name in torch's spelling.

    Raises:
        InvalidTypeError: when the name is not a string.
        UnknownNameError: when the name is neither built into torch nor registered as a plug-in.
        ConfigurationError: when this build of torch lacks the back end.
    """
    if not isinstance(name, str):
        raise InvalidTypeError(
            argument="process_group_backend", value=name, expected="a name, such as 'gloo' or 'nccl'"
        )
    spelled = name.lower()
    known = {str(backend).lower() for backend in dist.Backend.backend_list} - {"undefined"} | set(_BUILT_IN)
    for part in spelled.split(","):
        backend = part.rpartition(":")[2]  # "cpu:gloo,cuda:nccl" names one for each device type
        if backend not in known:
            raise UnknownNameError(kind="process_group_backend", name=name, known=tuple(sorted(known)))
        if backend == "nccl" and not dist.is_nccl_available():
            raise ConfigurationError(
                message="process_group_backend='nccl' is not possible: this build of torch has no NCCL.",
                remedy="leave process_group_backend unset, or use 'gloo'.",
            )
    return spelled


def default_backend(device_type: str) -> str:
    """Return NCCL for CUDA, gloo for the CPU, and torch's own default elsewhere."""
    if device_type == "cuda":
        return "nccl" if dist.is_nccl_available() else "gloo"
    defaults: dict[str, str] = dist.Backend.default_device_backend_map
    return defaults.get(device_type, "gloo")
