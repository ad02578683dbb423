"""The exceptions of rankwise, as a tree; each takes fields, keeps them, and builds its own text.

RankwiseError
|-- ConfigurationError (ValueError)         what a user gave cannot work; raised before any process starts
|   |-- UnknownNameError                    a name that is none of ours: strategy, hook, environment, ...
|   |   `-- UnknownStrategyError (KeyError)
|   |-- InvalidArgumentError                an argument with a wrong value
|   |-- UnknownArgumentError (TypeError)    a keyword that nobody takes
|   |-- DuplicateNameError                  a name registered twice
|   |-- WorldSizeMismatchError              devices x num_nodes is not the world that exists
|   |-- EnvironmentVariableError            a launcher's variables are missing or contradict each other
|   |-- NotPicklableError (TypeError)       something that cannot travel to another process
|   |-- LaunchRefusedError (RuntimeError)   this start method cannot work here
|   |-- MissingExtraError (ImportError)     an optional package is not installed
|   `-- UnshardableLoaderError              a data loader that cannot be split over ranks
|-- InvalidTypeError (TypeError)            an argument of a wrong kind
|-- LifecycleError (RuntimeError)           calls out of order
|-- WorkerError (RuntimeError)              a worker failed; names the first failing rank
|   |-- WorkerRaisedError                   ... by an exception; carries its traceback
|   |   `-- WorkerTimedOutError             ... as it waited too long for other ranks; says where these are
|   |-- WorkerExitedError                   ... by leaving before it had finished
|   `-- WorkerKilledError                   ... by a signal
|-- ProcessGroupError (RuntimeError)        the process group does not agree with the ranks
|-- TensorMismatchError (ValueError)        ranks gave tensors to a collective that do not go together
|-- CollectiveMismatchError (RuntimeError)  ranks are in different collectives, or some do not come
|-- RankZeroFailedError (RuntimeError)      the rank that went first failed, while this one waited for it
|-- NodesLostError (ConnectionError)        ranks on other nodes do not answer any more
|-- RendezvousTimeoutError (TimeoutError)   the ranks did not meet in time
|-- StopAgreementError (TimeoutError)       a rank did not answer when to stop
|-- RankMismatchError (RuntimeError)        the ranks are about to train different things
|-- UnevenInputsError (RuntimeError)        ranks have different numbers of batches
|-- NonFiniteLossError (FloatingPointError) a loss or gradient is infinite or NaN
|-- UnusedParametersError (RuntimeError)    parameters had no part in the loss, though DDP counts on all
`-- CheckpointError (RuntimeError)          a checkpoint could not be written or read
"""

from __future__ import annotations

import dataclasses
import difflib
import pickle
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

__all__ = [
    "CheckpointError",
    "CollectiveMismatchError",
    "ConfigurationError",
    "DuplicateNameError",
    "EnvironmentVariableError",
    "InvalidArgumentError",
    "InvalidTypeError",
    "LaunchRefusedError",
    "LifecycleError",
    "MissingExtraError",
    "NonFiniteLossError",
    "NodesLostError",
    "NotPicklableError",
    "ProcessGroupError",
    "RankMismatchError",
    "RankZeroFailedError",
    "RankwiseError",
    "RendezvousTimeoutError",
    "StopAgreementError",
    "TensorMismatchError",
    "UnevenInputsError",
    "UnknownArgumentError",
    "UnknownNameError",
    "UnknownStrategyError",
    "UnshardableLoaderError",
    "UnusedParametersError",
    "WorkerError",
    "WorkerExitedError",
    "WorkerKilledError",
    "WorkerRaisedError",
    "WorkerTimedOutError",
    "WorldSizeMismatchError",
    "nearest",
    "signal_name",
]


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate that `name` most likely meant, or None if none is close."""
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    matches = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    return by_lower[matches[0]] if matches else None


def signal_name(number: int) -> str:
    """Return what a signal is called."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)


