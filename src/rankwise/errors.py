"""The exceptions of rankwise. Each takes fields, keeps them as attributes, and builds its text from them.

RankwiseError
|-- ConfigurationError (ValueError)         invalid configuration; raised before any process starts
|   |-- UnknownNameError                    an unknown strategy, hook, environment, ...
|   |   `-- UnknownStrategyError (KeyError)
|   |-- InvalidArgumentError                an argument has an invalid value
|   |-- UnknownArgumentError (TypeError)    an unknown keyword argument
|   |-- DuplicateNameError                  a name is registered already
|   |-- WorldSizeMismatchError              devices x num_nodes is not the number of processes
|   |-- EnvironmentVariableError            a launcher's variables are missing or contradict each other
|   |-- NotPicklableError (TypeError)       an object cannot be sent to another process
|   |-- LaunchRefusedError (RuntimeError)   the start method cannot work here
|   |-- MissingExtraError (ImportError)     an optional package is not installed
|   |-- MissingNameError (ImportError)      a Lightning name that rankwise does not have
|   |-- MissingAttributeError (AttributeError)  ... or an attribute of its Trainer
|   `-- UnshardableLoaderError              a data loader cannot be split over ranks
|-- InvalidTypeError (TypeError)            an argument has the wrong type
|-- LifecycleError (RuntimeError)           a call in the wrong state
|-- WorkerError (RuntimeError)              a worker failed; describes the first failing rank
|   |-- WorkerRaisedError                   ... with an exception; has its traceback
|   |   `-- WorkerTimedOutError             ... because it waited too long for other ranks
|   |-- WorkerExitedError                   ... because it exited before it had finished
|   `-- WorkerKilledError                   ... because a signal killed it
|-- ProcessGroupError (RuntimeError)        the existing process group does not match the ranks
|   `-- PeerAuthenticationError           another process has taken a rank's place
|-- TensorMismatchError (ValueError)        ranks gave incompatible tensors to a collective
|-- CollectiveMismatchError (RuntimeError)  ranks called different collectives, or some called none
|-- RankZeroFailedError (RuntimeError)      rank_zero_first() failed on the rank that goes first
|-- NodesLostError (ConnectionError)        ranks on other nodes stopped responding
|-- RendezvousTimeoutError (TimeoutError)   the rendezvous timed out
|-- StopAgreementError (TimeoutError)       a rank did not report its step when training had to stop
|-- RankMismatchError (RuntimeError)        the ranks have different models, versions, loaders, ...
|-- UnevenInputsError (RuntimeError)        ranks have different numbers of batches
|-- NonFiniteLossError (FloatingPointError) a loss or gradient is infinite or NaN
|-- UnusedParametersError (RuntimeError)    parameters had no part in the loss
|-- CheckpointError (RuntimeError)          a checkpoint could not be written or read
`-- ContractError (AssertionError)          an extension breaks rules that rankwise.testing checks
"""

from __future__ import annotations

import difflib
import pickle
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, ClassVar

from typing_extensions import dataclass_transform

from rankwise.time_limit import call_with_limit

__all__ = [
    "CheckpointError",
    "CollectiveMismatchError",
    "ConfigurationError",
    "ContractError",
    "DuplicateNameError",
    "EnvironmentVariableError",
    "InvalidArgumentError",
    "InvalidTypeError",
    "LaunchRefusedError",
    "LifecycleError",
    "MissingAttributeError",
    "MissingExtraError",
    "MissingNameError",
    "NonFiniteLossError",
    "NodesLostError",
    "NotPicklableError",
    "PeerAuthenticationError",
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
    "hint_for",
    "nearest",
    "signal_name",
    "text_of",
]

