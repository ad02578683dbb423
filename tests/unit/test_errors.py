"""The exceptions: what their text says, that fields are kept, and that they survive pickling."""

import dataclasses
import pickle
import signal
from typing import Any

import pytest

import rankwise
from rankwise import errors
from tests.helpers.architecture import public_errors
from tests.test_architecture import MODULES

WHERE: dict[str, Any] = {"global_rank": 2, "local_rank": 0, "node_rank": 1, "pid": 41822}


TEXTS: dict[errors.RankwiseError, str] = {
    errors.ConfigurationError(
        message="It cannot work.", facts="a is 1.", remedy="set a=2."
    ): "It cannot work.\n  Seen: a is 1.\n  Fix: set a=2.",
    errors.UnknownNameError(kind="hook", name="fp61", known=("fp16", "bf16")): (
        "Unknown hook 'fp61'. Did you mean 'fp16'?\n"
        "  Fix: use one of the names below.\n"
        "  Seen: known are 'bf16', 'fp16'."
    ),
    errors.UnknownStrategyError(kind="strategy", name="ddp_spwan", known=("single", "ddp_spawn")): (
        "Unknown strategy 'ddp_spwan'. Did you mean 'ddp_spawn'?\n"
        '  Fix: Trainer(strategy="ddp_spawn"), or register your own with '
        'StrategyRegistry.register("ddp_spwan", ...).\n'
        "  Seen: registered names are 'ddp_spawn', 'single'."
    ),
    errors.InvalidArgumentError(
        argument="devices", value=-2, expected="1 or more", remedy="set 1."
    ): "devices=-2 is not possible: expected 1 or more.\n  Fix: set 1.",
    errors.InvalidTypeError(
        argument="timeout", value="10", expected="a timedelta", remedy="give one."
    ): "timeout='10' is of type str: expected a timedelta.\n  Fix: give one.",
    errors.UnknownArgumentError(target="DDP", name="bucket_cap", known=("bucket_cap_mb", "dim")): (
        "DDP takes no argument 'bucket_cap'. Did you mean 'bucket_cap_mb'?\n"
        "  Seen: it takes 'bucket_cap_mb', 'dim'."
    ),
    errors.DuplicateNameError(name="ddp"): (
        "Strategy 'ddp' is registered already.\n"
        '  Fix: StrategyRegistry.register("ddp", ..., override=True), or choose another name.'
    ),
    errors.WorldSizeMismatchError(
        devices=4,
        num_nodes=2,
        launched_by="torchrun",
        world_size=4,
        variables={"WORLD_SIZE": "4", "GROUP_RANK": "0"},
        detection="Detected by TORCHELASTIC_RUN_ID.",
    ): (
        "8 processes were asked for (devices=4 x num_nodes=2), but torchrun started 4.\n"
        "  Seen: WORLD_SIZE=4, GROUP_RANK=0. Detected by TORCHELASTIC_RUN_ID.\n"
        '  Fix: set devices="auto" and num_nodes="auto" to take what was started, or start 8 processes, '
        "as with: torchrun --nnodes=2 --nproc-per-node=4 train.py"
    ),
    errors.EnvironmentVariableError(
        environment="torchrun", problem="RANK is not a number", variables={"RANK": "x"}
    ): (
        "The variables of torchrun cannot be right: RANK is not a number.\n"
        "  Seen: RANK='x'\n"
        "  Fix: start the job with torchrun itself, unset these variables, or name the environment: "
        "RANKWISE_ENVIRONMENT=local."
    ),
    errors.NotPicklableError(path="model.act", reason="it is a lambda", start_method="spawn"): (
        "model.act cannot be pickled, which start_method='spawn' needs: it is a lambda.\n"
        "  Fix: make it a function or class at the top level of a module, or use a start method that does "
        'not pickle its arguments: strategy="ddp" or "ddp_fork".'
    ),
    errors.LaunchRefusedError(
        message="A REPL cannot be re-run.", remedy='use "ddp_fork".'
    ): 'A REPL cannot be re-run.\n  Fix: use "ddp_fork".',
    errors.MissingExtraError(package="tqdm", extra="progress", purpose="The progress bar"): (
        "The progress bar needs the package 'tqdm', which is not installed.\n"
        '  Fix: pip install "rankwise[progress]"'
    ),
    errors.MissingAttributeError(
        owner="Trainer", attribute="fit_loop", remedy="use progress."
    ): "Trainer has no fit_loop.\n  Fix: use progress.",
    errors.MissingNameError(
        module="rankwise.lightning", name="Tuner", remedy="leave it out."
    ): "rankwise.lightning has no Tuner.\n  Fix: leave it out.",
    errors.UnshardableLoaderError(
        loader="train_dataloader", reason="it is a list", remedy="x."
    ): "train_dataloader cannot be split over the ranks: it is a list.\n  Fix: x.",
    errors.LifecycleError(
        call="launch()", state="new", needed="a bound strategy", remedy="bind it."
    ): "launch() was called in state 'new', but it needs a bound strategy.\n  Fix: bind it.",
    errors.WorkerRaisedError(
        **WHERE,
        elapsed_s=12.41,
        stopped=(0, 1),
        consequences=("global_rank=0 lost its peer",),
        traceback_text="Traceback ...\nValueError: loss is nan.\n",
        exception_type="ValueError",
        exception_message="loss is nan.\nmore",
    ): (
        "Worker global_rank=2 (local_rank=0, node_rank=1, pid 41822) raised ValueError: loss is nan.\n"
        "  Seen: 12.4 s after launch; then stopped: global_rank 0, 1.\n"
        "        consequence: global_rank=0 lost its peer\n"
        "  Fix: start from the traceback of global_rank=2 below.\n"
        "  --- traceback of global_rank=2 ---\n"
        "Traceback ...\n"
        "ValueError: loss is nan."
    ),
    errors.WorkerExitedError(**WHERE, host="gpu07", elapsed_s=1, exit_code=3): (
        "Worker global_rank=2 (local_rank=0, node_rank=1, host 'gpu07', pid 41822) exited with code 3 "
        "before it had finished.\n"
        "  Seen: 1.0 s after launch.\n"
        "  Fix: look for sys.exit() or os._exit() in the code of this rank; every rank must return."
    ),
    errors.WorkerKilledError(**WHERE, elapsed_s=1, signal_number=signal.SIGKILL): (
        "Worker global_rank=2 (local_rank=0, node_rank=1, pid 41822) was killed by SIGKILL.\n"
        "  Seen: 1.0 s after launch.\n"
        "  Fix: often it is the kernel's out-of-memory killer: see `dmesg`, use less memory per rank."
    ),
    errors.ProcessGroupError(
        problem="The group has 3 ranks.", remedy="destroy it."
    ): "The group has 3 ranks.\n  Fix: destroy it.",
    errors.PeerAuthenticationError(problem="Another process has taken the place of rank 1."): (
        "Another process has taken the place of rank 1.\n"
        "  Fix: see who else uses this machine or network, and start the job again; a network namespace "
        "shuts other users out. If RANKWISE_JOB_KEY is set, it must be the same on all nodes. "
        "See docs/security.md."
    ),
    errors.RendezvousTimeoutError(waiting_for="global_rank 1", timeout_s=60.0): (
        "Waited 60 s for global_rank 1.\n"
        "  Fix: look for a rank that is still starting or hangs, or raise init_timeout."
    ),
    errors.NodesLostError(("node 1 (global_rank 2, 3)",), symptom="RuntimeError: closed by peer"): (
        "Lost node 1 (global_rank 2, 3): no answer through the job's store.\n"
        "  Seen: RuntimeError: closed by peer\n"
        "  Fix: check those nodes, and the network between them, for a killed or stopped process "
        "or a cut link."
    ),
    errors.StopAgreementError(missing=(1, 3), timeout_s=60.0): (
        "Training was to stop, but global_rank 1, 3 did not say when, in 60 s.\n"
        "  Fix: find out what these ranks were doing: they hang, or never started to train."
    ),
    errors.RankMismatchError({"the version of torch": {"2.12": (0, 2), "2.13": (1,)}}): (
        "The ranks are not the same in 1 thing.\n"
        "  Seen: the version of torch: 2.12 on global_rank 0, 2; 2.13 on global_rank 1\n"
        "  Fix: build and call the same on every rank; look for code that depends on the rank or the host."
    ),
    errors.WorkerTimedOutError(
        **WHERE,
        elapsed_s=60.0,
        exception_type="RuntimeError",
        exception_message="Timed out waiting 60000ms",
        missing=(1,),
        last_seen=("global_rank=1 was last in step 17, data loading, 63 s ago",),
    ): (
        "Worker global_rank=2 (local_rank=0, node_rank=1, pid 41822) waited too long for global_rank=1: "
        "raised RuntimeError: Timed out waiting 60000ms.\n"
        "  Seen: 60.0 s after launch.\n"
        "        global_rank=1 was last in step 17, data loading, 63 s ago\n"
        "  Fix: see above what the other ranks were doing, and their stacks on stderr; if they only "
        "needed more time, raise timeout (for the rendezvous: init_timeout). "
        "DDPStrategy(check_collectives=True) names a collective that one rank calls alone."
    ),
    errors.TensorMismatchError(call="gather_all_tensors()", found=("torch.int8, shape (1,)", "no tensor")): (
        "The ranks gave incompatible tensors to gather_all_tensors().\n"
        "  Seen: rank 0 of the group: torch.int8, shape (1,); rank 1 of the group: no tensor\n"
        "  Fix: give every rank a dense tensor of the same dtype and number of dimensions; "
        "sizes may differ."
    ),
    errors.CollectiveMismatchError(
        group="all ranks",
        number=7,
        calls={"barrier at a.py:1 in f": (0, 2), "all_reduce of int64[2] (sum) at a.py:2 in f": (1,)},
    ): (
        "The ranks called different things as collective number 7 of all ranks.\n"
        "  Seen: global_rank 0, 2: barrier at a.py:1 in f\n"
        "        global_rank 1: all_reduce of int64[2] (sum) at a.py:2 in f\n"
        "  Fix: every rank must call the same collectives, in the same order; look for code that depends on "
        "the rank: a branch, an early return, a loop that ends earlier, a caught exception."
    ),
    errors.RankZeroFailedError(global_rank=0, failure="OSError: disk full"): (
        "The block of rank_zero_first() failed on global_rank 0: OSError: disk full.\n"
        "  Fix: start from the traceback of global_rank 0."
    ),
    errors.UnevenInputsError(loader="train_dataloader", lengths=("4", "3")): (
        "train_dataloader has a different number of batches on different ranks.\n"
        "  Seen: global_rank=0: 4, global_rank=1: 3\n"
        '  Fix: Trainer(uneven_inputs="join") uses every sample, "truncate" stops with the shortest loader; '
        "or split the data evenly, as use_distributed_sampler=True does."
    ),
    errors.NonFiniteLossError(global_step=7, epoch=1, batch_idx=3, global_ranks=(0, 2), world_size=4): (
        "The loss is infinite or NaN at optimizer step 7 (epoch 1, batch 3): "
        "on global_rank 0, 2 of 4 ranks.\n"
        "  Fix: look for log(0), sqrt(0), a division by 0 or a learning rate that is too high; "
        'torch.autograd.set_detect_anomaly(True) finds the operation; on_nonfinite="skip" skips the step.'
    ),
    errors.UnusedParametersError(names_by_rank={1: ("head.weight",), 0: ()}, module="Net"): (
        "1 parameter of Net had no part in the loss, so DDP waits for gradients that never come.\n"
        "  Seen: unused on global_rank=0: none; unused on global_rank=1: 'head.weight'\n"
        "  Fix: use them in every step (loss + 0 * sum(parameter.sum() ...) is enough); or freeze them with "
        "parameter.requires_grad_(False) before training; or let DDP look for them: "
        "DDPStrategy(find_unused_parameters=True). A layer that a callback trains with an optimizer of its "
        "own is added to the module in on_fit_start."
    ),
    errors.CheckpointError(
        path="last.ckpt", problem="it ends early", remedy="use another."
    ): "Checkpoint 'last.ckpt': it ends early.\n  Fix: use another.",
    errors.ContractError(
        subject="MyStrategy", problems=("barrier waits: no", "it pickles: no")
    ): "MyStrategy breaks 2 rules of its contract.\n  Seen: barrier waits: no\n        it pickles: no",
}
"""The whole text of each error."""
BUILTINS: dict[type[Exception], tuple[type[errors.RankwiseError], ...]] = {
    AssertionError: (errors.ContractError,),
    AttributeError: (errors.MissingAttributeError,),
    ConnectionError: (errors.NodesLostError,),
    FloatingPointError: (errors.NonFiniteLossError,),
    ImportError: (errors.MissingExtraError, errors.MissingNameError),
    KeyError: (errors.UnknownStrategyError,),
    RuntimeError: (
        errors.LaunchRefusedError,
        errors.LifecycleError,
        errors.WorkerRaisedError,
        errors.WorkerExitedError,
        errors.WorkerKilledError,
        errors.ProcessGroupError,
        errors.PeerAuthenticationError,
        errors.RankMismatchError,
        errors.WorkerTimedOutError,
        errors.CollectiveMismatchError,
        errors.RankZeroFailedError,
        errors.UnevenInputsError,
        errors.UnusedParametersError,
        errors.CheckpointError,
    ),
    TimeoutError: (errors.RendezvousTimeoutError, errors.StopAgreementError),
    TypeError: (errors.InvalidTypeError, errors.UnknownArgumentError, errors.NotPicklableError),
    ValueError: (
        errors.ConfigurationError,
        errors.UnknownNameError,
        errors.InvalidArgumentError,
        errors.DuplicateNameError,
        errors.WorldSizeMismatchError,
        errors.EnvironmentVariableError,
        errors.UnshardableLoaderError,
        errors.TensorMismatchError,
    ),
}
"""What a user would catch without knowing the library."""


