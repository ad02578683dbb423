"""The exceptions: what their text says, that fields are kept, and that they survive pickling."""

import dataclasses
import pickle
import signal
from collections.abc import Callable
from typing import Any

import pytest

import rankwise
from rankwise import errors
from tests.helpers.architecture import public_errors
from tests.test_architecture import MODULES

WHERE: dict[str, Any] = {"global_rank": 2, "local_rank": 0, "node_rank": 1, "pid": 41822}


@dataclasses.dataclass(frozen=True)
class Case:
    """An error, the builtin that a user would catch, and the whole text."""

    build: Callable[[], errors.RankwiseError]
    builtin: type[Exception]
    text: str

    @property
    def cls(self) -> type[errors.RankwiseError]:
        """The class of the error."""
        return type(self.build())


CASES = [
    Case(
        lambda: errors.ConfigurationError(message="It cannot work.", facts="a is 1.", remedy="set a=2."),
        ValueError,
        "It cannot work.\n  Seen: a is 1.\n  Fix: set a=2.",
    ),
    Case(
        lambda: errors.UnknownNameError(kind="hook", name="fp61", known=("fp16", "bf16")),
        ValueError,
        "Unknown hook 'fp61'. Did you mean 'fp16'?\n"
        "  Fix: use one of the names below.\n"
        "  Seen: known are 'bf16', 'fp16'.",
    ),
    Case(
        lambda: errors.UnknownStrategyError(kind="strategy", name="ddp_spwan", known=("single", "ddp_spawn")),
        KeyError,
        "Unknown strategy 'ddp_spwan'. Did you mean 'ddp_spawn'?\n"
        '  Fix: Trainer(strategy="ddp_spawn"), or register your own with '
        'StrategyRegistry.register("ddp_spwan", ...).\n'
        "  Seen: registered names are 'ddp_spawn', 'single'.",
    ),
    Case(
        lambda: errors.InvalidArgumentError(
            argument="devices", value=-2, expected="1 or more", remedy="set 1."
        ),
        ValueError,
        "devices=-2 is not possible: expected 1 or more.\n  Fix: set 1.",
    ),
    Case(
        lambda: errors.InvalidTypeError(
            argument="timeout", value="10", expected="a timedelta", remedy="give one."
        ),
        TypeError,
        "timeout='10' is of type str: expected a timedelta.\n  Fix: give one.",
    ),
    Case(
        lambda: errors.UnknownArgumentError(target="DDP", name="bucket_cap", known=("bucket_cap_mb", "dim")),
        TypeError,
        "DDP takes no argument 'bucket_cap'. Did you mean 'bucket_cap_mb'?\n"
        "  Seen: it takes 'bucket_cap_mb', 'dim'.",
    ),
    Case(
        lambda: errors.DuplicateNameError(name="ddp"),
        ValueError,
        "Strategy 'ddp' is registered already.\n"
        '  Fix: StrategyRegistry.register("ddp", ..., override=True), or choose another name.',
    ),
    Case(
        lambda: errors.WorldSizeMismatchError(
            devices=4,
            num_nodes=2,
            launched_by="torchrun",
            world_size=4,
            variables={"WORLD_SIZE": "4", "GROUP_RANK": "0"},
            detection="Detected by TORCHELASTIC_RUN_ID.",
        ),
        ValueError,
        "8 processes were asked for (devices=4 x num_nodes=2), but torchrun started 4.\n"
        "  Seen: WORLD_SIZE=4, GROUP_RANK=0. Detected by TORCHELASTIC_RUN_ID.\n"
        '  Fix: set devices="auto" and num_nodes="auto" to take what was started, or start 8 processes, '
        "as with: torchrun --nnodes=2 --nproc-per-node=4 train.py",
    ),
    Case(
        lambda: errors.EnvironmentVariableError(
            environment="torchrun", problem="RANK is not a number", variables={"RANK": "x"}
        ),
        ValueError,
        "The variables of torchrun cannot be right: RANK is not a number.\n"
        "  Seen: RANK='x'\n"
        "  Fix: start the job with torchrun itself, unset these variables, or name the environment: "
        "RANKWISE_ENVIRONMENT=local.",
    ),
    Case(
        lambda: errors.NotPicklableError(path="model.act", reason="it is a lambda", start_method="spawn"),
        TypeError,
        "model.act cannot be pickled, which start_method='spawn' needs: it is a lambda.\n"
        "  Fix: make it a function or class at the top level of a module, or use a start method that does "
        'not pickle its arguments: strategy="ddp" or "ddp_fork".',
    ),
    Case(
        lambda: errors.LaunchRefusedError(message="A REPL cannot be re-run.", remedy='use "ddp_fork".'),
        RuntimeError,
        'A REPL cannot be re-run.\n  Fix: use "ddp_fork".',
    ),
    Case(
        lambda: errors.MissingExtraError(package="tqdm", extra="progress", purpose="The progress bar"),
        ImportError,
        "The progress bar needs the package 'tqdm', which is not installed.\n"
        '  Fix: pip install "rankwise[progress]"',
    ),
    Case(
        lambda: errors.MissingAttributeError(owner="Trainer", attribute="fit_loop", remedy="use progress."),
        AttributeError,
        "Trainer has no fit_loop.\n  Fix: use progress.",
    ),
    Case(
        lambda: errors.MissingNameError(module="rankwise.lightning", name="Tuner", remedy="leave it out."),
        ImportError,
        "rankwise.lightning has no Tuner.\n  Fix: leave it out.",
    ),
    Case(
        lambda: errors.UnshardableLoaderError(loader="train_dataloader", reason="it is a list", remedy="x."),
        ValueError,
        "train_dataloader cannot be split over the ranks: it is a list.\n  Fix: x.",
    ),
    Case(
        lambda: errors.LifecycleError(
            call="launch()", state="new", needed="a bound strategy", remedy="bind it."
        ),
        RuntimeError,
        "launch() was called in state 'new', but it needs a bound strategy.\n  Fix: bind it.",
    ),
    Case(
        lambda: errors.WorkerRaisedError(
            **WHERE,
            elapsed_s=12.41,
            stopped=(0, 1),
            consequences=("global_rank=0 lost its peer",),
            traceback_text="Traceback ...\nValueError: loss is nan.\n",
            exception_type="ValueError",
            exception_message="loss is nan.\nmore",
        ),
        RuntimeError,
        "Worker global_rank=2 (local_rank=0, node_rank=1, pid 41822) raised ValueError: loss is nan.\n"
        "  Seen: 12.4 s after launch; then stopped: global_rank 0, 1.\n"
        "        consequence: global_rank=0 lost its peer\n"
        "  Fix: start from the traceback of global_rank=2 below.\n"
        "  --- traceback of global_rank=2 ---\n"
        "Traceback ...\n"
        "ValueError: loss is nan.",
    ),
    Case(
        lambda: errors.WorkerExitedError(**WHERE, host="gpu07", elapsed_s=1, exit_code=3),
        RuntimeError,
        "Worker global_rank=2 (local_rank=0, node_rank=1, host 'gpu07', pid 41822) exited with code 3 "
        "before it had finished.\n"
        "  Seen: 1.0 s after launch.\n"
        "  Fix: look for sys.exit() or os._exit() in the code of this rank; every rank must return.",
    ),
    Case(
        lambda: errors.WorkerKilledError(**WHERE, elapsed_s=1, signal_number=signal.SIGKILL),
        RuntimeError,
        "Worker global_rank=2 (local_rank=0, node_rank=1, pid 41822) was killed by SIGKILL.\n"
        "  Seen: 1.0 s after launch.\n"
        "  Fix: often it is the kernel's out-of-memory killer: see `dmesg`, use less memory per rank.",
    ),
    Case(
        lambda: errors.ProcessGroupError(problem="The group has 3 ranks.", remedy="destroy it."),
        RuntimeError,
        "The group has 3 ranks.\n  Fix: destroy it.",
    ),
    Case(
        lambda: errors.PeerAuthenticationError(problem="Another process has taken the place of rank 1."),
        RuntimeError,
        "Another process has taken the place of rank 1.\n"
        "  Fix: see who else uses this machine or network, and start the job again; a network namespace "
        "shuts other users out. If RANKWISE_JOB_KEY is set, it must be the same on all nodes. "
        "See docs/security.md.",
    ),
    Case(
        lambda: errors.RendezvousTimeoutError(waiting_for="global_rank 1", timeout_s=60.0),
        TimeoutError,
        "Waited 60 s for global_rank 1.\n"
        "  Fix: look for a rank that is still starting or hangs, or raise init_timeout.",
    ),
    Case(
        lambda: errors.NodesLostError(("node 1 (global_rank 2, 3)",), symptom="RuntimeError: closed by peer"),
        ConnectionError,
        "Lost node 1 (global_rank 2, 3): no answer through the job's store.\n"
        "  Seen: RuntimeError: closed by peer\n"
        "  Fix: check those nodes, and the network between them, for a killed or stopped process "
        "or a cut link.",
    ),
    Case(
        lambda: errors.StopAgreementError(missing=(1, 3), timeout_s=60.0),
        TimeoutError,
        "Training was to stop, but global_rank 1, 3 did not say when, in 60 s.\n"
        "  Fix: find out what these ranks were doing: they hang, or never started to train.",
    ),
    Case(
        lambda: errors.RankMismatchError({"the version of torch": {"2.12": (0, 2), "2.13": (1,)}}),
        RuntimeError,
        "The ranks are not the same in 1 thing.\n"
        "  Seen: the version of torch: 2.12 on global_rank 0, 2; 2.13 on global_rank 1\n"
        "  Fix: build and call the same on every rank; look for code that depends on the rank or the host.",
    ),
    Case(
        lambda: errors.WorkerTimedOutError(
            **WHERE,
            elapsed_s=60.0,
            exception_type="RuntimeError",
            exception_message="Timed out waiting 60000ms",
            missing=(1,),
            last_seen=("global_rank=1 was last in step 17, data loading, 63 s ago",),
        ),
        RuntimeError,
        "Worker global_rank=2 (local_rank=0, node_rank=1, pid 41822) waited too long for global_rank=1: "
        "raised RuntimeError: Timed out waiting 60000ms.\n"
        "  Seen: 60.0 s after launch.\n"
        "        global_rank=1 was last in step 17, data loading, 63 s ago\n"
        "  Fix: see above what the other ranks were doing, and their stacks on stderr; if they only "
        "needed more time, raise timeout (for the rendezvous: init_timeout). "
        "DDPStrategy(check_collectives=True) names a collective that one rank calls alone.",
    ),
    Case(
        lambda: errors.TensorMismatchError(
            call="gather_all_tensors()", found=("torch.int8, shape (1,)", "no tensor")
        ),
        ValueError,
        "The ranks gave incompatible tensors to gather_all_tensors().\n"
        "  Seen: rank 0 of the group: torch.int8, shape (1,); rank 1 of the group: no tensor\n"
        "  Fix: give every rank a dense tensor of the same dtype and number of dimensions; "
        "sizes may differ.",
    ),
    Case(
        lambda: errors.CollectiveMismatchError(
            group="all ranks",
            number=7,
            calls={"barrier at a.py:1 in f": (0, 2), "all_reduce of int64[2] (sum) at a.py:2 in f": (1,)},
        ),
        RuntimeError,
        "The ranks called different things as collective number 7 of all ranks.\n"
        "  Seen: global_rank 0, 2: barrier at a.py:1 in f\n"
        "        global_rank 1: all_reduce of int64[2] (sum) at a.py:2 in f\n"
        "  Fix: every rank must call the same collectives, in the same order; look for code that depends on "
        "the rank: a branch, an early return, a loop that ends earlier, a caught exception.",
    ),
    Case(
        lambda: errors.RankZeroFailedError(global_rank=0, failure="OSError: disk full"),
        RuntimeError,
        "The block of rank_zero_first() failed on global_rank 0: OSError: disk full.\n"
        "  Fix: start from the traceback of global_rank 0.",
    ),
    Case(
        lambda: errors.UnevenInputsError(loader="train_dataloader", lengths=("4", "3")),
        RuntimeError,
        "train_dataloader has a different number of batches on different ranks.\n"
        "  Seen: global_rank=0: 4, global_rank=1: 3\n"
        '  Fix: Trainer(uneven_inputs="join") uses every sample, "truncate" stops with the shortest loader; '
        "or split the data evenly, as use_distributed_sampler=True does.",
    ),
    Case(
        lambda: errors.NonFiniteLossError(
            global_step=7, epoch=1, batch_idx=3, global_ranks=(0, 2), world_size=4
        ),
        FloatingPointError,
        "The loss is infinite or NaN at optimizer step 7 (epoch 1, batch 3): "
        "on global_rank 0, 2 of 4 ranks.\n"
        "  Fix: look for log(0), sqrt(0), a division by 0 or a learning rate that is too high; "
        'torch.autograd.set_detect_anomaly(True) finds the operation; on_nonfinite="skip" skips the step.',
    ),
    Case(
        lambda: errors.UnusedParametersError(names_by_rank={1: ("head.weight",), 0: ()}, module="Net"),
        RuntimeError,
        "1 parameter of Net had no part in the loss, so DDP waits for gradients that never come.\n"
        "  Seen: unused on global_rank=0: none; unused on global_rank=1: 'head.weight'\n"
        "  Fix: use them in every step (loss + 0 * sum(parameter.sum() ...) is enough); or freeze them with "
        "parameter.requires_grad_(False) before training; or let DDP look for them: "
        "DDPStrategy(find_unused_parameters=True). A layer that a callback trains with an optimizer of its "
        "own is added to the module in on_fit_start.",
    ),
    Case(
        lambda: errors.CheckpointError(path="last.ckpt", problem="it ends early", remedy="use another."),
        RuntimeError,
        "Checkpoint 'last.ckpt': it ends early.\n  Fix: use another.",
    ),
    Case(
        lambda: errors.ContractError(subject="MyStrategy", problems=("barrier waits: no", "it pickles: no")),
        AssertionError,
        "MyStrategy breaks 2 rules of its contract.\n  Seen: barrier waits: no\n        it pickles: no",
    ),
]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.cls.__name__)


