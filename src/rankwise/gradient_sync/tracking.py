"""Keep what is averaged equal to what is trained, when parameters are frozen, unfrozen or added."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from datetime import timedelta
from inspect import signature
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rankwise.errors import ConfigurationError
from rankwise.gradient_sync.hook_registry import PowerSGDMemory
from rankwise.gradient_sync.parameters import ParametersOf, gives_buffers, parameters_of, share_tensors
from rankwise.gradient_sync.trained_set import TrainedSet
from rankwise.gradient_sync.unused import record_reduced_names
from rankwise.process_group.collectives import has_other_ranks
from rankwise.process_group.step_agreement import ChangeAgreement

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from rankwise.monitoring.rank_monitor import RankMonitor

_TIMEOUT = timedelta(minutes=10)
_REBUILT_WITH = {  # what torch 2.6 to 2.13 have, and their parameters
    "_build_params_for_reducer": ["self"],
    "_build_debug_param_to_name_mapping": ["self", "parameters"],
    "_ddp_init_helper": [
        "self",
        "parameters",
        "expect_sparse_gradient",
        "param_to_name_mapping",
        "static_graph",
    ],
}


@final
class TrackedModule:
    """The trained parameters of a module and its optimizers, which the ranks of a group change together.

    Collective: every rank must create it, and then call the same methods in the same order.

    Args:
        module: what `setup_module` returned, wrapped or not.
        group: the ranks that average gradients; None for all. Without a process group this is the only rank.
        is_new: whether DDP has wrapped it just now. If not, it may have been wrapped for other parameters.
        timeout: how long to wait for the other ranks where a rank has changed something.
        monitor: this rank's, if it has one.

    Attributes:
        parameters: the parameters of module and optimizers, as they were last read.
        is_checked: whether the caller runs `update` for the microbatch in progress.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup | None,
        *,
        is_new: bool,
        timeout: timedelta = _TIMEOUT,
        monitor: RankMonitor | None = None,
    ) -> None:
        self._group = group
        self._known_sets: set[tuple[int, ...]] = set()
        self._stopped: list[Tensor] = []  # trained earlier in this window, so they may have gradients
        self._agreement: ChangeAgreement | None = None
        self._averaged: set[int] = set()  # ids of the parameters that DDP averages
        self.parameters = TrainedSet(module)
        self.is_checked = False
        if isinstance(module, DistributedDataParallel) and (is_new or self._is_as_wrapped(module)):
            self._averaged = self.parameters.trained_inside
            record_reduced_names(module)
        if has_other_ranks(group):
            self._agreement = ChangeAgreement(self.parameters.facts, group, timeout, monitor)

    def _is_as_wrapped(self, wrapped: DistributedDataParallel) -> bool:
        data: Any = wrapped._get_ddp_logging_data()
        return int(data["num_parameter_tensors"]) == len(self.parameters.trained_inside)

    def update(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer] = (),
        parameters_of: ParametersOf = parameters_of,
        elsewhere: Callable[[], set[int]] = set,
        *,
        accepts_known: bool = False,
        is_window_end: bool = False,
    ) -> None:
        """Read the parameters again if something has changed, together with the other ranks.

        Every rank gets the first rank's values of parameters that are new.

        Args:
            module: the module.
            optimizers: their parameters are averaged with the module's.
            parameters_of: returns the module's parameters that an optimizer updates, directly or as copies.
            elsewhere: returns the ids of parameters that belong to other modules.
            accepts_known: whether the ranks need not compare a set that all of them have had before.
            is_window_end: whether the window's gradients exist. A parameter that was frozen since is then
                read before the next forward pass.

        Raises:
            RankMismatchError: when other ranks have changed something else, or nothing.
        """
        parameters = self.parameters
        trained, known = parameters.trained, parameters.all
        is_current = (
            parameters.is_complete(optimizers) if is_window_end else parameters.is_current(optimizers)
        )
        has_changed = not is_current and parameters.read(module, optimizers, parameters_of, elsewhere())
        if self._agreement is not None:
            must_agree = has_changed and not (accepts_known and self._is_known())
            self._agreement.begin_step(must_agree)
        if has_changed:
            self._stopped += _without(_without(trained, parameters.trained), self._stopped)
            if isinstance(module, DistributedDataParallel) and gives_buffers(module):
                module._assign_modules_buffers()  # DDP does not look for new buffers if there were none
            if self._agreement is not None:
                share_tensors(_without(parameters.all, known), self._group)

    def _is_known(self) -> bool:
        """Return whether this set of trained parameters has occurred before, and record it."""
        key = tuple(map(id, self.parameters.trained))
        is_known = key in self._known_sets
        self._known_sets.add(key)
        return is_known

    def must_rebuild(self) -> bool:
        """Return whether DDP's buckets must be rebuilt, as other parameters are averaged from now on."""
        before, self._averaged = self._averaged, self.parameters.trained_inside
        return before is not self._averaged and before != self._averaged

    def others(self, *, averaged_by_ddp: bool) -> list[Tensor]:
        """Return the parameters whose gradients are averaged at the end of the window.

        These are all, or with `averaged_by_ddp` those that DDP does not average.
        """
        averaged = self._averaged if averaged_by_ddp else set()
        trained = self.parameters.trained
        if not self._stopped and averaged is self.parameters.trained_inside and len(averaged) == len(trained):
            return []
        both = (*trained, *_without(self._stopped, trained))
        return [each for each in both if id(each) not in averaged]

    def end_window(self) -> None:
        """Start the next window."""
        self._stopped.clear()