def test_every_error_has_a_case() -> None:
    """No public error is missing above, but for those that only others derive from."""
    names = [cls.__name__ for classes in BUILTINS.values() for cls in classes]
    assert sorted(names) == sorted(type(error).__name__ for error in TEXTS)
    assert {*names, "RankwiseError", "WorkerError"} == set(public_errors(MODULES["rankwise.errors"]))


@pytest.mark.parametrize("error", TEXTS, ids=lambda error: type(error).__name__)
def test_text(error: errors.RankwiseError) -> None:
    """It is the sentence, what was seen, and what to do; the repr is one line. Fields survive pickling."""
    assert str(error) == TEXTS[error]
    assert repr(error) == f"<{type(error).__name__}: {TEXTS[error].splitlines()[0]}>"
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    names = [field.name for field in dataclasses.fields(error)]
    assert [getattr(copy, name) for name in names] == [getattr(error, name) for name in names]


def test_derives_from_the_builtin() -> None:
    """A user may catch the builtin, or everything of ours."""
    for builtin, classes in BUILTINS.items():
        for cls in classes:
            assert issubclass(cls, builtin)
            assert issubclass(cls, errors.RankwiseError)


def test_fields_are_kept() -> None:
    """What an error was built from can be read from it; where nothing was seen, nothing is shown as seen."""
    error = errors.WorkerRaisedError(
        **WHERE, exception_type="ValueError", exception_message="nan", stopped=(0,)
    )
    assert (error.global_rank, error.local_rank, error.node_rank, error.pid) == (2, 0, 1, 41822)
    assert (error.exception_type, error.exception_message, error.stopped) == ("ValueError", "nan", (0,))
    bare = errors.WorkerRaisedError(**WHERE, exception_type="StopIteration")
    assert bare.summary().endswith("raised StopIteration.")
    assert "traceback of" not in bare.appendix()
    assert "Seen:" not in str(errors.WorldSizeMismatchError(devices=2, num_nodes=1, world_size=1))