NO_TEXT = "(its text could not be had)"
_TEXT_TIMEOUT_S = 3.0
_LONGEST_TEXT = 1_000_000
_ONE_SAMPLE = "Expected more than 1 value per channel when training"
_MOST_DIFFERENCES = 10
# How the name of a difference between ranks may end, and what it may contain.
UNOWNED = ", which is in no optimizer of the trainer"
OF_GROUP = " of parameter group "


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate closest to `name`, or None if none is close."""
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    matches = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    return by_lower[matches[0]] if matches else None


def _suggestion(error: UnknownNameError | UnknownArgumentError) -> str:
    found = None if error.remedy else nearest(str(error.name), error.known)
    return f" Did you mean {found!r}?" if found else ""


def signal_name(number: int) -> str:
    """Return the name of a signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def exit_code_text(code: int | None) -> str:
    """Return an exit code, which may be unknown, for a sentence."""
    return "an unknown code" if code is None else f"code {code}"


def text_of(error: BaseException, write: Callable[[BaseException], str] = str) -> str:
    """Return an exception's text, as `write` does; `NO_TEXT` where the user's code in it fails or hangs."""
    # It may call sys.exit(), too.
    texts = call_with_limit(lambda: write(error), _TEXT_TIMEOUT_S, BaseException, name="rankwise-text")
    text = texts[0] if texts else NO_TEXT
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}... ({len(text)} characters)"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)


def _ranks(who: Iterable[int]) -> str:
    return f"global_rank {', '.join(map(str, who))}"


@dataclass_transform(eq_default=False, field_specifiers=(field,))
@dataclass(eq=False, repr=False)
class RankwiseError(Exception):
    """Base of all exceptions of rankwise. The text is one sentence, `Seen:` (facts), `Fix:` (what to do).

    Each subclass in this module becomes a dataclass; one elsewhere may be decorated as one.
    """

    SUMMARY: ClassVar[str] = ""
    ADVICE: ClassVar[str] = ""
    FIX_FIRST: ClassVar[bool] = False  # where the facts are a long list

    def __post_init__(self) -> None:
        """Replace each value of a user's class whose `repr` fails: the text would fail too."""
        for name, value in vars(self).items():
            try:
                f"{value!r}{value}"
            except Exception:  # noqa: BLE001  whatever the user's code raises
                setattr(self, name, f"({type(value).__name__} whose repr() fails)")

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.__module__ == __name__:
            dataclass(eq=False, repr=False)(cls)

    def summary(self) -> str:
        """Return what happened, as one sentence: by default `SUMMARY` with the fields filled in."""
        if not self.SUMMARY:
            raise NotImplementedError
        return self.SUMMARY.format(**vars(self))

    def seen(self) -> str:
        """Return the facts, by default the field `facts`, or an empty string."""
        return getattr(self, "facts", "")

    def fix(self) -> str:
        """Return what to do: the field `remedy`, or `ADVICE` with the fields filled in."""
        return getattr(self, "remedy", "") or self.ADVICE.format(**vars(self))

    def appendix(self) -> str:
        """Return text for the end, such as a traceback, or an empty string."""
        return ""

    def __str__(self) -> str:
        parts = [("  Seen: ", self.seen()), ("  Fix: ", self.fix())]
        if self.FIX_FIRST:
            parts.reverse()
        parts = [("", self.summary()), *parts, ("", self.appendix().rstrip())]
        return "\n".join(f"{label}{text}" for label, text in parts if text)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.summary()}>"

    def __reduce__(self) -> tuple[Any, ...]:
        values = {each.name: _portable(getattr(self, each.name)) for each in fields(self)}
        return partial(type(self), **values), ()


def _portable(value: object) -> object:
    """Return the value, or its repr if it cannot be pickled."""
    try:
        pickle.dumps(value)
    except Exception:  # noqa: BLE001  pickling runs code of any class
        return repr(value)
    return value


# ---------------------------------------------------------------------------------------- configuration


class ConfigurationError(RankwiseError, ValueError):
    """The configuration cannot work: `message` says why, `facts` what was seen, `remedy` what to do."""

    SUMMARY = "{message}"

    message: str = ""
    facts: str = ""
    remedy: str = ""


class UnknownNameError(ConfigurationError):
    """`name` is not one of the `known` names; `kind` says what it names."""

    ADVICE = "use one of the names below."
    KNOWN: ClassVar[str] = "known are"
    FIX_FIRST = True

    kind: str = "name"
    name: str = ""
    known: tuple[str, ...] = ()

    def summary(self) -> str:
        return f"Unknown {self.kind} {self.name!r}.{_suggestion(self)}"

    def seen(self) -> str:
        return f"{self.KNOWN} {_listed(sorted(self.known))}."