def _without(parameters: Iterable[Tensor], others: Iterable[Tensor]) -> list[Tensor]:
    ids = {id(parameter) for parameter in others}
    return [parameter for parameter in parameters if id(parameter) not in ids]


def rebuild_reducer(wrapped: DistributedDataParallel, apart: Container[int] = ()) -> None:
    """Make DDP average the parameters that require a gradient now, in new buckets, with the same hook.

    Args:
        wrapped: the wrapper.
        apart: the ids of parameters that it does not average.

    Raises:
        ConfigurationError: when there are none, DDP keeps copies of them, or this torch is not known.
    """
    if problem := _cannot_rebuild(wrapped):
        raise ConfigurationError(
            message=f"Parameters were frozen, unfrozen or added, but {problem}.",
            facts="DDP cannot average what is trained now.",
            remedy='DDPStrategy(sync_mode="forced_sync"), which averages without DDP.',
        )
    ignored = wrapped.parameters_to_ignore
    named = wrapped.module.named_parameters(remove_duplicate=False)
    wrapped.parameters_to_ignore = ignored | {name for name, each in named if id(each) in apart}
    try:
        _rebuild(wrapped)
    finally:
        wrapped.parameters_to_ignore = ignored


def _rebuild(wrapped: DistributedDataParallel) -> None:
    parameters, expects_sparse = wrapped._build_params_for_reducer()
    if not parameters:
        raise ConfigurationError(
            message=f"Parameters were frozen, and {type(wrapped.module).__name__} has nothing left to train.",
            facts="DDP needs at least one gradient to average.",
            remedy="keep one parameter that requires a gradient.",
        )
    names = wrapped._build_debug_param_to_name_mapping(parameters)
    ignored = wrapped.parameters_to_ignore
    wrapped._module_parameters = [
        each for name, each in wrapped.module.named_parameters() if name not in ignored
    ]
    del wrapped.logger, wrapped.reducer  # frees the buckets, and removes the hooks from the parameters
    wrapped._ddp_init_helper(parameters, expects_sparse, names, wrapped.static_graph)
    if wrapped.static_graph:
        logger: Any = wrapped.logger
        wrapped.reducer._set_static_graph()
        logger._set_static_graph()
        wrapped._static_graph_delay_allreduce_enqueued = False  # the next backward pass records the graph
    for hook, state in wrapped._comm_hooks:
        if isinstance(state, PowerSGDMemory):
            state.name_parameters(wrapped.module)
        dist._register_comm_hook(wrapped.reducer, state, hook)


def _cannot_rebuild(wrapped: DistributedDataParallel) -> str | None:
    """Return why the reducer cannot be replaced; see `docs/decisions/0010-the-reducer-is-replaced.md`."""
    if wrapped.mixed_precision:
        return "DDP keeps copies of them, with mixed_precision"
    if wrapped._use_python_reducer:
        return "DDP averages in hooks of its own, with torch._dynamo.config.optimize_ddp='python_reducer'"
    methods = vars(DistributedDataParallel)
    found = {name: list(signature(methods[name]).parameters) for name in _REBUILT_WITH if name in methods}
    if found != _REBUILT_WITH:
        return f"the DistributedDataParallel of torch {torch.__version__} is not known to rankwise"
    return None
