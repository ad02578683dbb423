"""A fit's optimizers and schedulers: those that `configure_optimizers` returns, and their states."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    LambdaLR,
    LRScheduler,
    MultiplicativeLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from rankwise.checks import check_choice, check_keywords, check_minimum, check_value
from rankwise.errors import ConfigurationError, InvalidTypeError
from rankwise.gradient_sync.parameters import ParametersOf, parameters_of
from rankwise.precision import configured_optimizers
from rankwise.ranks import warn
from rankwise.trainer.module import is_defined

if TYPE_CHECKING:
    from rankwise.precision import Precision
    from rankwise.seed import RandomStreams
    from rankwise.strategies import Strategy
    from rankwise.trainer.module import TrainingModule

_GROUPS = "parameter_names"  # beside the keys of torch's state dictionary
_Groups = list[list[Any]]
"""For each group the names of its parameters; a parameter that is not in the module is there itself."""

_METHOD = "configure_optimizers()"
_NOTHING = nullcontext()
_WITH_FUNCTIONS = (ChainedScheduler, LambdaLR, MultiplicativeLR, SequentialLR)  # of the user's
_KEYS = ("optimizer", "lr_scheduler", "monitor")
_REMEDIES = {"frequency": "leave it out: automatic optimisation has one optimizer, which steps each time."}


@final
@dataclass
class SchedulerConfig:
    """A learning rate scheduler and when it steps in automatic optimisation, which is as in Lightning.

    The fields are the keys of the dictionaries that users give.

    Attributes:
        interval: `"epoch"` or `"step"`.
        frequency: it steps after every epoch whose number, counted from 1, is a multiple of this; or after
            every optimizer step at which the number of batches of the epoch so far is a multiple.
        monitor: the metric that `ReduceLROnPlateau` monitors.
        strict: whether it is an error if that metric was not logged.
        reduce_on_plateau: whether a scheduler of your own gets the metric, too.
    """

    scheduler: Any
    interval: str = "epoch"
    frequency: int = 1
    monitor: str | None = None
    name: str | None = None
    strict: bool = True
    reduce_on_plateau: bool = False

    def __post_init__(self) -> None:
        check_choice("interval", self.interval, ("epoch", "step"))
        check_minimum("frequency", self.frequency, 1)

    @property
    def needs_metric(self) -> bool:
        """Whether its `step` takes the monitored metric."""
        return self.reduce_on_plateau or isinstance(self.scheduler, ReduceLROnPlateau)


def configure(module: TrainingModule) -> tuple[list[Optimizer], list[SchedulerConfig]]:
    """Call `configure_optimizers`; check and return its optimizers and schedulers."""
    optimizers, schedulers = _split(module.configure_optimizers())
    for optimizer in optimizers:
        expected = "an optimizer, [optimizer], ([optimizer], [scheduler]) or a dictionary"
        is_one = isinstance(optimizer, Optimizer)
        check_value(_METHOD, optimizer, is_one, expected, error=InvalidTypeError)
    if len(optimizers) > 1 and module.automatic_optimization:
        raise ConfigurationError(
            message=f"{_METHOD} returned {len(optimizers)} optimizers.",
            facts="automatic optimisation steps exactly one.",
            remedy="give one optimizer several parameter groups, or step by hand: "
            "self.automatic_optimization = False, and self.optimizers() in training_step.",
        )
    configs = [_scheduler_config(scheduler, module) for scheduler in schedulers]
    for config in configs:
        changed = getattr(config.scheduler, "optimizer", None)
        if isinstance(changed, Optimizer) and changed not in optimizers:
            raise ConfigurationError(
                message=f"{_METHOD} returned a {type(config.scheduler).__name__} of another optimizer.",
                facts=f"it changes a {type(changed).__name__} that was not returned.",
                remedy="return the optimizer that was given to the scheduler.",
            )
    return optimizers, configs


def _warn_of_none(module: TrainingModule) -> None:
    """Warn, as Lightning does, that nothing trains the module; by hand it may have optimizers of its own."""
    if module.automatic_optimization and any(each.requires_grad for each in module.parameters()):
        warn(f"{type(module).__name__}.configure_optimizers() returned no optimizer: nothing is trained.")


def _split(returned: Any) -> tuple[list[Any], list[Any]]:
    match returned:
        case None:
            return [], []
        case Mapping():
            check_keywords(f"the dictionary of {_METHOD}", returned, _KEYS, _REMEDIES)
            scheduler = returned.get("lr_scheduler")
            if "monitor" in returned and not isinstance(scheduler, Mapping):
                scheduler = {"scheduler": scheduler, "monitor": returned["monitor"]}
            return [returned.get("optimizer")], [] if scheduler is None else [scheduler]
        case [[*optimizers], [*schedulers]]:
            return optimizers, schedulers
        case [[*optimizers], Mapping() as scheduler]:
            return optimizers, [scheduler]
        case [Mapping(), *_]:  # a dictionary for each optimizer
            optimizers, schedulers = zip(*map(_split, returned), strict=True)
            return list(chain(*optimizers)), list(chain(*schedulers))
        case [*optimizers]:
            return optimizers, []
        case _:
            return [returned], []


def _scheduler_config(given: Any, module: TrainingModule) -> SchedulerConfig:
    is_automatic = module.automatic_optimization
    options = given if isinstance(given, Mapping) else {"scheduler": given}
    keys = (each.name for each in fields(SchedulerConfig))
    check_keywords(f"lr_scheduler in {_METHOD}", options, keys, _REMEDIES)
    config = SchedulerConfig(**{"scheduler": None, **options})
    _check_scheduler(config.scheduler, module)
    if is_automatic and config.needs_metric and config.monitor is None:
        raise ConfigurationError(
            message=f"{type(config.scheduler).__name__} needs a metric to monitor.",
            remedy='return {"optimizer": ..., "lr_scheduler": scheduler, "monitor": "val_loss"}.',
        )
    if not is_automatic and (ignored := [key for key in ("interval", "frequency") if key in options]):
        raise ConfigurationError(
            message=f"{ignored[0]!r} of a scheduler has no effect in manual optimisation.",
            facts=f"{_METHOD} returned {ignored[0]}={options[ignored[0]]!r}.",
            remedy="leave it out, and call self.lr_schedulers().step() where it is due.",
        )
    return config


def _check_scheduler(scheduler: Any, module: TrainingModule) -> None:
    """Raise unless it is one of torch's, or keeps a state and the module steps it."""
    if isinstance(scheduler, (LRScheduler, ReduceLROnPlateau)):
        return
    is_stepped = not module.automatic_optimization or is_defined(module, "lr_scheduler_step")
    has_state = all(callable(getattr(scheduler, name, None)) for name in ("state_dict", "load_state_dict"))
    check_value(
        f"lr_scheduler in {_METHOD}",
        scheduler,
        is_stepped and has_state,
        "a torch LRScheduler; or an object with state_dict() and load_state_dict(), in a module that defines "
        "lr_scheduler_step(scheduler, metric)",
        error=InvalidTypeError,
    )