class UnknownStrategyError(UnknownNameError, KeyError):
    """A strategy name is not registered."""

    KNOWN = "registered names are"

    kind: str = "strategy"

    def fix(self) -> str:
        suggestion = nearest(self.name, self.known) or "ddp"
        own = f'register your own with StrategyRegistry.register("{self.name}", ...).'
        return self.remedy or f'Trainer(strategy="{suggestion}"), or {own}'


class InvalidArgumentError(ConfigurationError):
    """`argument` has an invalid `value`; `expected` describes valid ones."""

    SUMMARY = "{argument}={value!r} is not possible: expected {expected}."

    argument: str = ""
    value: object = None
    expected: str = ""


class InvalidTypeError(RankwiseError, TypeError):
    """`argument` has a `value` of the wrong type; `expected` describes valid ones."""

    argument: str
    value: object
    expected: str
    remedy: str = ""

    def summary(self) -> str:
        first, rest, _ = repr(self.value).partition("\n")  # a module's or a tensor's may have many lines
        kind = type(self.value).__name__
        return f"{self.argument}={first}{rest and '...'} is of type {kind}: expected {self.expected}."


class UnknownArgumentError(ConfigurationError, TypeError):
    """`target` has no keyword `name`. Suggests the closest known one, unless there is a `remedy`."""

    FIX_FIRST = True

    target: str = ""
    name: str = ""
    known: tuple[str, ...] = ()

    def summary(self) -> str:
        return f"{self.target} takes no argument {self.name!r}.{_suggestion(self)}"

    def seen(self) -> str:
        return f"it takes {_listed(sorted(self.known))}."


class DuplicateNameError(ConfigurationError):
    """`name` is registered already in `registry`; `kind` says what it names."""

    SUMMARY = "{kind} {name!r} is registered already."
    ADVICE = '{registry}.register("{name}", ..., override=True), or choose another name.'

    name: str = ""
    kind: str = "Strategy"
    registry: str = "StrategyRegistry"


class WorldSizeMismatchError(ConfigurationError):
    """The requested number of processes is not the number that exists.

    `devices` and `num_nodes` were requested; `launched_by` started `world_size` processes.
    """

    devices: int = 0
    num_nodes: int = 0
    launched_by: str = ""
    world_size: int = 0
    variables: Mapping[str, str] = field(default_factory=dict)
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


class EnvironmentVariableError(ConfigurationError):
    """The variables of a cluster environment are incomplete or contradictory; `problem` says how."""

    SUMMARY = "The variables of {environment} cannot be right: {problem}."
    ADVICE = (
        "start the job with {environment} itself, unset these variables, or name the environment: "
        "RANKWISE_ENVIRONMENT=local."
    )

    environment: str = ""
    problem: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)

    def seen(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.variables.items())


class NotPicklableError(ConfigurationError, TypeError):
    """An object cannot be sent to the workers or back: `path` names it, `reason` is pickle's message."""

    SUMMARY = "{path} cannot be pickled, which start_method={start_method!r} needs: {reason}."
    ADVICE = (
        "make it a function or class at the top level of a module, or use a start method that "
        'does not pickle its arguments: strategy="ddp" or "ddp_fork".'
    )

    path: str = ""
    reason: str = ""
    start_method: str = ""


class LaunchRefusedError(ConfigurationError, RuntimeError):
    """The start method cannot work here."""


class MissingExtraError(ConfigurationError, ImportError):
    """`purpose` needs the optional `package`, which the extra `extra` installs."""

    SUMMARY = "{purpose} needs the package {package!r}, which is not installed."
    ADVICE = 'pip install "rankwise[{extra}]"'

    package: str = ""
    extra: str = ""
    purpose: str = ""


class MissingNameError(ConfigurationError, ImportError):
    """`module`, which has Lightning's names, does not have `name`."""

    SUMMARY = "{module} has no {name}."

    module: str = ""
    name: str = ""


