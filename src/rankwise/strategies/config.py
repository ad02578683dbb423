"""`ProcessConfig` and `GroupConfig`: the arguments of a strategy, by their names, validated at once."""

from __future__ import annotations

import copy
import inspect
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, final

import torch
from torch.nn.parallel import DistributedDataParallel

from rankwise.checks import check_choice, check_is_a, check_keywords, check_name, check_overrides, check_value
from rankwise.compatibility.lightning_environments import GivenEnvironment, check_given_environment
from rankwise.compatibility.names import MISSING_HOOKS
from rankwise.environments.detect import find_environment
from rankwise.errors import ConfigurationError, InvalidTypeError, UnknownNameError, text_of
from rankwise.launchers import Launcher
from rankwise.precision import Precision
from rankwise.process_group import check_backend

Devices = int | str | list[int] | tuple[int, ...]
RegisteredNames = Mapping[str, tuple[str, Mapping[str, Any]]]
"""Names of a strategy class, each with its description and arguments of the constructor."""
T = TypeVar("T")

_ACCELERATORS = ("auto", "cpu", "cuda", "gpu")
_START_METHODS = ("popen", "spawn", "fork", "forkserver")
_RENDEZVOUS = ("auto", "private", "tcp")
_SHORTEST_S = 1e-6  # of a timedelta
_LONGEST_S = timedelta(days=365).total_seconds()
_CHECK_VARIABLE = "RANKWISE_CHECK_COLLECTIVES"
_CHECK_VALUES = {"": False, "0": False, "1": True}
_NOT_GIVEN = (None, "auto")
_DEVICES = 'a number of devices from 1 up, "auto" (or -1: all), or a list of different device indices'
_NODES = 'a number from 1 up, or "auto"'
# Strategy names that Lightning before 1.5 took as accelerators.
_NOT_ACCELERATORS = ("ddp", "ddp_spawn", "ddp_cpu", "ddp2", "dp", "horovod")
# Arguments of DistributedDataParallel that the strategy itself passes.
_PASSED_BY_STRATEGY = ("self", "module", "device_ids", "output_device", "dim", "process_group")


def check_accelerator(accelerator: object) -> str:
    """Return the name of an accelerator, in lower case."""
    if accelerator in _NOT_ACCELERATORS:
        raise UnknownNameError(
            kind="accelerator",
            name=str(accelerator),
            known=_ACCELERATORS,
            remedy='a strategy is meant: Trainer(strategy="ddp").',
        )
    return check_name("accelerator", accelerator, _ACCELERATORS)


def device_type(accelerator: object) -> str:
    """Return `"cpu"` or `"cuda"`, which must exist here."""
    name = check_accelerator(accelerator)
    if name == "cpu":
        return "cpu"  # counting devices may initialise CUDA
    if torch.cuda.device_count() == 0:
        if name == "auto":
            return "cpu"
        raise ConfigurationError(
            message=f"accelerator={accelerator!r} is not possible: torch sees no CUDA device.",
            facts=f"torch {torch.__version__}, torch.cuda.device_count() is 0.",
            remedy='use accelerator="cpu" or "auto".',
        )
    return "cuda"


def check_devices(devices: Devices) -> int | tuple[int, ...] | None:
    """Return a number of devices, their indices, or None for all that are available."""
    given: Any = _parse_devices(devices) if isinstance(devices, str) else devices
    check_value("devices", given, not isinstance(given, bytes), _DEVICES, error=InvalidTypeError)
    check_is_a("devices", given, (int, Sequence), _DEVICES)
    if isinstance(given, int):
        check_value("devices", given, given >= 1 or given == -1, _DEVICES)
        return None if given == -1 else given
    indices = tuple(index for index in given if isinstance(index, int) and not isinstance(index, bool))
    are_integers = len(indices) == len(given) > 0
    are_valid = are_integers and min(indices) >= 0 and len(set(indices)) == len(indices)
    check_value("devices", list(given), are_valid, _DEVICES)
    return indices


def _parse_devices(text: str) -> int | list[int]:
    if text == "auto":
        return -1
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        numbers = []
    check_value("devices", text, numbers, _DEVICES)
    return numbers if "," in text else numbers[0]


def check_num_nodes(num_nodes: int | Literal["auto"]) -> int | None:
    """Return the number of nodes, or None for as many as the environment has."""
    if num_nodes == "auto":
        return None
    check_is_a("num_nodes", num_nodes, int, _NODES)
    check_value("num_nodes", num_nodes, num_nodes >= 1, _NODES)
    return num_nodes


def _check_start_method(name: str, value: object) -> str:
    start_method = check_name(name, value, _START_METHODS)
    if start_method in ("fork", "forkserver") and sys.platform == "win32":
        raise ConfigurationError(
            message=f"start_method={start_method!r} does not exist on Windows.",
            remedy='use strategy="ddp" or "ddp_spawn".',
        )
    return start_method


def _check_command(name: str, value: object) -> tuple[str, ...]:
    words = tuple(value) if isinstance(value, (list, tuple)) else ()
    are_strings = words and all(isinstance(word, str) for word in words)
    remedy = 'command=[sys.executable, "train.py"]'
    check_value(name, value, are_strings, "a list of strings", remedy, InvalidTypeError)
    return words


