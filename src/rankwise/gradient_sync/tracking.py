"""Keep the averaged parameters equal to the trained ones, when some are frozen, unfrozen or added."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from datetime import timedelta
from inspect import signature
from itertools import chain, compress
from operator import attrgetter, is_, itemgetter, not_
from typing import TYPE_CHECKING, Any, final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rankwise.errors import ConfigurationError
from rankwise.gradient_sync.hook_registry import PowerSGDMemory
from rankwise.gradient_sync.parameters import ParametersOf, gives_buffers, parameters_of, share_tensors
from rankwise.gradient_sync.unused import record_reduced_names
from rankwise.process_group.collectives import has_other_ranks
from rankwise.process_group.rank_comparison import described
from rankwise.process_group.step_agreement import ChangeAgreement

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from rankwise.monitoring.rank_monitor import RankMonitor

_requires_grad, _params = attrgetter("requires_grad"), itemgetter("params")
_APART = ", in no optimizer"
_END = object()  # the last one of two sequences that are compared, so that they are equally long
_TIMEOUT = timedelta(minutes=10)
_REBUILT_WITH = {  # what torch 2.6 to 2.13 have, and their parameters
    "_build_params_for_reducer": "self",
    "_build_debug_param_to_name_mapping": "self parameters",
    "_ddp_init_helper": "self parameters expect_sparse_gradient param_to_name_mapping static_graph",
}


@final
class TrackedModule:
    """The trained parameters of a module and its optimizers, which the ranks of a group change together.

    Collective: every rank must create it, and then call the same methods in the same order. `is_new` says
    that DDP has wrapped the module just now; otherwise it may have been wrapped for other parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup | None,  # None for all; without a process group this is the only rank
        *,
        is_new: bool,
        timeout: timedelta = _TIMEOUT,  # how long to wait for the other ranks if a rank has changed something
        monitor: RankMonitor | None = None,  # this rank's, if it has one
    ) -> None:
        self._group = group
        self._known_sets: set[tuple[int, ...]] = set()
        self._stopped: list[Tensor] = []  # trained earlier in this window, so they may have gradients
        self._agreement: ChangeAgreement | None = None
        self._averaged: set[int] = set()  # ids of the parameters that DDP averages
        self.parameters = TrainedSet(module)
        self.is_checked = False  # whether the caller runs `update` for the microbatch in progress
        if isinstance(module, DistributedDataParallel):
            data: Any = {} if is_new else module._get_ddp_logging_data()
            trained = self.parameters.trained_inside
            if is_new or int(data["num_parameter_tensors"]) == len(trained):
                self._averaged = trained
                record_reduced_names(module)
        if has_other_ranks(group):
            self._agreement = ChangeAgreement(self.parameters.facts, group, timeout, monitor)

    def update(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        parameters_of: ParametersOf,
        elsewhere: Callable[[nn.Module], set[int]],
        *,
        accepts_known: bool = False,
        is_window_end: bool = False,
    ) -> None:
        """Read the parameters again if something has changed, together with the other ranks.

        Every rank gets the first rank's values of parameters that are new. With `accepts_known` the ranks
        need not compare a set that all of them have had before. At a window's end gradients exist, so a
        parameter that was frozen since is read before the next forward pass.

        Raises:
            RankMismatchError: when other ranks have changed something else, or nothing.
        """
        parameters = self.parameters
        trained, known = parameters.trained, parameters.all
        is_current = (
            parameters.is_complete(optimizers) if is_window_end else parameters.is_current(optimizers)
        )
        has_changed = not is_current and parameters.read(module, optimizers, parameters_of, elsewhere(module))
        if self._agreement is not None:
            must_agree = has_changed and not (accepts_known and self._is_known())
            self._agreement.begin_step(must_agree)
        if has_changed:
            self._stopped += _without(_without(trained, parameters.trained), self._stopped)
            if gives_buffers(module):
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
        """Return the parameters to average at a window's end: all, or those that DDP does not average."""
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

    It does not average parameters with an id in `apart`.

    Raises:
        ConfigurationError: when nothing is left to train; with `mixed_precision` or torch's Python reducer;
            or when rankwise does not know the reducer of this torch.
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
    found = {name: " ".join(signature(methods[name]).parameters) for name in _REBUILT_WITH if name in methods}
    if found != _REBUILT_WITH:
        return f"the DistributedDataParallel of torch {torch.__version__} is not known to rankwise"
    return None