def test_every_error_has_a_case() -> None:
    """No public error is missing above, but for those that only others derive from."""
    bases = {"RankwiseError", "WorkerError"}
    assert {case.cls.__name__ for case in CASES} | bases == set(public_errors(MODULES["rankwise.errors"]))


@each_case
def test_text(case: Case) -> None:
    """The text is the sentence, what was seen, and what to do, in this order."""
    assert str(case.build()) == case.text


def test_repr() -> None:
    """The repr is one line: the class and the sentence."""
    for case in CASES:
        assert repr(case.build()) == f"<{case.cls.__name__}: {case.text.splitlines()[0]}>"


def test_derives_from_the_builtin() -> None:
    """A user may catch the builtin, or everything of ours."""
    for case in CASES:
        assert issubclass(case.cls, case.builtin)
        assert issubclass(case.cls, errors.RankwiseError)


def test_pickles() -> None:
    """Type, text and every field survive a trip to another process."""
    for case in CASES:
        error = case.build()
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error)
        assert str(copy) == str(error)
        names = [field.name for field in dataclasses.fields(error)]
        assert [getattr(copy, name) for name in names] == [getattr(error, name) for name in names]


def test_fields_are_kept() -> None:
    """What an error was built from can be read from it."""
    error = errors.WorkerRaisedError(
        **WHERE, exception_type="ValueError", exception_message="nan", stopped=(0,)
    )
    assert (error.global_rank, error.local_rank, error.node_rank, error.pid) == (2, 0, 1, 41822)
    assert (error.exception_type, error.exception_message, error.stopped) == ("ValueError", "nan", (0,))