def _check_timeout(name: str, value: Any) -> timedelta:
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    expected = "a number of seconds or a datetime.timedelta"
    check_is_a(name, seconds, (int, float), expected, f"{name}=timedelta(seconds=...)")
    expected = f"a duration from 0 to {timedelta(seconds=_LONGEST_S)}"
    check_value(name, value, _SHORTEST_S <= seconds <= _LONGEST_S, expected)  # not so for NaN
    return timedelta(seconds=seconds)


def _check_grace_period(name: str, value: Any) -> float:
    check_is_a(name, value, (int, float), "a number of seconds")
    check_value(name, value, 0 <= value <= _LONGEST_S, f"0 to {_LONGEST_S:g} seconds")
    return float(value)


def _check_collectives(name: str, value: Any) -> bool:
    if value is None:
        value = os.environ.get(_CHECK_VARIABLE, "")
        check_choice(_CHECK_VARIABLE, value, _CHECK_VALUES, "1 or 0")
        return _CHECK_VALUES[value]
    check_is_a(name, value, bool, "True, False or None")
    return bool(value)


def _check_backend(_: str, value: object) -> str:
    return check_backend(value)


def _check_fields(config: Any) -> None:
    """Replace each field by what the check in its metadata returns; a default of None stays."""
    for each in fields(config):
        value = getattr(config, each.name)
        if "check" in each.metadata and (value is not None or each.default is not None):
            checked = each.metadata["check"](each.name, value)
            object.__setattr__(config, each.name, checked)  # the dataclass is frozen


@final
@dataclass(frozen=True)
class ProcessConfig:
    """Which processes a job has, how they are started and how they are stopped.

    After `time_limit` a job is a failure; its processes are then killed, with their stacks.
    """

    accelerator: str = "auto"
    devices: Devices = "auto"
    num_nodes: int | Literal["auto"] = "auto"
    cluster_environment: GivenEnvironment | None = None
    start_method: str = field(default="popen", metadata={"check": _check_start_method})
    rendezvous: str = field(default="auto", metadata={"check": partial(check_name, names=_RENDEZVOUS)})
    grace_period_s: float = field(default=1.0, metadata={"check": _check_grace_period})
    stall_warning: timedelta = field(default=timedelta(minutes=1), metadata={"check": _check_timeout})
    command: Sequence[str] | None = field(default=None, metadata={"check": _check_command})
    launcher: Launcher | None = None
    time_limit: timedelta | None = field(default=None, metadata={"check": _check_timeout})

    def __post_init__(self) -> None:
        check_accelerator(self.accelerator)
        check_devices(self.devices)
        check_num_nodes(self.num_nodes)
        given = self.cluster_environment
        if isinstance(given, str):
            find_environment(given)
        elif given is not None:
            expected = "a ClusterEnvironment instance or a name"
            check_is_a("cluster_environment", given, GivenEnvironment, expected)
            check_given_environment(given)
        _check_fields(self)
        self._check_launcher()

    def _check_launcher(self) -> None:
        if self.launcher is None:
            return
        check_is_a("launcher", self.launcher, Launcher)
        check_overrides(self.launcher, MISSING_HOOKS["launcher"])
        if self.start_method != "popen" or self.command is not None:
            raise ConfigurationError(
                message="launcher= starts the processes, so there is no other way to start them.",
                facts=f"launcher={self.launcher!r}, start_method={self.start_method!r}, "
                f"command={self.command!r}.",
                remedy="DDPStrategy(launcher=...), without start_method and command.",
            )

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the launcher: it belongs to the launching process."""
        return {**self.__dict__, "launcher": None}

    def __deepcopy__(self, memo: object) -> ProcessConfig:
        return self  # it cannot change


@final
@dataclass(frozen=True)
class GroupConfig:
    """How the ranks communicate; by default with the device's own back end."""

    process_group_backend: str | None = field(default=None, metadata={"check": _check_backend})
    timeout: timedelta = field(default=timedelta(minutes=10), metadata={"check": _check_timeout})
    init_timeout: timedelta = field(default=timedelta(minutes=2), metadata={"check": _check_timeout})
    check_collectives: bool = field(default=False, metadata={"check": _check_collectives})
    sync_batchnorm: bool = False

    def __post_init__(self) -> None:
        _check_fields(self)


def ddp_names(name: str, description: str, **arguments: Any) -> RegisteredNames:
    """Return a name, and the two that also set `find_unused_parameters`."""
    names: dict[str, tuple[str, Mapping[str, Any]]] = {name: (description, arguments)}
    for value in (True, False):
        more = {**arguments, "find_unused_parameters": value}
        alias = f"{name}_find_unused_parameters_{str(value).lower()}"
        names[alias] = (f"{description}; find_unused_parameters={value}", more)
    return names


def take_fields(config: type, arguments: dict[str, Any]) -> dict[str, Any]:
    """Remove the arguments that are fields of a config, and return them."""
    return {each.name: arguments.pop(each.name) for each in fields(config) if each.name in arguments}