class MissingAttributeError(ConfigurationError, AttributeError):
    """`owner` does not have `attribute`, which Lightning's class of that name has."""

    SUMMARY = "{owner} has no {attribute}."

    owner: str = ""
    attribute: str = ""


class UnshardableLoaderError(ConfigurationError):
    """A data loader cannot be split over the ranks; `reason` says why."""

    SUMMARY = "{loader} cannot be split over the ranks: {reason}."

    loader: str = ""
    reason: str = ""


class LifecycleError(RankwiseError, RuntimeError):
    """`call` needs `needed`, but the object is in `state`; `verb` is "read" for an attribute."""

    SUMMARY = "{call} was {verb} in state {state!r}, but it needs {needed}."

    call: str
    state: str
    needed: str
    remedy: str = ""
    verb: str = "called"


# ---------------------------------------------------------------------------------------- workers


class WorkerError(RankwiseError, RuntimeError):
    """A worker failed; the fields describe the first worker that did.

    Attributes:
        host: name of its node; empty if not known.
        elapsed_s: seconds from the launch to the failure.
        stopped: global ranks that were stopped afterwards.
        consequences: failures of other ranks that followed from this one, one line each.
        alike: global ranks that failed with the same traceback.
        traceback_text: the worker's own traceback.
        other_tracebacks: of other ranks, by global rank: how they failed, or where they were stopped.
        shows_others: whether the text has these too.
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
    other_tracebacks: Mapping[int, str] = field(default_factory=dict)
    shows_others: bool = False

    def what(self) -> str:
        """Return how the worker failed, as the predicate of a sentence."""
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
            facts += f"; then stopped: {_ranks(self.stopped)}"
        if self.alike:
            facts += f"; the same on {_ranks(self.alike)}"
        return "".join([facts, ".", *(f"\n        consequence: {line}" for line in self.consequences)])

    def appendix(self) -> str:
        shown = {self.global_rank: self.traceback_text} if self.traceback_text else {}
        if self.shows_others:
            shown |= dict(sorted(self.other_tracebacks.items()))
        return "\n".join(
            f"  --- traceback of global_rank={rank} ---\n{text.rstrip()}" for rank, text in shown.items()
        )


class WorkerRaisedError(WorkerError):
    """A worker raised an exception of `exception_type` with `exception_message`.

    With `has_lost_peer` torch raised it because another rank had ended, yet no other rank has failed before.
    """

    ADVICE = "start from the traceback of global_rank={global_rank} below."

    exception_type: str = ""
    exception_message: str = ""
    has_lost_peer: bool = False

    def what(self) -> str:
        first_line = self.exception_message.partition("\n")[0].rstrip(".")
        return f"raised {self.exception_type}{first_line and ': '}{first_line}"

    def fix(self) -> str:
        """Return what the worker's own exception says to do, if it says so, and where to look."""
        _, is_found, own = self.exception_message.partition("\n  Fix: ")
        here = super().fix()
        if self.has_lost_peer:
            here += (
                " Another rank had ended: DDPStrategy(check_collectives=True) names a collective that one "
                "rank calls alone."
            )
        hint = hint_for(self.exception_type, self.exception_message)
        first = own.partition("\n")[0] if is_found else hint
        return f"{first} Or {here}" if first else here


def hint_for(exception_type: str, message: str) -> str:
    """Return what to do about an exception of torch's that only says what is wrong; "" for any other."""
    if exception_type != "ValueError" or not message.startswith(_ONE_SAMPLE):
        return ""
    return (
        "BatchNorm has got one sample, the last batch of a rank: DataLoader(drop_last=True) leaves it out on "
        "every rank; or choose a batch_size that leaves two or more of a rank's samples (all of them divided "
        "by the number of ranks, rounded up)."
    )