def test_nothing_close_is_suggested() -> None:
    """A name that is like none gets no suggestion."""
    error = errors.UnknownNameError(kind="hook", name="zzz", known=("fp16",))
    assert error.summary() == "Unknown hook 'zzz'."


def test_a_name_of_another_type() -> None:
    """A number in place of a name is in the text as it is."""
    error = errors.UnknownNameError(kind="precision", name=16, known=("16-mixed",))  # type: ignore[arg-type]
    assert error.summary() == "Unknown precision 16."


@pytest.mark.parametrize(
    ("name", "nearest"), [("DDP_Spwan", "ddp_spawn"), ("dpp", "ddp"), ("ddp", "ddp"), ("quartz", None)]
)
def test_nearest(name: str, nearest: str | None) -> None:
    """The nearest name is found whatever its case, and None where none is near."""
    assert errors.nearest(name, ["ddp", "ddp_spawn", "single_device"]) == nearest


@pytest.mark.parametrize(
    ("number", "name", "remedy"),
    [
        (signal.SIGSEGV, "SIGSEGV", "PYTHONFAULTHANDLER=1"),
        (signal.SIGTERM, "SIGTERM", "find who sent the signal"),
        (63, "signal 63", "find who sent the signal"),
    ],
)
def test_a_signal_is_named(number: int, name: str, remedy: str) -> None:
    """A worker's end by a signal names it, and says what that one mostly means."""
    error = errors.WorkerKilledError(**WHERE, signal_number=number)
    assert f"was killed by {name}." in error.summary()
    assert remedy in error.fix()