@dataclass(eq=False, repr=False)
class RankwiseError(Exception):
    """Base of every exception of rankwise: one sentence, then `Seen:` (facts) and `Fix:` (what to do)."""

    def summary(self) -> str:
        """Return the sentence that says what happened."""
        raise NotImplementedError

    def seen(self) -> str:
        """Return the facts, or an empty string."""
        return ""

    def fix(self) -> str:
        """Return what to do, or an empty string."""
        return ""

    def appendix(self) -> str:
        """Return what follows the text, such as a traceback, or an empty string."""
        return ""

    def __str__(self) -> str:
        lines = [self.summary()]
        if seen := self.seen():
            lines.append(f"  Seen: {seen}")
        if fix := self.fix():
            lines.append(f"  Fix: {fix}")
        if appendix := self.appendix():
            lines.append(appendix.rstrip())
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.summary()}>"

    def __reduce__(self) -> tuple[Any, ...]:
        values = {field.name: _portable(getattr(self, field.name)) for field in dataclasses.fields(self)}
        return _rebuild, (type(self), values)


def _portable(value: object) -> object:
    """Return the value, or where it cannot be pickled its repr: the text stays true on the other side."""
    try:
        pickle.dumps(value)
    except Exception:  # noqa: BLE001  pickling runs anybody's code
        return repr(value)
    return value


def _rebuild(cls: type[RankwiseError], values: dict[str, Any]) -> RankwiseError:
    return cls(**values)


# ---------------------------------------------------------------------------------------- configuration


@dataclass(eq=False, repr=False)
class ConfigurationError(RankwiseError, ValueError):
    """What the user gave cannot work: `message` says why, `facts` what was seen, `remedy` what to do."""

    message: str = ""
    facts: str = ""
    remedy: str = ""

    def summary(self) -> str:
        return self.message

    def seen(self) -> str:
        return self.facts

    def fix(self) -> str:
        return self.remedy


@dataclass(eq=False, repr=False)
class UnknownNameError(ConfigurationError):
    """A name that is none of the `known` ones; `kind` says of what."""

    kind: str = "name"
    name: str = ""
    known: tuple[str, ...] = ()

    def summary(self) -> str:
        suggestion = nearest(self.name, self.known)
        question = f" Did you mean {suggestion!r}?" if suggestion else ""
        return f"Unknown {self.kind} {self.name!r}.{question}"

    def seen(self) -> str:
        return f"known are {_listed(sorted(self.known))}."

    def fix(self) -> str:
        return self.remedy or "use one of the names above."


@dataclass(eq=False, repr=False)
class UnknownStrategyError(UnknownNameError, KeyError):
    """A strategy name that is not registered."""

    kind: str = "strategy"

    def seen(self) -> str:
        return f"registered names are {_listed(sorted(self.known))}."

    def fix(self) -> str:
        if self.remedy:
            return self.remedy
        suggestion = nearest(self.name, self.known) or "ddp"
        return (
            f'Trainer(strategy="{suggestion}"), or register your own with '
            f'StrategyRegistry.register("{self.name}", ...).'
        )


@dataclass(eq=False, repr=False)
class InvalidArgumentError(ConfigurationError):
    """An argument has a value that cannot work: `argument`, its `value`, and what was `expected`."""

    argument: str = ""
    value: object = None
    expected: str = ""

    def summary(self) -> str:
        return f"{self.argument}={self.value!r} is not possible: expected {self.expected}."


@dataclass(eq=False, repr=False)
class InvalidTypeError(RankwiseError, TypeError):
    """An argument is of the wrong kind: `argument`, its `value`, and what was `expected`."""

    argument: str
    value: object
    expected: str
    remedy: str = ""

    def summary(self) -> str:
        return (
            f"{self.argument}={self.value!r} is of type {type(self.value).__name__}: "
            f"expected {self.expected}."
        )

    def fix(self) -> str:
        return self.remedy


@dataclass(eq=False, repr=False)
class UnknownArgumentError(ConfigurationError, TypeError):
    """A keyword that `target` does not take; with a `remedy`, which is then known, nothing is suggested."""

    target: str = ""
    name: str = ""
    known: tuple[str, ...] = ()

    def summary(self) -> str:
        suggestion = None if self.remedy else nearest(self.name, self.known)
        question = f" Did you mean {suggestion!r}?" if suggestion else ""
        return f"{self.target} takes no argument {self.name!r}.{question}"

    def seen(self) -> str:
        return f"it takes {_listed(sorted(self.known))}."