@final
class PartField(property, Generic[T]):
    """An attribute of a strategy that is one of its part `part`; it can be set if that is a config."""

    def __init__(self, part: str) -> None:
        self._part = part

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name
        path = f"{self._part}.{name}"
        self.read = attrgetter(path)  # raises an error that says what is missing
        # As a property of a function in C, it is read without a call in Python.
        super().__init__(attrgetter(path.replace("placement.", "_placement.", 1)), self._set)

    if TYPE_CHECKING:

        def __get__(self, strategy: Any, owner: type | None = None) -> T: ...  # type: ignore[override]

    def _set(self, strategy: Any, value: T) -> None:
        if not self._part.endswith("_config"):
            given = f"({self._name}={value!r})"
            is_argument = self._name in {each.name for each in fields(ProcessConfig)}
            remedy = f" Write {type(strategy).__name__}{given}, or bind{given}." if is_argument else ""
            raise AttributeError(f"{self._name!r} cannot be set: it is {self._part}.{self._name}.{remedy}")
        setattr(strategy, self._part, replace(getattr(strategy, self._part), **{self._name: value}))


def agreed_value(argument: str, own: Any, given: Any) -> Any:
    """Return the value of an argument that was given in two places; raise if they contradict each other.

    Instances agree if they have one class and one `repr`, and with their name.
    """
    if own in _NOT_GIVEN or given in _NOT_GIVEN:
        return given if own in _NOT_GIVEN else own
    (own_kind, own_details), (given_kind, given_details) = _meaning(argument, own), _meaning(argument, given)
    if own_kind != given_kind or (own_details and given_details and own_details != given_details):
        raise ConfigurationError(
            message=f"{argument}={given!r} and the strategy's own {argument}={own!r} contradict each other.",
            remedy=f"give {argument} once.",
        )
    return given if given_details else own


def _meaning(argument: str, value: Any) -> tuple[Any, Any]:
    """Return the part of a value that must equal the other value's, and its further details, if any."""
    if argument == "devices":
        devices = check_devices(value)
        return (len(devices), devices) if isinstance(devices, tuple) else (devices, None)
    if isinstance(value, (int, str)):
        name = str(value).lower()
        return ("cuda" if name == "gpu" else name), None
    name = getattr(value, "name", type(value).__name__)
    return name.lower(), (type(value), repr(value))


def from_parallel_devices(given: Sequence[torch.device]) -> tuple[str, int | list[int]]:
    """Return the accelerator and the devices of a list of devices."""
    devices = given if isinstance(given, (list, tuple)) else ()
    kinds = {device.type if isinstance(device, torch.device) else "" for device in devices}
    are_alike = len(kinds) == 1 and "" not in kinds
    expected = "a list of torch.device of one type"
    check_value("parallel_devices", given, are_alike, expected, error=InvalidTypeError)
    if kinds == {"cpu"}:
        return "cpu", len(given)
    return kinds.pop(), [device.index or 0 for device in given]


def check_parts(strategy: object, parts: Mapping[str, type]) -> None:
    """Check the classes and methods of a strategy and its `parts`: names of attributes, with base classes."""
    check_overrides(strategy, MISSING_HOOKS["strategy"])
    for name, base in parts.items():
        part = getattr(strategy, name)
        check_is_a(name, part, base)
        check_overrides(part, MISSING_HOOKS[name])


def copied_precision(precision: Precision, *, is_used: bool) -> Precision:
    """Return a precision plug-in for another strategy, in its initial state; one in use is never shared."""
    try:
        copied = copy.deepcopy(precision)
    except Exception as error:
        if not is_used:
            return precision
        raise ConfigurationError(
            message=f"The precision plug-in {precision!r} cannot be copied, and a bound strategy uses it.",
            facts=f"{type(error).__name__}: {text_of(error)}.",
            remedy="give the other trainer one of its own: Trainer(plugins=[...]).",
        ) from error
    if is_used:
        copied.load_state_dict({})  # drops loss scale and master weights of earlier jobs
    return copied


def refuse_keywords(strategy: type, left: Iterable[str], more: Iterable[str] = ()) -> None:
    """Raise for keywords that no constructor of a strategy class has used; suggest its own, and `more`."""
    constructors = [vars(base)["__init__"] for base in strategy.__mro__[:-1] if "__init__" in vars(base)]
    specs = map(inspect.getfullargspec, constructors)
    known = [*more, *(name for spec in specs for name in (*spec.args[1:], *spec.kwonlyargs))]
    known += [each.name for config in (ProcessConfig, GroupConfig) for each in fields(config)]
    unknown = set(left)
    check_keywords(strategy.__name__, unknown, [name for name in known if name not in unknown])


def check_ddp_arguments(strategy: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords for `DistributedDataParallel`, as this version of torch takes them."""
    parameters = inspect.signature(DistributedDataParallel.__init__).parameters
    taken = parameters.keys() - _PASSED_BY_STRATEGY
    refuse_keywords(strategy, given.keys() - taken, taken)
    return {"find_unused_parameters": False, **given}