class WorkerTimedOutError(WorkerRaisedError):
    """A worker waited too long for others, in a collective or at the rendezvous, or the job took too long.

    Attributes:
        missing: global ranks that it waited for.
        last_seen: the last step and phase of each other rank, one line each.
    """

    ADVICE = (
        "see above what the other ranks were doing, and their stacks on stderr; if they only needed more "
        "time, raise timeout (for the rendezvous: init_timeout). DDPStrategy(check_collectives=True) names "
        "a collective that one rank calls alone."
    )
    TIME_LIMIT: ClassVar[str] = "TimeLimit"  # the exception type of a job that took longer than it may

    missing: tuple[int, ...] = ()
    last_seen: tuple[str, ...] = ()

    def what(self) -> str:
        if self.exception_type == self.TIME_LIMIT:
            return f"had not ended {self.exception_message}"
        ranks = f"global_rank={', '.join(map(str, self.missing))}" if self.missing else "another rank"
        return f"waited too long for {ranks}: {super().what()}"

    def seen(self) -> str:
        return "".join([super().seen(), *(f"\n        {line}" for line in self.last_seen)])

    def fix(self) -> str:
        if self.exception_type == self.TIME_LIMIT:
            return "see on stderr, by the stacks of all ranks, what they were doing; or raise the limit."
        return super().fix()


class WorkerExitedError(WorkerError):
    """A worker exited before it had finished, with `exit_code`; None where that is not known."""

    NOT_STARTED: ClassVar[str] = "before it had started (what it printed is above)"
    BY_SYSTEM_EXIT: ClassVar[str] = "(it raised SystemExit) before the others had finished"

    exit_code: int | None = 0
    phase: str = "before it had finished"

    def what(self) -> str:
        return f"exited with {exit_code_text(self.exit_code)} {self.phase}"

    def fix(self) -> str:
        if self.phase == self.BY_SYSTEM_EXIT:
            return "every rank must reach its end; sys.exit(code) in place of SystemExit keeps the code."
        if self.exit_code is None:
            return (
                "the launching process ignores SIGCHLD, or waits for all children, and so takes the code. "
                "Leave SIGCHLD alone there."
            )
        if self.phase == self.NOT_STARTED:
            return (
                "look above: it ended while it imported or ran the main module. Put the code that starts the "
                'training under: if __name__ == "__main__":'
            )
        return "look for sys.exit() or os._exit() in the code of this rank; every rank must return."


class WorkerKilledError(WorkerError):
    """The signal `signal_number`, which rankwise did not send, killed a worker."""

    signal_number: int = 0

    def what(self) -> str:
        return f"was killed by {signal_name(self.signal_number)}"

    def fix(self) -> str:
        if self.signal_number == signal.SIGKILL:
            return "often it is the kernel's out-of-memory killer: see `dmesg`, use less memory per rank."
        if self.signal_number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS):
            crash = "native code crashed: run with PYTHONFAULTHANDLER=1 to see where."
            if self.signal_number == signal.SIGABRT:
                crash += (
                    " gloo also aborts where ranks call different collectives, or one rank calls one alone: "
                    "DDPStrategy(check_collectives=True) names the calls. NCCL's watchdog aborts where "
                    "one has waited for `timeout`, and names it above: look for a rank that hangs or left."
                )
            return crash
        return "find who sent the signal; rankwise did not."


# ---------------------------------------------------------------------------------------- between ranks


class ProcessGroupError(RankwiseError, RuntimeError):
    """The process group, or what another process has sent, does not match the ranks; `problem` says how."""

    SUMMARY = "{problem}"

    problem: str
    remedy: str = ""


class PeerAuthenticationError(ProcessGroupError):
    """A process that is not a rank of the job has taken a rank's place; `problem` says which.

    Raised before the first collective of the group, and before the received object is unpickled.
    """

    ADVICE = (
        "see who else uses this machine or network, and start the job again; a network namespace shuts other "
        "users out. If RANKWISE_JOB_KEY is set, it must be the same on all nodes. See docs/security.md."
    )


class TensorMismatchError(RankwiseError, ValueError):
    """The ranks gave incompatible tensors to `call`; `found` describes each rank's."""

    SUMMARY = "The ranks gave incompatible tensors to {call}."
    ADVICE = "give every rank a dense tensor of the same dtype and number of dimensions; sizes may differ."

    call: str
    found: tuple[str, ...]

    def seen(self) -> str:
        return "; ".join(f"rank {rank} of the group: {what}" for rank, what in enumerate(self.found))


