"""The set of trained parameters, and whether it has changed: freezing, added layers, parameter groups."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from itertools import chain, compress
from operator import attrgetter, is_, itemgetter, not_
from typing import TYPE_CHECKING, Any, final
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rankwise.gradient_sync.parameters import ParametersOf, gives_buffers, parameters_of
from rankwise.process_group.rank_facts import described

if TYPE_CHECKING:
    from torch.optim import Optimizer

_requires_grad, _params = attrgetter("requires_grad"), itemgetter("params")
_APART = ", in no optimizer"
_END = object()  # the last one of two sequences that are compared, so that they are equally long


@final
class TrainedSet:
    """The parameters of a module and of optimizers, as of the last `read`.

    Whether something has changed since is found without walking through the module: `read` keeps live views
    of what the submodules hold, and flat lists to compare with.

    Attributes:
        all: the parameters, trained or not, in an order that is the same on every rank.
        trained: the module's parameters that require a gradient, and the optimizers' that are not in the
            module; without parameters that DDP ignores.
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
        """Return whether module and optimizers still have the parameters that were read, as trained."""
        _, parameters, flags = self._read
        return list(map(_requires_grad, parameters)) == flags and self._has_same(optimizers)

    def is_complete(self, optimizers: Sequence[Optimizer]) -> bool:
        """Return whether the next step can update only parameters that are in this set.

        It is faster than `is_current`, except without optimizers.
        """
        if not optimizers:
            return self.is_current()
        return not any(map(_requires_grad, self._frozen)) and self._is_updated_alike(optimizers)

    def _has_same(self, optimizers: Iterable[Optimizer]) -> bool:
        """Return whether module and optimizers still have the parameters that were read, trained or not."""
        return (
            not any(self._empty)
            and all(map(is_, chain.from_iterable(self._views), self._held))
            and self._is_updated_alike(optimizers)
        )

    def _is_updated_alike(self, optimizers: Iterable[Optimizer]) -> bool:
        for optimizer in optimizers:
            known = self._updated.get(optimizer, (_END,))
            if not all(map(is_, chain(_updated_by(optimizer), (_END,)), known)):
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
        names, before, flags_before = self._read
        named, apart_before, buffers_before = dict(zip(names, before, strict=True)), self.apart, self.buffers
        if not (self._held and self._has_same(optimizers)):
            named = self._walk(module, optimizers, parameters_of, elsewhere)
        self.all = parameters = list(named.values())
        flags = list(map(_requires_grad, parameters))
        self._read = list(named), parameters, flags
        self.trained = list(compress(parameters, flags))
        self._frozen = list(compress(parameters, map(not_, flags)))
        self.trained_inside = self.inside.intersection(map(id, self.trained)) - self.apart
        is_same = len(parameters) == len(before) and all(map(is_, parameters, before))
        is_same = is_same and self.apart == apart_before and self.buffers == buffers_before
        return not is_same or flags != flags_before or self._read[0] != names

    def _walk(
        self,
        module: nn.Module,
        optimizers: Iterable[Optimizer],
        parameters_of: ParametersOf,
        elsewhere: Container[int],
    ) -> dict[str, Tensor]:
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
        for optimizer in optimizers:
            self._read_optimizer(optimizer, parameters_of, elsewhere)
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
        self._updated[optimizer] = [*_updated_by(optimizer), _END]
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


def _updated_by(optimizer: Optimizer) -> Iterable[Tensor]:
    return chain.from_iterable(map(_params, optimizer.param_groups))
