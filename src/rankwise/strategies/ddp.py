"""`DDPStrategy`: one process per device, gradients averaged by `DistributedDataParallel`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rankwise.checks import accepts
from rankwise.compatibility.lightning_environments import GivenEnvironment
from rankwise.compatibility.lightning_wrapping import wrapped_in_place
from rankwise.errors import InvalidTypeError
from rankwise.gradient_sync import GradientSync, GradientSyncMode
from rankwise.gradient_sync.parameters import check_parameters, trained_parameters
from rankwise.launchers import Launcher
from rankwise.processes.fork_safety import import_dynamo
from rankwise.strategies.base import GROUP_REMEDY, Strategy
from rankwise.strategies.config import (
    GroupConfig,
    ProcessConfig,
    RegisteredNames,
    agreed_value,
    check_ddp_arguments,
    ddp_names,
    from_parallel_devices,
    take_fields,
)
from rankwise.strategies.module_wrapping import (
    averages_everywhere,
    check_collectives_of,
    checked_wrapper,
    compile_within,
    or_in_place,
    uncompiled,
)


class DDPStrategy(Strategy):
    """Train on several processes with `DistributedDataParallel`.

    Override `configure_ddp` for a wrapper of your own.

    Args:
        parallel_devices: the device of each local rank, instead of `accelerator` and `devices`.
        process_group_backend: `"gloo"`, `"nccl"`, ...; NCCL on CUDA and gloo on the CPU by default.
        timeout: how long a collective may take, in seconds or as a `timedelta`.
        init_timeout: how long the rendezvous of the ranks may take.
        start_method: `"popen"` (re-run the script), `"spawn"`, `"fork"` or `"forkserver"`. Where an outer
            launcher (torchrun) has started the processes, the strategy starts none.
        rendezvous: the store of a job on one node: `"private"` (no port; refused where an outer launcher has
            started the ranks), `"tcp"` (torch's, on loopback), or `"auto"`: private with gloo, if possible.
        grace_period_s: the time between a rank's stop request and SIGKILL.
        stall_warning: after how long in one phase a rank that others wait for is reported on stderr.
        command: with `"popen"`, the command to run instead of this process's own; its first launch must
            be this one.
        launcher: starts all ranks, on all nodes, instead of a `start_method`.
        sync_batchnorm: whether batch normalisation uses the batches of all ranks in training; CUDA only.
        sync_mode: when the gradients of accumulated batches are averaged: `"single_auto_sync"` (in the last
            backward pass), `"multi_auto_sync"` (in each), `"forced_sync"` (after the last, also where ranks
            lack some gradients), or `"auto"`: the first, but the second with `find_unused_parameters`.
        comm_hook: how DDP averages a bucket of gradients: a name in `CommHookRegistry`, with options as in
            `"powersgd:matrix_approximation_rank=2"`, or a function `hook(state, bucket)`.
        comm_state: the hook's state; by default the named hook's own, or the process group.
        comm_wrapper: `"fp16"` or `"bf16"` around the hook, or a function from a hook to a hook.
        model_averaging_period: with `"post_localsgd"`, after how many steps the models are averaged.
        gradient_weighting: how batches of different sizes are weighted. None: equally. `"samples"`: by their
            number of samples, which the samplers know in advance. `"logged"`: by `self.log_weight()`.
        check_collectives: whether ranks compare each collective before it runs, so that a mismatch is an
            error on all of them; by default what `RANKWISE_CHECK_COLLECTIVES` says (1 or 0).
        ddp_kwargs: for `DistributedDataParallel`, as this version of torch takes them.

    The other arguments are `Strategy`'s.

    Attributes:
        ddp_kwargs: the keywords for `DistributedDataParallel`.

    Raises:
        UnknownArgumentError: for a keyword that neither this class nor the wrapper takes.
        UnknownNameError, InvalidArgumentError, InvalidTypeError: for impossible values.
    """

    registered_names: ClassVar[RegisteredNames] = {
        **ddp_names("ddp", "DDP; the script is run again for each rank"),
        **ddp_names(
            "ddp_forkserver", "DDP; processes are forked by a warm server", start_method="forkserver"
        ),
    }

    def __init__(
        self,
        *,
        accelerator: str = "auto",
        devices: int | str | list[int] | tuple[int, ...] = "auto",
        num_nodes: Any = "auto",
        parallel_devices: Sequence[torch.device] | None = None,
        cluster_environment: GivenEnvironment | None = None,
        precision: Any = None,
        checkpoint_io: Any = None,
        process_group_backend: str | None = None,
        timeout: float | timedelta = timedelta(minutes=10),
        init_timeout: float | timedelta = timedelta(minutes=2),
        start_method: str | None = None,
        rendezvous: str = "auto",
        grace_period_s: float = 1.0,
        stall_warning: float | timedelta = timedelta(minutes=1),
        command: Sequence[str] | None = None,
        launcher: Launcher | None = None,
        sync_batchnorm: bool = False,
        sync_mode: GradientSyncMode | str = "auto",
        comm_hook: Any = None,
        comm_state: Any = None,
        comm_wrapper: Any = None,
        model_averaging_period: int | None = None,
        gradient_weighting: str | None = None,
        check_collectives: bool | None = None,
        **ddp_kwargs: Any,
    ) -> None:
        arguments = dict(locals())
        if parallel_devices is not None:
            meant = zip(("accelerator", "devices"), from_parallel_devices(parallel_devices), strict=True)
            arguments |= {name: agreed_value(name, arguments[name], value) for name, value in meant}
        ddp_options = check_ddp_arguments(type(self), ddp_kwargs)
        super().__init__(
            precision=precision,
            checkpoint_io=checkpoint_io,
            gradients=GradientSync(
                sync_mode=sync_mode,
                comm_hook=comm_hook,
                comm_state=comm_state,
                comm_wrapper=comm_wrapper,
                model_averaging_period=model_averaging_period,
                gradient_weighting=gradient_weighting,
                ddp_kwargs=ddp_options,
                needs_ddp=True,
            ),
            **take_fields(ProcessConfig, arguments),
            **take_fields(GroupConfig, arguments),
        )
        self.ddp_kwargs = {**self.gradients.ddp_defaults, **ddp_options}

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Move a module to this rank's device and wrap it; one with nothing to train is not wrapped.

        A module that is wrapped already, or its wrapper, gives the same wrapper again. A module that
        `torch.compile` returned is compiled within the wrapper, until the job ends.

        Raises:
            ConfigurationError: for sharded parameters, and for a wrapper that is not this strategy's.
        """
        given, module = module, uncompiled(module)
        is_compiled = given is not module
        if (existing := self._current_job.modules.wrapper_of(module)) is not None:
            return existing
        check_parameters(module)
        module = self._prepare_module(module)
        if not trained_parameters(module):
            self._current_job.modules.plain.update((given, module))
            if dist.is_initialized():
                self._track(given if is_compiled else module)
            return given if is_compiled else module
        if not dist.is_initialized():
            raise self._wrong_state("setup_module()", "a process group", GROUP_REMEDY)
        import_dynamo()
        with self._wrapping_stream():
            configured = self.gradients.wrap(module, lambda: self._configured(module))
        wrapped = checked_wrapper(configured, type(self).__name__, self.data_parallel_group)
        self._attach_wrapper(wrapped)
        if is_compiled:
            self._current_job.cleanup.callback(compile_within(module, given))
        return wrapped

    def _attach_wrapper(self, wrapped: DistributedDataParallel) -> None:
        job = self._current_job
        job.modules.wrappers.add(wrapped)
        self.gradients.attach(wrapped, self.local_world_size)
        self._track(wrapped)
        if job.check is not None:
            check_collectives_of(wrapped, job.check)
        self._agree_on_gradients(wrapped)

    def _track(self, module: nn.Module) -> None:
        """Follow from now on which parameters are trained."""
        self.gradients.track(module, self.data_parallel_group, is_new=True)

    @or_in_place
    def configure_ddp(self, module: nn.Module, device_ids: list[int] | None) -> DistributedDataParallel:
        """Wrap a module; override it for a wrapper of your own.

        An override without arguments, as in Lightning 2, replaces the module in `self.model` by the wrapper.

        Args:
            module: on this rank's device already.
            device_ids: what `determine_ddp_device_ids` returned.
        """
        return DistributedDataParallel(
            module, device_ids=device_ids, process_group=self.data_parallel_group, **self.ddp_kwargs
        )

    def _configured(self, module: nn.Module) -> object:
        device_ids = self.determine_ddp_device_ids()
        if accepts(self.configure_ddp, 2):
            return self.configure_ddp(module, device_ids)
        wrap = partial(DDPStrategy.configure_ddp, self, device_ids=device_ids)
        ddp_kwargs = {"process_group": self.data_parallel_group, **self.ddp_kwargs}
        return wrapped_in_place(self, module, wrap, ddp_kwargs)

    def unwrap_module(self, module: nn.Module) -> nn.Module:
        """Return the user's module within the result of `setup_module`."""
        return module.module if isinstance(module, DistributedDataParallel) else super().unwrap_module(module)

    def gradients_may_differ(self, module: nn.Module) -> bool:
        """Return whether ranks may have different gradients after a synchronised backward pass."""
        if not isinstance(module, DistributedDataParallel):
            return False
        return super().gradients_may_differ(module) or not averages_everywhere(module)

    def determine_ddp_device_ids(self) -> list[int] | None:
        """Return the index of this rank's device; None on the CPU."""
        index = self.root_device.index
        return None if self.root_device.type == "cpu" or index is None else [index]

    @contextmanager
    def _wrapping_stream(self) -> Iterator[None]:
        # A side stream, as torch's notes on CUDA graphs and DDP require; it orders nothing by itself.
        if self.root_device.type != "cuda":
            yield
            return
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            yield
        current.wait_stream(side)

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[Any]:
        """Return a context in which backward passes average nothing, for accumulating gradients.

        Raises:
            InvalidTypeError: when enabled, and the module is not what `setup_module` returned.
        """
        if not enabled or (self._job is not None and module in self._job.modules.plain):
            return nullcontext()
        if isinstance(module, DistributedDataParallel):
            return module.no_sync()
        raise InvalidTypeError(
            argument="module",
            value=module,
            expected="the module that setup_module() returned, which DDP has wrapped",
            remedy="module = strategy.setup_module(module)",
        )
