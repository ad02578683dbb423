"""`ProcessState`: the random state and torch's flags of the launching process, which its workers take over.

A fork inherits them, except the state of Python's own generator; a new interpreter has none of them.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, final

import torch
import torch.multiprocessing
import torch.utils.deterministic

from rankwise import seed

if TYPE_CHECKING:
    from rankwise.launchers.context import Entry, WorkerContext

_CPU = torch.device("cpu")


def _default_device() -> torch.device | None:
    """Return what `torch.set_default_device` was given; `get_default_device` would initialise CUDA."""
    context = getattr(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None), "device_context", None)
    device: torch.device | None = getattr(context, "device", None)
    return device


_CUDA = torch.backends.cuda
_SETTINGS: Mapping[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "default device": (_default_device, torch.set_default_device),
    "gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
    "anomalies": (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.set_anomaly_enabled(*value),
    ),
    "deterministic": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    "sharing": (torch.multiprocessing.get_sharing_strategy, torch.multiprocessing.set_sharing_strategy),
    "float32 matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "flash attention": (_CUDA.flash_sdp_enabled, _CUDA.enable_flash_sdp),
    "memory-efficient attention": (_CUDA.mem_efficient_sdp_enabled, _CUDA.enable_mem_efficient_sdp),
    "plain attention": (_CUDA.math_sdp_enabled, _CUDA.enable_math_sdp),
    "cuDNN's attention": (_CUDA.cudnn_sdp_enabled, _CUDA.enable_cudnn_sdp),
}
# Flags that are attributes of `torch`, the general ones first.
_ATTRIBUTES = (
    "utils.deterministic.fill_uninitialized_memory",
    "backends.cudnn.enabled",
    "backends.cudnn.benchmark",
    "backends.cudnn.benchmark_limit",
    "backends.cudnn.deterministic",
    "backends.cudnn.allow_tf32",
    "backends.cuda.matmul.allow_tf32",
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_fp16_accumulation",
    "backends.mkldnn.enabled",
    "backends.mkldnn.deterministic",
    "backends.fp32_precision",
    *(f"backends.cudnn.{part}fp32_precision" for part in ("", "conv.", "rnn.")),
    "backends.cuda.matmul.fp32_precision",
    *(f"backends.mkldnn.{part}fp32_precision" for part in ("", "conv.", "rnn.", "matmul.")),
)


def _attribute(path: str) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    owner, _, name = path.rpartition(".")
    get, get_owner = operator.attrgetter(path), operator.attrgetter(owner)
    return partial(get, torch), lambda value: setattr(get_owner(torch), name, value)


_FLAGS = {**_SETTINGS, **{path: _attribute(path) for path in _ATTRIBUTES}}
# Raised for a flag that this version of torch lacks, or cannot read because of another flag.
_UNKNOWN = (AttributeError, RuntimeError)


@final
@dataclass(frozen=True)
class ProcessState:
    """The random state and torch's flags of a process; picklable."""

    flags: dict[str, Any]
    random: dict[str, Any]
    torch_seed: int
    given_seed: int | None

    @classmethod
    def of_this_process(cls, **flags: Any) -> ProcessState:
        """Return this process's state; `flags` replace its own of the same names, such as `threads`."""
        found = {}
        for name, (get, _) in _FLAGS.items():
            with contextlib.suppress(*_UNKNOWN):
                found[name] = get()
        return cls({**found, **flags}, seed.get_random_state(_CPU), torch.initial_seed(), seed.given_seed())

    def run(self, entry: Entry, worker: WorkerContext) -> Any:
        """Return `entry(worker)`, called in this state. Modules that were imported may have changed it."""
        self.take_over()
        return entry(worker)

    def take_over(self) -> None:
        """Set torch's flags that differ, and the random state; the devices' generators are seeded."""
        for name, value in self.flags.items():
            get, put = _FLAGS[name]
            with contextlib.suppress(*_UNKNOWN):
                if get() != value:
                    put(value)
        seed.restore_seed(self.torch_seed, self.given_seed)
        seed.set_random_state(self.random, _CPU)