@dataclass(eq=False, repr=False)
class DuplicateNameError(ConfigurationError):
    """A name that is registered already, in `registry`; `kind` says for what."""

    name: str = ""
    kind: str = "Strategy"
    registry: str = "StrategyRegistry"

    def summary(self) -> str:
        return f"{self.kind} {self.name!r} is registered already."

    def fix(self) -> str:
        return f'{self.registry}.register("{self.name}", ..., override=True), or choose another name.'


@dataclass(eq=False, repr=False)
class WorldSizeMismatchError(ConfigurationError):
    """The number of processes asked for is not the number that exists.

    `devices` and `num_nodes` are what was asked for, `world_size` is what `launched_by` started.
    """

    devices: int = 0
    num_nodes: int = 0
    launched_by: str = ""
    world_size: int = 0
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    detection: str = ""

    def summary(self) -> str:
        return (
            f"{self.devices * self.num_nodes} processes were asked for (devices={self.devices} x "
            f"num_nodes={self.num_nodes}), but {self.launched_by} started {self.world_size}."
        )

    def seen(self) -> str:
        shown = ", ".join(f"{name}={value}" for name, value in self.variables.items())
        return ". ".join(part for part in (shown, self.detection) if part)

    def fix(self) -> str:
        return (
            'set devices="auto" and num_nodes="auto" to take what was started, or start '
            f"{self.devices * self.num_nodes} processes, as with: torchrun --nnodes={self.num_nodes} "
            f"--nproc-per-node={self.devices} train.py"
        )


@dataclass(eq=False, repr=False)
class EnvironmentVariableError(ConfigurationError):
    """A cluster environment's variables are incomplete or contradict each other; `problem` says how."""

    environment: str = ""
    problem: str = ""
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def summary(self) -> str:
        return f"The variables of {self.environment} cannot be right: {self.problem}."

    def seen(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.variables.items())

    def fix(self) -> str:
        return self.remedy or (
            f"start the job with {self.environment} itself, unset these variables, or name the environment: "
            "RANKWISE_ENVIRONMENT=local."
        )


@dataclass(eq=False, repr=False)
class NotPicklableError(ConfigurationError, TypeError):
    """Something cannot travel to the workers (or back): `path` names it, `reason` is pickle's own."""

    path: str = ""
    reason: str = ""
    start_method: str = ""

    def summary(self) -> str:
        return (
            f"{self.path} cannot be pickled, which start_method={self.start_method!r} needs: {self.reason}."
        )

    def fix(self) -> str:
        return (
            "make it a function or class at the top level of a module, or use a start method that "
            'pickles nothing on the way in: strategy="ddp" or "ddp_fork".'
        )


@dataclass(eq=False, repr=False)
class LaunchRefusedError(ConfigurationError, RuntimeError):
    """The chosen start method cannot work where it was asked to."""


@dataclass(eq=False, repr=False)
class MissingExtraError(ConfigurationError, ImportError):
    """An optional package is needed: `package`, which comes with `extra`, for `purpose`."""

    package: str = ""
    extra: str = ""
    purpose: str = ""

    def summary(self) -> str:
        return f"{self.purpose} needs the package {self.package!r}, which is not installed."

    def fix(self) -> str:
        return f'pip install "rankwise[{self.extra}]"'


@dataclass(eq=False, repr=False)
class UnshardableLoaderError(ConfigurationError):
    """A data loader that cannot be split over the ranks; `reason` says why."""

    loader: str = ""
    reason: str = ""

    def summary(self) -> str:
        return f"{self.loader} cannot be split over the ranks: {self.reason}."


# ---------------------------------------------------------------------------------------- order of calls


@dataclass(eq=False, repr=False)
class LifecycleError(RankwiseError, RuntimeError):
    """A call came at the wrong moment: `call` needs `needed`, but the object is in `state`."""

    call: str
    state: str
    needed: str
    remedy: str = ""

    def summary(self) -> str:
        return f"{self.call} was called in state {self.state!r}, but it needs {self.needed}."

    def fix(self) -> str:
        return self.remedy


# ---------------------------------------------------------------------------------------- workers