def test_an_exception_without_a_message() -> None:
    """A worker's bare exception ends the sentence with its type."""
    error = errors.WorkerRaisedError(**WHERE, exception_type="StopIteration")
    assert error.summary().endswith("raised StopIteration.")
    assert "traceback of" not in error.appendix()


def test_bases_have_no_text_of_their_own() -> None:
    """The base classes are there to be caught, not to be raised."""
    with pytest.raises(NotImplementedError):
        str(errors.RankwiseError())
    with pytest.raises(NotImplementedError):
        str(errors.WorkerError(**WHERE))


def test_a_value_that_cannot_be_pickled_travels_as_its_repr() -> None:
    """An error about a lambda crosses processes; what it names is still to be read."""
    error = errors.InvalidArgumentError(argument="devices", value=lambda: 1, expected="a number")
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, errors.InvalidArgumentError)
    assert "<lambda>" in str(copy)


def test_a_mismatch_with_no_variables_shows_no_empty_facts() -> None:
    """Where nothing was seen, nothing is shown as seen."""
    assert "Seen:" not in str(errors.WorldSizeMismatchError(devices=2, num_nodes=1, world_size=1))


def test_subclasses_of_users() -> None:
    """A user's subclass may be a dataclass with fields of its own, or have a constructor of its own."""

    @dataclasses.dataclass(eq=False, repr=False)
    class Decorated(errors.ConfigurationError):
        details: dict[str, int] = dataclasses.field(default_factory=dict)

    class Constructed(errors.ConfigurationError):
        code: int  # type: ignore[misc]  # checkers take every subclass for a dataclass

        def __init__(self, code: int) -> None:
            super().__init__(message="It failed.")
            self.code = code

    assert (Decorated("It failed.").details, str(Decorated("It failed."))) == ({}, "It failed.")
    assert (Constructed(3).code, str(Constructed(3))) == (3, "It failed.")