@final
@dataclass
class OptimizerSet:
    """A fit's optimizers and schedulers, and their states where they do not exist in this process.

    Pickling keeps the states only: optimizers are created again from the module's parameters.
    """

    optimizers: list[Optimizer] = field(default_factory=list)
    schedulers: list[SchedulerConfig] = field(default_factory=list)
    _pending: tuple[list[Any], list[Any]] | None = None
    _module: TrainingModule | None = None  # the module that they optimize
    _strategy: Strategy | None = None
    _gradients: dict[str, Tensor] | None = None  # of a manual fit before, where pickling has lost them

    @property
    def created(self) -> OptimizerSet:
        """This set, with the optimizers created from states that other processes have sent."""
        self._create_pending()
        return self

    def _create_pending(self) -> None:
        pending, module, strategy = self._pending, self._module, self._strategy
        if pending is not None and module is not None and strategy is not None:
            try:
                self.create(module, strategy)
            except ConfigurationError:  # a parameter exists in the other process only: the next fit will say
                self.keep_states(*pending)

    def create(self, module: TrainingModule, strategy: Strategy) -> None:
        """Create the module's optimizers and schedulers, or keep the ones of the fit that continues.

        Their state is the state after the last fit, on the parameters' current device. Collective if they are
        sharded: rank 0 has that state.
        """
        states = self._pending or self.states()
        self._module, self._strategy = module, strategy
        if not self.optimizers:
            self.optimizers, self.schedulers = configure(module)
            if strategy.is_global_zero and not self.optimizers:
                _warn_of_none(module)
            if self._is_sharded(strategy):
                states = strategy.broadcast(states)
        for optimizer, state in zip(self.optimizers, states[0] if states else (), strict=False):
            self._restore_groups(optimizer, state)
        self._configure(strategy.precision, module)
        if states is not None:
            self.load(*states)
        self._pending = None
        if self._gradients is not None:
            self.set_gradients(module, self._gradients)
            self._gradients = None

    def named_parameters(self, module: TrainingModule) -> dict[str, Tensor]:
        """Return the module's parameters, and parameters that only optimizers have, such as 32-bit copies."""
        named: dict[str, Tensor] = dict(module.named_parameters())
        inside = {id(parameter) for parameter in named.values()}
        return named | {
            f"{place} of optimizer {number}": parameter
            for number, optimizer in enumerate(self.optimizers)
            for place, parameter in enumerate(parameters_of(optimizer))
            if id(parameter) not in inside
        }

    def gradients(self, module: TrainingModule) -> dict[str, Tensor]:
        """Return the gradients that manual optimisation has left on `named_parameters`."""
        named = {} if module.automatic_optimization else self.named_parameters(module)
        return {name: each.grad.detach() for name, each in named.items() if each.grad is not None}

    def set_gradients(self, module: TrainingModule, gradients: dict[str, Tensor]) -> None:
        """Give `named_parameters` these gradients, and the others none."""
        for name, parameter in self.named_parameters(module).items():
            gradient = gradients.get(name)
            parameter.grad = None if gradient is None else gradient.to(parameter.device)

    def _configure(self, precision: Precision, module: TrainingModule) -> None:
        """Use the optimizers that `Precision.configure` has returned, if it has."""
        self.optimizers = configured_optimizers(precision, module, self.optimizers)
        changed = [getattr(config.scheduler, "optimizer", None) for config in self.schedulers]
        if any(optimizer is not None and optimizer not in self.optimizers for optimizer in changed):
            raise ConfigurationError(
                message="Precision.configure() replaced an optimizer that a learning rate scheduler changes.",
                remedy="change the optimizer in place, or return the same one.",
            )

    def states(self, strategy: Strategy | None = None) -> tuple[list[Any], list[Any]] | None:
        """Return the states of optimizers and schedulers; if no optimizer exists here, the kept ones or None.

        Without `strategy`, a sharded optimizer's state is this rank's part. With it, this is Collective.
        """
        if not self.optimizers:
            return self._pending
        optimizers = [
            optimizer.state_dict() if strategy is None else strategy.get_optimizer_state(optimizer)
            for optimizer in self.optimizers
        ]
        if self._module is not None and self._strategy is not None:
            parameters_of = self._strategy.precision.model_parameters
            for optimizer, state in zip(self.optimizers, optimizers, strict=True):
                state[_GROUPS] = _groups_of(optimizer, self._module, parameters_of)
        return optimizers, [config.scheduler.state_dict() for config in self.schedulers]

    def release_sharded(self, strategy: Strategy) -> None:
        """Replace sharded optimizers, whose process group is about to end, by their states. Collective."""
        if self._is_sharded(strategy) and (states := self.states(strategy)) is not None:
            self.keep_states(*states)

    def _is_sharded(self, strategy: Strategy) -> bool:
        return any(strategy.is_sharded(optimizer) for optimizer in self.optimizers)

    def keep_states(self, optimizers: list[Any], schedulers: list[Any]) -> None:
        """Keep the states of optimizers that cannot exist in this process."""
        self.forget()
        self._pending = optimizers, schedulers

    def take_states(
        self, module: TrainingModule, strategy: Strategy, optimizers: list[Any], schedulers: list[Any]
    ) -> None:
        """Load states from other processes; optimizers that do not exist are created at their first use."""
        self._pending, self._module, self._strategy = (optimizers, schedulers), module, strategy
        if self.optimizers:
            self._create_pending()

    def forget(self) -> None:
        """Drop optimizers, schedulers and states: the next fit creates new ones."""
        self.optimizers, self.schedulers, self._pending, self._strategy = [], [], None, None

    def load(self, optimizers: list[Any], schedulers: list[Any]) -> None:
        """Load the states into the optimizers and schedulers; a ValueError says that they do not fit.

        Parameters and groups that were added to an optimizer after its creation are added here, too.
        """
        for optimizer, state in zip(self.optimizers, optimizers, strict=True):
            has_changed = self._restore_groups(optimizer, state)
            if has_changed and self._module is not None and self._strategy is not None:
                self._strategy.precision.configure(self._module, self.optimizers)
            optimizer.load_state_dict({key: value for key, value in state.items() if key != _GROUPS})
        for config, state in zip(self.schedulers, schedulers, strict=True):
            config.scheduler.load_state_dict(state)

    def _restore_groups(self, optimizer: Optimizer, state: dict[str, Any]) -> bool:
        module, strategy = self._module, self._strategy
        if _GROUPS not in state or module is None or strategy is None:
            return False
        return _restore_groups(optimizer, state[_GROUPS], module, strategy.precision.model_parameters)

    def __getstate__(self) -> dict[str, Any]:
        gradients = None if self._module is None else self.gradients(self._module)
        return {"optimizers": [], "schedulers": [], "_pending": self.states(), "_gradients": gradients}