@dataclass(eq=False, repr=False)
class WorkerError(RankwiseError, RuntimeError):
    """A worker failed: the first that did, where it ran, and what the supervisor saw of the others.

    `host` is the name of its node, and empty where that is not known. `elapsed_s` counts from the launch to
    the failure; `stopped` lists the global ranks that were then stopped, `consequences` what other ranks
    reported as a consequence, one line each, and `alike` those that failed with the very same traceback.
    """

    global_rank: int
    local_rank: int
    node_rank: int
    pid: int
    host: str = ""
    elapsed_s: float = 0.0
    stopped: tuple[int, ...] = ()
    consequences: tuple[str, ...] = ()
    alike: tuple[int, ...] = ()
    traceback_text: str = ""

    def what(self) -> str:
        """Return how the worker failed, as the end of a sentence."""
        raise NotImplementedError

    def summary(self) -> str:
        host = f"host {self.host!r}, " if self.host else ""
        return (
            f"Worker global_rank={self.global_rank} (local_rank={self.local_rank}, "
            f"node_rank={self.node_rank}, {host}pid {self.pid}) {self.what()}."
        )

    def seen(self) -> str:
        facts = f"{self.elapsed_s:.1f} s after launch"
        if self.stopped:
            ranks = ", ".join(str(rank) for rank in self.stopped)
            facts += f"; then stopped: global_rank {ranks}"
        if self.alike:
            facts += f"; the same on global_rank {', '.join(map(str, self.alike))}"
        return "".join([facts, ".", *(f"\n        consequence: {line}" for line in self.consequences)])

    def appendix(self) -> str:
        if not self.traceback_text:
            return ""
        return f"  --- traceback of global_rank={self.global_rank} ---\n{self.traceback_text}"


@dataclass(eq=False, repr=False)
class WorkerRaisedError(WorkerError):
    """A worker raised an exception; `exception_type` and `exception_message` are its own."""

    exception_type: str = ""
    exception_message: str = ""

    def what(self) -> str:
        first_line = self.exception_message.partition("\n")[0].rstrip(".")
        return (
            f"raised {self.exception_type}: {first_line}" if first_line else f"raised {self.exception_type}"
        )

    def fix(self) -> str:
        return f"start from the traceback of global_rank={self.global_rank} below."


@dataclass(eq=False, repr=False)
class WorkerTimedOutError(WorkerRaisedError):
    """A worker waited too long for others, in a collective or while they met.

    `missing` lists the global ranks that it waited for, `last_seen` what each of the others was doing.
    """

    missing: tuple[int, ...] = ()
    last_seen: tuple[str, ...] = ()

    def what(self) -> str:
        ranks = ", ".join(str(rank) for rank in self.missing)
        return f"waited too long for {f'global_rank={ranks}' if ranks else 'another rank'}: {super().what()}"

    def seen(self) -> str:
        return "".join([super().seen(), *(f"\n        {line}" for line in self.last_seen)])

    def fix(self) -> str:
        return (
            "see above what the other ranks were doing, and their stacks on stderr; raise timeout (to meet: "
            "init_timeout) if they only needed longer."
        )


@dataclass(eq=False, repr=False)
class WorkerExitedError(WorkerError):
    """A worker left before it had finished, with `exit_code`."""

    NOT_STARTED: ClassVar[str] = "before it had started (what it printed is above)"

    exit_code: int = 0
    phase: str = "before it had finished"

    def what(self) -> str:
        return f"exited with code {self.exit_code} {self.phase}"

    def fix(self) -> str:
        if self.phase == self.NOT_STARTED:
            return (
                "look above: it ended while it imported or ran the main module. What starts the training "
                'belongs under: if __name__ == "__main__":'
            )
        return "look for sys.exit() or os._exit() in what this rank runs; every rank must return."


@dataclass(eq=False, repr=False)
class WorkerKilledError(WorkerError):
    """A worker was ended by the signal `signal_number`, which rankwise did not send."""

    signal_number: int = 0

    def what(self) -> str:
        return f"was killed by {signal_name(self.signal_number)}"

    def fix(self) -> str:
        if self.signal_number == signal.SIGKILL:
            return (
                "often this is the kernel's out-of-memory killer: look at `dmesg`, use less memory per rank."
            )
        if self.signal_number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS):
            return "native code crashed: run with PYTHONFAULTHANDLER=1 to see where."
        return "find who sent the signal; rankwise did not."


# ---------------------------------------------------------------------------------------- the group


@dataclass(eq=False, repr=False)
class ProcessGroupError(RankwiseError, RuntimeError):
    """The process group that exists does not fit the ranks; `problem` says how."""

    problem: str
    remedy: str = ""

    def summary(self) -> str:
        return self.problem

    def fix(self) -> str:
        return self.remedy


