"""What `Fabric.setup` and `setup_dataloaders` return: module, optimizer and loader, used by the strategy."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader, SequentialSampler
from typing_extensions import Self

from rankwise.checks import check_is_a, check_value
from rankwise.data import shard_for_evaluation, shard_for_training
from rankwise.data.batches import set_epoch_of_loader, sharded_sampler_of, start_with_seed, with_batch_stream
from rankwise.data.sampler import length_of
from rankwise.data.sharding import is_split_for_one_rank
from rankwise.errors import ConfigurationError
from rankwise.fabric.user_functions import call_callbacks
from rankwise.gradient_sync.parameters import share_buffers
from rankwise.nested import map_tensors
from rankwise.precision import Precision
from rankwise.ranks import warn
from rankwise.strategies import Strategy
from rankwise.strategies.agreement import agree_on_loaders, check_same_order, mean_loss, replica_of

T = TypeVar("T")
_FORWARD_METHODS = ("training_step", "validation_step", "test_step", "predict_step")
# Attributes of a `FabricOptimizer`; learning rate schedulers set the last two.
_OWN = ("_optimizer", "_strategy", "_callbacks", "step", "_opt_called")


@final
class FabricModule(nn.Module):
    """A module that `Fabric.setup` has set up: calls go through the strategy's wrapper and the precision.

    Attributes, parameters, submodules and `state_dict` are the user's module's, without a prefix; what
    is assigned is assigned there. A copy, also by pickle, is a copy of the user's module.

    Without gradients (`torch.no_grad()`) a call runs the user's module itself, so that ranks may evaluate
    different numbers of batches. The first such call after a forward pass with gradients is Collective if
    the module has buffers: all ranks get rank 0's.
    """

    module: nn.Module
    """The user's module."""
    wrapped: nn.Module
    """The result of the strategy's `setup_module`."""
    _strategy: Strategy
    _on_output: Callable[[Tensor], Tensor]
    _forward_methods: set[str]
    _must_share_buffers: bool

    def __init__(self, wrapped: nn.Module, strategy: Strategy, on_output: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        original = strategy.unwrap_module(wrapped)
        own = self.__dict__  # what is assigned goes to the user's module
        own.update(module=original, wrapped=wrapped, _strategy=strategy, _on_output=on_output)
        own.update(_forward_methods={*_FORWARD_METHODS}, _must_share_buffers=False)
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            own[name] = original.__dict__[name]  # the same objects, so that both modules have the same parts

    @property
    def _is_wrapped(self) -> bool:
        return isinstance(self.wrapped, DistributedDataParallel)

    @property
    def training(self) -> bool:
        """Whether the user's module is in training mode."""
        return self.module.training

    @training.setter
    def training(self, mode: bool) -> None:
        """Do nothing: only nn.Module's constructor sets it here; `__setattr__` sets the user's module's."""

    def train(self, mode: bool = True) -> Self:
        """Set training or evaluation mode of the module and its wrapper."""
        self.wrapped.train(mode)
        self.module.train(mode)
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Apply a function to the user's module and its submodules."""
        self.module.apply(fn)
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward pass."""
        return self._run(None, args, kwargs)

    def mark_forward_method(self, method: MethodType | str) -> None:
        """Let a method of the module run through the wrapper and in the precision, as `forward` does.

        Raises:
            InvalidTypeError: for anything else than a method or its name.
            InvalidArgumentError: for `forward` itself, and for a name that is not a method of the module.
        """
        check_is_a("method", method, (MethodType, str), "a method or its name")
        name = method if isinstance(method, str) else method.__name__
        is_method = name != "forward" and inspect.ismethod(getattr(self.module, name, None))
        expected = f"the name of a method of {type(self.module).__name__}, other than forward"
        check_value("method", name, is_method, expected)
        self._forward_methods.add(name)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the user's module."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state into the user's module, in place.

        Raises:
            InvalidArgumentError: with `assign=True`, which would replace the parameters.
        """
        expected = "False: the wrapper and the optimizers have the parameters that exist"
        check_value("assign", assign, not assign, expected)
        result = self.module.load_state_dict(state_dict, strict=strict)
        self._strategy.precision.reload_weights()
        return result

    def _run(self, method: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        precision = self._strategy.precision
        args, kwargs = precision.convert_input((args, kwargs))
        with precision.forward_context():
            output = self._callee(method)(*args, **kwargs)
        output = precision.convert_output(output)
        map_tensors(output, self._on_output)
        return output

    def _callee(self, method: str | None) -> Callable[..., Any]:
        """Return what runs a method of the module, or for None its forward pass."""
        if not self._is_wrapped or torch.is_grad_enabled():
            self.__dict__["_must_share_buffers"] = self._is_wrapped
            wrapped = self.wrapped
            return wrapped if method is None else partial(self._strategy.call_method, wrapped, method)
        if self._must_share_buffers:
            share_buffers(self.wrapped)
            self.__dict__["_must_share_buffers"] = False
        return self.module if method is None else getattr(self.module, method)

    def __getattr__(self, name: str) -> Any:
        if "module" not in self.__dict__:
            raise AttributeError(name)
        value = getattr(self.module, name)
        if not inspect.ismethod(value) or value.__self__ is not self.module:
            return value
        if name in self._forward_methods:
            return lambda *args, **kwargs: self._run(name, args, kwargs)
        changes_numbers = type(self._strategy.precision) is not Precision
        return self._checked(value) if self._is_wrapped or changes_numbers else value

    def __setattr__(self, name: str, value: Any) -> None:
        if "module" in self.__dict__:
            setattr(self.module, name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.module, name)

    def _checked(self, method: MethodType) -> Callable[..., Any]:
        """Return a method that raises when it computes with gradients, which would not be averaged."""
        name = f"{type(self.module).__name__}.{method.__name__}"

        def refuse(*_: object) -> None:
            if torch.is_grad_enabled():
                raise ConfigurationError(
                    message=f"{name}() computes with the module outside of its forward pass.",
                    facts="so its gradients would not be averaged over the ranks, and it would not run in "
                    "the precision that was asked for.",
                    remedy=f"module.mark_forward_method({method.__name__!r}) after fabric.setup().",
                )

        @functools.wraps(method)
        def checked(*args: Any, **kwargs: Any) -> Any:
            handles = [each.register_forward_pre_hook(refuse) for each in self.module.modules()]
            try:
                return method(*args, **kwargs)
            finally:
                for handle in handles:
                    handle.remove()

        return checked

    def __reduce__(self) -> tuple[Callable[[nn.Module], nn.Module], tuple[nn.Module]]:
        return _same, (self.module,)

    def __dir__(self) -> list[str]:
        return sorted({*dir(type(self)), *self.__dict__, *dir(self.module)})


def check_set_up(module: Any) -> FabricModule:
    """Return a module that was set up; refuse any other."""
    remedy = "module = fabric.setup(module)"
    check_is_a("module", module, FabricModule, "what Fabric.setup() returned", remedy)
    checked: FabricModule = module
    return checked


class FabricOptimizer:
    """An optimizer that `Fabric.setup` has set up; it is an instance of the optimizer's class, too.

    `step` unscales gradients, skips the step on all ranks where they are not finite, and updates master
    weights, as the precision says. All other attributes are the optimizer's.
    """

    _optimizer: Optimizer
    _strategy: Strategy
    _callbacks: Sequence[Any]

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer itself."""
        return self._optimizer

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Step the optimizer once; return what its `step` returns.

        Args:
            closure: computes the loss, by `Fabric.backward` too, and returns it. All optimizers decide by
                the mean of the ranks' losses, so with a closure this is Collective.
            options: for the optimizer's own `step`.
        """
        strategy, optimizer = self._strategy, self._optimizer
        agreed = None if closure is None else lambda: mean_loss(strategy, closure(), 1.0)
        returned = strategy.optimizer_step(optimizer, agreed, **options)
        call_callbacks(self._callbacks, "on_after_optimizer_step", strategy=strategy, optimizer=optimizer)
        return returned

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Remove the gradients of the optimizer's parameters, or fill them with zeros."""
        self._strategy.precision.zero_grad(self._optimizer, set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state. Collective if the optimizer is sharded; ranks other than 0 get {} then."""
        return self._strategy.get_optimizer_state(self._optimizer)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self._optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters to the optimizer."""
        self._optimizer.add_param_group(param_group)

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._optimizer, name, value)

    def __reduce__(self) -> tuple[Callable[[Optimizer], Optimizer], tuple[Optimizer]]:
        return _same, (self._optimizer,)

    def __repr__(self) -> str:
        return repr(self._optimizer)


def fabric_optimizer(optimizer: Optimizer, strategy: Strategy, callbacks: Sequence[Any]) -> Any:
    """Return a `FabricOptimizer` that is an instance of the optimizer's class, as schedulers demand."""
    kind = type(f"Fabric{type(optimizer).__name__}", (FabricOptimizer, type(optimizer)), {})
    wrapped: Any = object.__new__(kind)
    wrapped._optimizer, wrapped._strategy, wrapped._callbacks = optimizer, strategy, callbacks
    return wrapped


def plain_optimizer(optimizer: Any) -> Any:
    """Return the optimizer that a `FabricOptimizer` steps; any other one as it is."""
    return optimizer.optimizer if isinstance(optimizer, FabricOptimizer) else optimizer


def _same(unpickled: T) -> T:
    return unpickled


@final
class FabricDataLoader:
    """A loader that `Fabric.setup_dataloaders` has set up: all other attributes are the original loader's.

    Attributes:
        epoch: the number of the next iteration, which determines its order; samplers and iterable data sets
            that have `set_epoch` get it.
    """

    def __init__(self, loader: Any, strategy: Strategy, *, seed: int | None, move_to_device: bool) -> None:
        self.loader = loader
        self.epoch = 0
        self._strategy = strategy
        self._seed = seed
        self._move_to_device = move_to_device

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        epoch = self.epoch
        self.epoch += 1
        set_epoch_of_loader(epoch, self.loader)
        if self._seed is None:
            batches = iter(self.loader)
        else:
            check_same_order(self._strategy, "data", [self.loader])
            seed = (self._seed, epoch, self._strategy.global_rank)
            batches = start_with_seed(self.loader, self.loader.__iter__, *seed)
        for batch in batches:
            yield self._strategy.batch_to_device(batch) if self._move_to_device else batch

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)


def split_loaders(
    loaders: Sequence[DataLoader[Any]], strategy: Strategy, *, each_sample_once: bool
) -> list[tuple[Any, int | None]]:
    """Return this rank's part of each loader, and its seed. Collective: every rank must call this."""
    default = strategy.broadcast(torch.initial_seed())
    seeds = agree_on_loaders(strategy, "data", list(loaders), default=default, is_split_here=True)
    split = shard_for_evaluation if each_sample_once else shard_for_training
    parts: list[tuple[Any, int | None]] = []
    for loader, seed in zip(loaders, seeds, strict=True):
        shard = loader
        if strategy.world_size > 1 or is_split_for_one_rank(loader, keeps_order=True):
            shard = split(loader, **replica_of(strategy), seed=seed)
        if each_sample_once:
            _check_no_rank_is_empty(shard)
        elif strategy.is_global_zero:
            _warn_of_repeated_samples(shard)
        parts.append(with_batch_stream(shard, seed=seed, rank=strategy.global_rank))
    return parts


def _check_no_rank_is_empty(loader: DataLoader[Any]) -> None:
    """Refuse a rank without samples: it could not take part in what the others average."""
    sampler = sharded_sampler_of(loader)
    if sampler is None or math.isinf(length_of(sampler.sampler)):
        return
    last = sampler.num_replicas - 1
    if not sampler.length_of(last):
        raise ConfigurationError(
            message=f"each_sample_once=True leaves no sample for global_rank {last}.",
            facts=f"there are {length_of(sampler.sampler)} for {sampler.num_replicas} ranks.",
            remedy="use fewer ranks or more samples, or leave each_sample_once out.",
        )


def _warn_of_repeated_samples(loader: DataLoader[Any]) -> None:
    """Warn if a loader that reads the data in order, perhaps to evaluate, gets samples twice."""
    sampler = sharded_sampler_of(loader)
    if sampler is None or sampler.uneven != "pad" or type(sampler.sampler) is not SequentialSampler:
        return
    length, ranks = len(sampler.sampler), sampler.num_replicas
    if length % ranks:
        warn(
            f"{-length % ranks} of {length} samples are read twice, so that all {ranks} ranks have as many. "
            "To evaluate on each sample once: fabric.setup_dataloaders(loader, each_sample_once=True).",
        )