class Unreadable:
    """A value whose text raises an exception."""

    def __repr__(self) -> str:
        raise ValueError("no text")


class Halfway(Unreadable):
    """A value that has a `repr`, but no `str`."""

    def __repr__(self) -> str:
        return "halfway"

    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize("value", [Unreadable(), Halfway(), [Unreadable()]], ids=["repr", "str", "within"])
def test_a_value_whose_text_fails(value: object) -> None:
    """An error about a value of a user's class has a text, whatever the value's own text raises."""
    error = errors.InvalidTypeError(argument="devices", value=value, expected="a number")
    assert "whose repr() fails" in str(error)
    assert "devices" in str(error)
    assert "devices" in str(pickle.loads(pickle.dumps(error)))


def test_what_a_worker_says_to_do() -> None:
    """The caller's error repeats what the worker's own says to do."""
    own = errors.ConfigurationError(message="No.", facts="x is 1", remedy="set x=2.")
    error = errors.WorkerRaisedError(**WHERE, exception_type="ConfigurationError", exception_message=str(own))
    assert "\n  Fix: set x=2. Or start from the traceback of global_rank=2 below." in str(error)


def test_abort() -> None:
    """A killed worker that gloo may have aborted names the option that shows why."""
    killed = errors.WorkerKilledError(**WHERE, signal_number=signal.SIGABRT)
    assert "DDPStrategy(check_collectives=True)" in str(killed)
    other = errors.WorkerKilledError(**WHERE, signal_number=signal.SIGSEGV)
    assert "check_collectives" not in str(other)


def test_a_collective_of_one_rank() -> None:
    """So does the error of a rank whose peer had ended; another error does not."""
    for has_lost_peer in (True, False):
        error = errors.WorkerRaisedError(**WHERE, exception_type="RuntimeError", has_lost_peer=has_lost_peer)
        assert ("DDPStrategy(check_collectives=True) names" in str(error)) == has_lost_peer


def test_the_base_class_is_a_name_of_the_package() -> None:
    """`from rankwise import RankwiseError` is what catches every error."""
    assert rankwise.RankwiseError is errors.RankwiseError