@dataclass(eq=False, repr=False)
class TensorMismatchError(RankwiseError, ValueError):
    """The tensors that the ranks gave to `call` do not go together; `found` has each rank's."""

    call: str
    found: tuple[str, ...]

    def summary(self) -> str:
        return f"The ranks gave tensors to {self.call} that do not go together."

    def seen(self) -> str:
        return "; ".join(f"rank {rank} of the group: {what}" for rank, what in enumerate(self.found))

    def fix(self) -> str:
        return (
            "give a dense tensor of the same dtype and number of dimensions on every rank; sizes may differ."
        )


@dataclass(eq=False, repr=False)
class CollectiveMismatchError(RankwiseError, RuntimeError):
    """Ranks of `group` called different things as its collective number `number`, or some did not come.

    `calls` maps what was called, and where, to global ranks; `missing` does so with the last calls of those
    that did not come in `timeout_s` seconds.
    """

    group: str
    number: int
    calls: Mapping[str, tuple[int, ...]]
    missing: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    timeout_s: float = 0.0

    def summary(self) -> str:
        which = f"collective number {self.number} of {self.group}"
        if self.missing:
            late = ", ".join(str(rank) for rank in sorted(sum(self.missing.values(), ())))
            return f"Waited {self.timeout_s:g} s for global_rank {late} in {which}."
        return f"The ranks called different things as {which}."

    def seen(self) -> str:
        return "\n        ".join(
            [
                *(f"{_ranks(who)}: {call}" for call, who in self.calls.items()),
                *(f"{_ranks(who)} did not come; last seen: {call}" for call, who in self.missing.items()),
            ]
        )

    def fix(self) -> str:
        return (
            "every rank must call the same collectives, in the same order; look for what depends on the "
            "rank: a branch, an early return, a loop that ends earlier, a caught exception."
        )


def _ranks(who: tuple[int, ...]) -> str:
    return f"global_rank {', '.join(map(str, who))}"


@dataclass(eq=False, repr=False)
class RankZeroFailedError(RankwiseError, RuntimeError):
    """What `global_rank` did in `rank_zero_first()` failed; `failure` is its exception."""

    global_rank: int
    failure: str

    def summary(self) -> str:
        return f"The block of rank_zero_first() failed on global_rank {self.global_rank}: {self.failure}."

    def fix(self) -> str:
        return f"start from the traceback of global_rank {self.global_rank}."


@dataclass(eq=False, repr=False)
class NodesLostError(RankwiseError, ConnectionError):
    """Ranks on other nodes do not answer any more: `lost` names them; `symptom` is what was seen here."""

    lost: tuple[str, ...]
    symptom: str = ""

    def summary(self) -> str:
        return f"Lost {'; '.join(self.lost)}: no answer through the job's store."

    def seen(self) -> str:
        return self.symptom.partition("\n")[0]

    def fix(self) -> str:
        return "look at those nodes and at the network between them: a killed or stopped process, a cut link."


@dataclass(eq=False, repr=False)
class RendezvousTimeoutError(RankwiseError, TimeoutError):
    """The ranks did not meet in `timeout_s` seconds."""

    waiting_for: str
    timeout_s: float

    def summary(self) -> str:
        return f"Waited {self.timeout_s:g} s for {self.waiting_for}."

    def fix(self) -> str:
        return "look for a rank that is still starting or is stuck, or raise init_timeout."


@dataclass(eq=False, repr=False)
class StopAgreementError(RankwiseError, TimeoutError):
    """All were to stop, but the ranks `missing` did not say in `timeout_s` seconds which step they are in."""

    missing: tuple[int, ...]
    timeout_s: float

    def summary(self) -> str:
        ranks = ", ".join(str(rank) for rank in self.missing)
        return f"Training was to stop, but global_rank {ranks} did not say when, in {self.timeout_s:g} s."

    def fix(self) -> str:
        return "look for what these ranks were doing: they are stuck, or never began to train."