@final
class TrainedSet:
    """The parameters of a module and of optimizers, as of the last `read`.

    Whether something has changed since is found without walking through the module: `read` keeps live views
    of what the submodules hold, and flat lists to compare with.

    Attributes:
        all: the parameters of module and optimizers, trained or not, without those that DDP ignores; in an
            order that is the same on every rank.
        trained: those that require a gradient.
        inside: the ids of the module's parameters, including parameters that DDP ignores.
        unowned: the module's parameters by name that no optimizer updates, once optimizers are known.
        apart: the ids of parameters that were added to the module. They may be trained by something else, or
            not at all, so DDP must not wait for their gradients.
        trained_inside: the ids of the module's parameters in `trained`, except those in `apart`.
        buffers: the names of the buffers that DDP gives to all ranks.
    """

    def __init__(self, module: nn.Module) -> None:
        self._updated: WeakKeyDictionary[Optimizer, list[Any]] = WeakKeyDictionary()
        self._labels: WeakKeyDictionary[Optimizer, str] = WeakKeyDictionary()
        self._num_optimizers = 0
        self._outside: dict[str, Tensor] = {}
        self.unowned: dict[str, Tensor] = {}
        self.apart: set[int] = set()
        self._held: list[Any] = []
        self.buffers: list[str] = []
        self._read: tuple[list[str], list[Tensor], list[bool]] = [], [], []
        self.read(module)

    def is_current(self, optimizers: Iterable[Optimizer] = ()) -> bool:
        """Return whether the trained parameters of module and optimizers are those of the last `read`."""
        _, parameters, flags = self._read
        return list(map(_requires_grad, parameters)) == flags and self._has_same(optimizers)

    def is_complete(self, optimizers: Sequence[Optimizer]) -> bool:
        """Return whether the next step can update only parameters of this set; faster than `is_current`."""
        if not optimizers:
            return self.is_current()
        return not any(map(_requires_grad, self._frozen)) and self._is_updated_alike(optimizers)

    def _has_same(self, optimizers: Iterable[Optimizer]) -> bool:
        """Return whether all parameters of module and optimizers are unchanged since the last `read`."""
        return (
            not any(self._empty)
            and all(map(is_, chain.from_iterable(self._views), self._held))
            and self._is_updated_alike(optimizers)
        )

    def _is_updated_alike(self, optimizers: Iterable[Optimizer]) -> bool:
        for optimizer in optimizers:
            known = self._updated.get(optimizer, (_END,))
            if not all(map(is_, chain(*map(_params, optimizer.param_groups), (_END,)), known)):
                return False
        return True

    def read(
        self,
        module: nn.Module,
        optimizers: Iterable[Optimizer] = (),
        parameters_of: ParametersOf = parameters_of,
        elsewhere: Container[int] = (),
    ) -> bool:
        """Read the parameters and the names of buffers again; return whether they have changed.

        Parameters whose ids are in `elsewhere` belong to other modules. For optimizers that are not given,
        the parameters stay as they were read last.
        """
        before, named = self._state(), dict(zip(*self._read[:2], strict=True))
        if not (self._held and self._has_same(optimizers)):
            for optimizer in optimizers:
                self._read_optimizer(optimizer, parameters_of, elsewhere)
            named = self._walk(module)
        self.all = parameters = list(named.values())
        flags = list(map(_requires_grad, parameters))
        self._read = list(named), parameters, flags
        self.trained = list(compress(parameters, flags))
        self._frozen = list(compress(parameters, map(not_, flags)))
        self.trained_inside = self.inside.intersection(map(id, self.trained)) - self.apart
        return self._state() != before

    def _state(self) -> tuple[object, ...]:
        names, parameters, flags = self._read
        return names, list(map(id, parameters)), flags, self.apart, self.buffers

    def _walk(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the parameters of module and optimizers by name, and prepare to compare with them."""
        inner = module.module if isinstance(module, DistributedDataParallel) else module
        dicts: list[dict[str, Any]] = [
            each for submodule in inner.modules() for each in (submodule._parameters, submodule._modules)
        ]
        buffers = [submodule._buffers for submodule in inner.modules()] if gives_buffers(module) else []
        self._empty = [each for each in (*dicts, *buffers) if not each]
        views = (*(each.values() for each in dicts if each), *(each.keys() for each in buffers if each))
        self._views = [*views, (_END,)]
        self._held = list(chain.from_iterable(self._views))
        own_ignored = getattr(inner, "_ddp_params_and_buffers_to_ignore", ())
        ignored_names = set(getattr(module, "parameters_to_ignore", own_ignored))
        named: dict[str, Tensor] = dict(inner.named_parameters())
        self.buffers = [name for name, _ in inner.named_buffers() if buffers and name not in ignored_names]
        self.inside = {id(parameter) for parameter in named.values()}
        updated = {id(each): name for name, each in self._outside.items()}
        if self._updated:  # the optimizers are known
            added = self.inside.difference(map(id, self._read[1]))
            self.apart = (added | self.apart & self.inside).difference(updated)
        outside = {number: name for number, name in updated.items() if number not in self.inside}
        named = {name: each for name, each in named.items() if name not in ignored_names}
        if self._updated:
            self.unowned = {name: each for name, each in named.items() if id(each) not in updated}
        return named | {name: self._outside[name] for name in outside.values()}

    def _read_optimizer(
        self, optimizer: Optimizer, parameters_of: ParametersOf, elsewhere: Container[int]
    ) -> None:
        self._updated[optimizer] = [*chain(*map(_params, optimizer.param_groups)), _END]
        if optimizer not in self._labels:
            self._labels[optimizer] = f" of optimizer {self._num_optimizers}"
            self._num_optimizers += 1
        label = self._labels[optimizer]
        self._outside = {name: each for name, each in self._outside.items() if not name.endswith(label)}
        for place, parameter in enumerate(parameters_of(optimizer)):
            if id(parameter) not in elsewhere:
                self._outside[f"{place}{label}"] = parameter

    def facts(self) -> dict[str, str]:
        """Return a description of each parameter by name, as it was read. Runs on: any thread."""
        return {
            f"parameter {name!r}": described(parameter, flag) + _APART * (id(parameter) in self.apart)
            for name, parameter, flag in zip(*self._read, strict=True)
        } | {f"buffer {name!r}": "registered" for name in self.buffers}