class CollectiveMismatchError(RankwiseError, RuntimeError):
    """The ranks of `group` called different collectives as its number `number`, or some called none.

    Attributes:
        calls: what was called and where, with the global ranks that did.
        missing: the last calls of the global ranks that called nothing within `timeout_s` seconds.
    """

    ADVICE = (
        "every rank must call the same collectives, in the same order; look for code that depends on the "
        "rank: a branch, an early return, a loop that ends earlier, a caught exception."
    )

    group: str
    number: int
    calls: Mapping[str, tuple[int, ...]]
    missing: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    timeout_s: float = 0.0

    def summary(self) -> str:
        which = f"collective number {self.number} of {self.group}"
        if self.missing:
            late = tuple(sorted(sum(self.missing.values(), ())))
            return f"Waited {self.timeout_s:g} s for {_ranks(late)} in {which}."
        return f"The ranks called different things as {which}."

    def seen(self) -> str:
        lines = [f"{_ranks(who)}: {call}" for call, who in self.calls.items()]
        lines += [f"{_ranks(who)} did not come; last seen: {call}" for call, who in self.missing.items()]
        return "\n        ".join(lines)


class RankZeroFailedError(RankwiseError, RuntimeError):
    """The block of `rank_zero_first()` failed on `global_rank` with the exception `failure`."""

    SUMMARY = "The block of rank_zero_first() failed on global_rank {global_rank}: {failure}."
    ADVICE = "start from the traceback of global_rank {global_rank}."

    global_rank: int
    failure: str


class NodesLostError(RankwiseError, ConnectionError):
    """The ranks `lost` on other nodes stopped responding; `symptom` is the error on this rank."""

    ADVICE = "check those nodes, and the network between them, for a killed or stopped process or a cut link."

    lost: tuple[str, ...]
    symptom: str = ""

    def summary(self) -> str:
        return f"Lost {'; '.join(self.lost)}: no answer through the job's store."

    def seen(self) -> str:
        return self.symptom.partition("\n")[0]


class RendezvousTimeoutError(RankwiseError, TimeoutError):
    """The rendezvous took longer than `timeout_s` seconds."""

    SUMMARY = "Waited {timeout_s:g} s for {waiting_for}."
    ADVICE = "look for a rank that is still starting or hangs, or raise init_timeout."

    waiting_for: str
    timeout_s: float


class StopAgreementError(RankwiseError, TimeoutError):
    """The ranks `missing` did not report their step within `timeout_s` seconds when all had to stop."""

    ADVICE = "find out what these ranks were doing: they hang, or never started to train."

    missing: tuple[int, ...]
    timeout_s: float

    def summary(self) -> str:
        return f"Training was to stop, but {_ranks(self.missing)} did not say when, in {self.timeout_s:g} s."


class RankMismatchError(RankwiseError, RuntimeError):
    """The ranks differ; `differences` maps each property to its values, and each value to global ranks.

    `when` says where they were compared; it is empty before training. `averaging` says how the strategy must
    make parameters equal, if it is not rankwise's.
    """

    differences: Mapping[str, Mapping[str, tuple[int, ...]]]
    when: str = ""
    averaging: str = ""

    def summary(self) -> str:
        count = len(self.differences)
        where = f" {self.when}" if self.when else ""
        return f"The ranks are not the same in {count} {'thing' if count == 1 else 'things'}{where}."

    def seen(self) -> str:
        shown = list(self.differences.items())[:_MOST_DIFFERENCES]
        lines = [f"{name}: {_by_rank(values)}" for name, values in shown]
        if len(self.differences) > len(shown):
            lines.append(f"... and {len(self.differences) - len(shown)} more")
        return "\n        ".join(lines)

    def fix(self) -> str:
        fix = "build and call the same on every rank; look for code that depends on the rank or the host."
        if any(OF_GROUP in name for name in self.differences):
            fix = (
                "decide by a value that all ranks have, as trainer.strategy.all_reduce(loss.detach()) "
                "returns, not by the loss of this rank's own batch."
            )
        elif self.when:
            fix = (
                "change parameters and gradients alike on every rank. Look for hooks and forward passes that "
                "change them by this rank's own batch, loss or random numbers, and for gradients that are "
                "changed before they are averaged. check_ranks_every_n_steps=1 finds the first step."
            )
        if self.averaging and self.when:
            fix = self.averaging
        if "the seed" in self.differences:
            fix += " Use one seed, seed_everything(1): each rank draws from a stream of its own in a fit."
        if any(name.startswith("which samples ") for name in self.differences):
            fix += " Call seed_everything(1) before data are split at random."
        if any(name.endswith(UNOWNED) for name in self.differences):
            fix += (
                " For a layer that a callback trains, wrapped = trainer.strategy.setup_module(module.layer) "
                "in on_fit_start: calls of wrapped(inputs) average its gradients."
            )
        return fix