@dataclass(eq=False, repr=False)
class RankMismatchError(RankwiseError, RuntimeError):
    """The ranks differ; `differences` maps the name of what does to its values, and these to global ranks."""

    differences: Mapping[str, Mapping[str, tuple[int, ...]]]

    def summary(self) -> str:
        count = len(self.differences)
        return f"The ranks are not the same in {count} {'thing' if count == 1 else 'things'}."

    def seen(self) -> str:
        shown = list(self.differences.items())[:_MOST_DIFFERENCES]
        lines = [f"{name}: {_by_rank(values)}" for name, values in shown]
        if len(self.differences) > len(shown):
            lines.append(f"... and {len(self.differences) - len(shown)} more")
        return "\n        ".join(lines)

    def fix(self) -> str:
        fix = "build and do the same on every rank; look for what depends on the rank or the host."
        if "the seed" in self.differences:
            fix += " One seed for all, seed_everything(1): each rank draws from a stream of its own in a fit."
        return fix


_MOST_DIFFERENCES = 10


def _by_rank(values: Mapping[str, tuple[int, ...]]) -> str:
    return "; ".join(f"{value} on {_ranks(who)}" for value, who in values.items())


@dataclass(eq=False, repr=False)
class UnevenInputsError(RankwiseError, RuntimeError):
    """Ranks have different numbers of batches; `lengths` holds each rank's, such as "5" or "unknown"."""

    loader: str
    lengths: tuple[str, ...]

    def summary(self) -> str:
        return f"{self.loader} has a different number of batches on different ranks."

    def seen(self) -> str:
        return ", ".join(f"global_rank={rank}: {length}" for rank, length in enumerate(self.lengths))

    def fix(self) -> str:
        if "0" in self.lengths or "unknown" in self.lengths:
            return "give every rank a batch at least, and either all of them a loader with a length, or none."
        return (
            'Trainer(uneven_inputs="join") takes every sample, "truncate" stops with the shortest; '
            "or split the data evenly, as use_distributed_sampler=True does."
        )


@dataclass(eq=False, repr=False)
class NonFiniteLossError(RankwiseError, FloatingPointError):
    """A loss, or a gradient of one, is infinite or NaN; raised on every rank at the same step.

    `global_ranks` are those whose loss it was: none where all losses were finite, but not their gradients.
    """

    global_step: int
    epoch: int
    batch_idx: int
    global_ranks: tuple[int, ...] = ()
    world_size: int = 1

    def summary(self) -> str:
        where = f"at optimizer step {self.global_step} (epoch {self.epoch}, batch {self.batch_idx})"
        if not self.global_ranks:
            return f"Gradients are infinite or NaN {where}, though every rank's loss is finite."
        ranks = ", ".join(str(rank) for rank in self.global_ranks)
        return f"The loss is infinite or NaN {where}: on global_rank {ranks} of {self.world_size} ranks."

    def fix(self) -> str:
        return (
            "look for log(0), sqrt(0), a division by 0 or a learning rate too high; "
            'torch.autograd.set_detect_anomaly(True) finds the operation; on_nonfinite="skip" goes on.'
        )


@dataclass(eq=False, repr=False)
class UnusedParametersError(RankwiseError, RuntimeError):
    """Parameters of `module` had no part in the loss, so DDP waits for their gradients in vain.

    `names_by_rank` has the names for the ranks that failed together.
    """

    names_by_rank: Mapping[int, tuple[str, ...]]
    module: str = "the module"

    def summary(self) -> str:
        count = len({name for names in self.names_by_rank.values() for name in names})
        words = "1 parameter" if count == 1 else f"{count} parameters"
        return (
            f"{words} of {self.module} had no part in the loss, so DDP waits for gradients that never come."
        )

    def seen(self) -> str:
        return "; ".join(
            f"unused on global_rank={rank}: {_listed(names) or 'none'}"
            for rank, names in sorted(self.names_by_rank.items())
        )

    def fix(self) -> str:
        return (
            "use them in every step (loss + 0 * sum(parameter.sum() ...) counts); or freeze them with "
            "parameter.requires_grad_(False) before training; or let DDP look for them: "
            "DDPStrategy(find_unused_parameters=True)."
        )


@dataclass(eq=False, repr=False)
class CheckpointError(RankwiseError, RuntimeError):
    """A checkpoint at `path` could not be written or read; `problem` says why."""

    path: str
    problem: str
    remedy: str = ""

    def summary(self) -> str:
        return f"Checkpoint {self.path!r}: {self.problem}."

    def fix(self) -> str:
        return self.remedy