# ------------------------------------------------------------------ steps


def optimizer_step_of(strategy: Strategy, random: RandomStreams) -> Callable[..., Any]:
    """Return the strategy's `optimizer_step`, in which all ranks draw the same random numbers."""
    if strategy.world_size == 1:
        return strategy.optimizer_step

    def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        with shared_numbers(random, optimizer, "optimizer_step"):
            return strategy.optimizer_step(optimizer, closure, **options)

    return step


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether an optimizer cannot step without a closure."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def shared_numbers(random: RandomStreams, stepped: object, name: str) -> AbstractContextManager[None]:
    """Return the block of a step of an optimizer or scheduler; torch's own draw no random numbers."""
    is_torch_own = type(stepped).__module__.startswith("torch.optim.")
    before, after = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
    has_hooks = getattr(stepped, before, None) or getattr(stepped, after, None)
    draws_nothing = is_torch_own and not has_hooks and not isinstance(stepped, _WITH_FUNCTIONS)
    return _NOTHING if draws_nothing else random.shared(name)


# ------------------------------------------------------------------ the parameters of each group


def _groups_of(optimizer: Optimizer, module: nn.Module, parameters_of: ParametersOf) -> _Groups:
    """Return the parameters of each group of an optimizer."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    updated = iter(parameters_of(optimizer))
    return [
        [names.get(id(each), each.detach()) for each in islice(updated, len(group["params"]))]
        for group in optimizer.param_groups
    ]


def _restore_groups(
    optimizer: Optimizer, saved: _Groups, module: nn.Module, model_parameters: ParametersOf
) -> bool:
    """Give an optimizer the groups that were saved, if they have more parameters; return whether they do.

    Parameters that are not in the module get their values. Raise ConfigurationError for one that was added
    after the optimizer's creation: nothing tells which parameter it was. Other groups do not change.
    """
    own, wanted = _keyed(_groups_of(optimizer, module, model_parameters)), _keyed(saved)
    mains = dict(zip((key for key, _ in chain(*own)), parameters_of(optimizer), strict=True))
    named = dict(module.named_parameters())
    wanted_keys = {key for key, _ in chain(*wanted)}
    is_known = all(key in named for key in wanted_keys if isinstance(key, str))
    if not mains.keys() <= wanted_keys or not is_known:
        return False
    for number, entries in enumerate(wanted):
        parameters = []
        for key, entry in entries:
            main = mains.get(key)
            if isinstance(entry, Tensor):
                if main is None:
                    raise _unknown_error(optimizer, entry)
                with torch.no_grad():
                    main.copy_(entry)
            parameters.append(named[key] if main is None else main)
        if number < len(own):
            optimizer.param_groups[number]["params"] = parameters
        else:
            optimizer.add_param_group({"params": parameters})
    return mains.keys() != wanted_keys


def _unknown_error(optimizer: Optimizer, parameter: Tensor) -> ConfigurationError:
    return ConfigurationError(
        message=f"Training cannot continue: a hook gave {type(optimizer).__name__} a parameter that is in no "
        "module.",
        facts=f"its shape is {tuple(parameter.shape)}; nothing tells which parameter of the program it was.",
        remedy="self.name = nn.Parameter(...) in the module, or give it to the optimizer in "
        "configure_optimizers().",
    )


def _keyed(groups: _Groups) -> list[list[tuple[Any, Any]]]:
    """Return the entries of each group, each with a key: its name, or its group's number and its position."""
    return [
        [
            (entry if isinstance(entry, str) else (number, position), entry)
            for position, entry in enumerate(group)
        ]
        for number, group in enumerate(groups)
    ]