def _by_rank(values: Mapping[str, tuple[int, ...]]) -> str:
    return "; ".join(f"{value} on {_ranks(who)}" for value, who in values.items())


class UnevenInputsError(RankwiseError, RuntimeError):
    """The ranks have different numbers of batches; `lengths` has each rank's, as "5" or "unknown"."""

    SUMMARY = "{loader} has a different number of batches on different ranks."

    loader: str
    lengths: tuple[str, ...]

    def seen(self) -> str:
        return ", ".join(f"global_rank={rank}: {length}" for rank, length in enumerate(self.lengths))

    def fix(self) -> str:
        if "0" in self.lengths or "unknown" in self.lengths:
            return "give every rank at least one batch, and either all ranks a loader with a length, or none."
        return (
            'Trainer(uneven_inputs="join") uses every sample, "truncate" stops with the shortest loader; '
            "or split the data evenly, as use_distributed_sampler=True does."
        )


class NonFiniteLossError(RankwiseError, FloatingPointError):
    """A loss or a gradient is infinite or NaN; raised on every rank at the same step.

    `global_ranks` are those with such a loss; empty if all losses were finite, but not the gradients.
    """

    ADVICE = (
        "look for log(0), sqrt(0), a division by 0 or a learning rate that is too high; "
        'torch.autograd.set_detect_anomaly(True) finds the operation; on_nonfinite="skip" skips the step.'
    )

    global_step: int
    epoch: int
    batch_idx: int
    global_ranks: tuple[int, ...] = ()
    world_size: int = 1

    def summary(self) -> str:
        where = f"at optimizer step {self.global_step} (epoch {self.epoch}, batch {self.batch_idx})"
        if not self.global_ranks:
            return f"Gradients are infinite or NaN {where}, though every rank's loss is finite."
        ranks = _ranks(self.global_ranks)
        return f"The loss is infinite or NaN {where}: on {ranks} of {self.world_size} ranks."


class UnusedParametersError(RankwiseError, RuntimeError):
    """Parameters of `module` had no part in the loss; `names_by_rank` has their names."""

    ADVICE = (
        "use them in every step (loss + 0 * sum(parameter.sum() ...) is enough); or freeze them with "
        "parameter.requires_grad_(False) before training; or let DDP look for them: "
        "DDPStrategy(find_unused_parameters=True). A layer that a callback trains with an optimizer of its "
        "own is added to the module in on_fit_start."
    )

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


class CheckpointError(RankwiseError, RuntimeError):
    """A checkpoint at `path` could not be written or read; `problem` says why."""

    SUMMARY = "Checkpoint {path!r}: {problem}."

    path: str
    problem: str
    remedy: str = ""


class ContractError(RankwiseError, AssertionError):
    """`subject` breaks rules that every extension of its kind has to keep: `problems` has a line for each."""

    subject: str
    problems: tuple[str, ...]

    def summary(self) -> str:
        rules = "1 rule" if len(self.problems) == 1 else f"{len(self.problems)} rules"
        return f"{self.subject} breaks {rules} of its contract."

    def seen(self) -> str:
        return "\n        ".join(self.problems)