def test_unknown_names() -> None:
    """The nearest is found whatever its case; one that is like none, or no string, gets no suggestion."""
    error = errors.UnknownNameError(kind="hook", name="zzz", known=("fp16",))
    assert error.summary() == "Unknown hook 'zzz'."
    error = errors.UnknownNameError(kind="precision", name=16, known=("16-mixed",))  # type: ignore[arg-type]
    assert error.summary() == "Unknown precision 16."
    expected = {"DDP_Spwan": "ddp_spawn", "dpp": "ddp", "ddp": "ddp", "quartz": None}
    for name, nearest in expected.items():
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


def test_bases_have_no_text_of_their_own() -> None:
    """They are there to be caught, not to be raised; `rankwise.RankwiseError` catches every error."""
    with pytest.raises(NotImplementedError):
        str(errors.RankwiseError())
    with pytest.raises(NotImplementedError):
        str(errors.WorkerError(**WHERE))
    assert rankwise.RankwiseError is errors.RankwiseError


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
    """An error about a user's value has a text, whatever the value's own raises, and crosses processes."""
    error = errors.InvalidTypeError(argument="devices", value=value, expected="a number")
    assert "whose repr() fails" in str(error)
    assert "devices" in str(error)
    assert "devices" in str(pickle.loads(pickle.dumps(error)))
    unpicklable = errors.InvalidArgumentError(argument="devices", value=lambda: 1, expected="a number")
    copy = pickle.loads(pickle.dumps(unpicklable))
    assert isinstance(copy, errors.InvalidArgumentError)
    assert "<lambda>" in str(copy)


def test_what_a_worker_says_to_do() -> None:
    """The caller's error repeats what the worker's own says to do."""
    own = errors.ConfigurationError(message="No.", facts="x is 1", remedy="set x=2.")
    error = errors.WorkerRaisedError(**WHERE, exception_type="ConfigurationError", exception_message=str(own))
    assert "\n  Fix: set x=2. Or start from the traceback of global_rank=2 below." in str(error)


def test_the_check_of_collectives_is_named() -> None:
    """By a worker killed as gloo aborts, and by a rank whose peer had ended; by no other error."""
    killed = errors.WorkerKilledError(**WHERE, signal_number=signal.SIGABRT)
    assert "DDPStrategy(check_collectives=True)" in str(killed)
    assert "check_collectives" not in str(errors.WorkerKilledError(**WHERE, signal_number=signal.SIGSEGV))
    for has_lost_peer in (True, False):
        raised = errors.WorkerRaisedError(**WHERE, exception_type="RuntimeError", has_lost_peer=has_lost_peer)
        assert ("DDPStrategy(check_collectives=True) names" in str(raised)) == has_lost_peer
