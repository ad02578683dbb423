"""The rules of a contract; the contracts that need no job: of environments and checkpoint plug-ins."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn, final

import torch

from rankwise.checkpoint import CheckpointIO
from rankwise.checks import check_is_a, check_value
from rankwise.environments import ClusterEnvironment
from rankwise.errors import (
    CheckpointError,
    ContractError,
    EnvironmentVariableError,
    InvalidTypeError,
    RankwiseError,
    text_of,
)
from rankwise.ranks import RankInfo

_Kind = type[ClusterEnvironment]
_Variables = Mapping[str, str]

_FACTS = ("global_rank", "local_rank", "node_rank", "world_size", "local_world_size", "num_nodes")
NO_NUMBERS = (
    *("x", "-1", "+1", "1.0", "1e3", "0x1", "1_0", "1 2", "nan", "None", "${RANK}", "\x00"),
    *("\u0661", "\u00b2"),  # digits of other scripts
    *("99999999999999999999999", "9" * 5000),
)
"""What no variable for a rank or a size may have."""
_NO_PORTS = ("0", "65536", "-1", "x", "80.0", "9" * 30)
_DAMAGES = ("", "x", "-1", "0", "7", "99999999999999999999999", "\u0661")
_SECRET = "a value that no message may show"  # noqa: S105  of a variable that is not the environment's


@final
class Contract:
    """The rules for one object; `problems` has a line for each rule that is broken."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    @contextmanager
    def rule(self, sentence: str, kind: type[BaseException] | None = None, *texts: str) -> Iterator[None]:
        """Check one rule in the block: it is broken if the block raises, or does not raise a given kind."""
        try:
            with nullcontext() if kind is None else expect_error(kind, *texts):
                yield
        except Exception as error:  # noqa: BLE001  whatever the extension raises
            name = "" if type(error) is AssertionError else f"{type(error).__name__}: "
            self.problems.append(f"{sentence}: {name}{text_of(error)}")

    def check(self, subject: object) -> None:
        """Raise `ContractError` if a rule is broken; `subject` is what was checked."""
        if self.problems:
            raise ContractError(subject=repr(subject), problems=tuple(dict.fromkeys(self.problems)))


def expect(holds: object, problem: str) -> None:
    """Raise an `AssertionError` unless `holds`."""
    if not holds:
        raise AssertionError(problem)


def expect_equal(found: Any, expected: Any, tolerance: float = 0.0) -> None:
    """Raise an `AssertionError` unless two values, tensors within a tolerance, are equal."""
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    else:
        expect(found == expected, f"{found!r} instead of {expected!r}")


@contextmanager
def expect_error(kind: type[BaseException], *texts: str) -> Iterator[None]:
    """Raise an `AssertionError` unless the block raises such an exception, with these texts in its own."""
    try:
        yield
    except kind as error:
        for text in texts:
            expect(text in str(error), f"the {kind.__name__} does not name {text!r}: {error}")
    else:
        expect(False, f"there is no {kind.__name__}")


def check_environment(
    environment: type[ClusterEnvironment], variables: Mapping[str, str], ranks: RankInfo
) -> None:
    """Check that an environment reads what a launcher sets, and refuses what it cannot have set.

    Starts no process, and neither reads nor changes `os.environ`.

    Args:
        environment: the class.
        variables: the variables that the launcher sets for one process, not global rank 0.
        ranks: that process's ranks.

    Raises:
        ContractError: with a line for each rule that the environment breaks.
        InvalidArgumentError, InvalidTypeError: for impossible arguments.
    """
    given: Any = environment
    is_environment = isinstance(given, type) and issubclass(given, ClusterEnvironment)
    expected = "a subclass of ClusterEnvironment"
    check_value("environment", environment, is_environment, expected, error=InvalidTypeError)
    check_is_a("ranks", ranks, RankInfo)
    check_value("ranks", ranks, ranks.global_rank != 0, "the ranks of a process that is not global rank 0")
    contract = Contract()
    _environment_facts(contract, environment, variables, ranks)
    _environment_missing(contract, environment, variables, ranks)
    _environment_damaged(contract, environment, variables)
    read, name = environment({**variables, "OTHER_SECRET": _SECRET}), environment.__name__
    with contract.rule("its repr has the class and its variables, and nobody else's"):
        expect(repr(read).startswith(name), f"{read!r} does not begin with {name}")
        expect_equal(read.seen(), dict(variables))
        expect(_SECRET not in repr(read), f"{read!r} shows OTHER_SECRET")
    contract.check(environment)


def _environment_facts(contract: Contract, kind: _Kind, variables: _Variables, ranks: RankInfo) -> None:
    with contract.rule("it has a name"):
        expect(kind.name, "name is empty")
    with contract.rule("it is detected by its variables"):
        expect_equal(kind.detect(variables), True)
    with contract.rule("the ranks are right, all at once and one by one"):
        expect_equal(kind(variables).ranks, ranks)
        for fact in _FACTS:
            expect_equal(getattr(kind(variables), fact), getattr(ranks, fact))
    with contract.rule("reading changes nothing, and later changes do not reach it"):
        own = dict(variables)
        read = kind(own)
        expect_equal(own, dict(variables))
        own.clear()
        expect_equal(read.ranks, ranks)
    with contract.rule("it is not detected where no variable is set, and names those that it needs"):
        expect_equal(kind.detect({}), False)
        expect(kind.missing({}), "missing({}) is empty")


def _environment_missing(contract: Contract, kind: _Kind, variables: _Variables, ranks: RankInfo) -> None:
    for name, blank in itertools.product(variables, (None, "", " \t\n")):
        others = {key: value for key, value in variables.items() if key != name}
        given = others if blank is None else {**others, name: blank}
        how = "is not set" if blank is None else f"is {blank!r}"
        with contract.rule(f"where {name} {how}, it is not detected, an error says so, or nothing changes"):
            if not kind.missing(given):
                expect_equal(kind(given).ranks, ranks)
            elif not kind.detected_markers(given):
                expect_equal(kind.detect(given), False)
            else:
                with expect_error(EnvironmentVariableError, f"{name} is not set"):
                    kind.detect(given)


def _environment_damaged(contract: Contract, kind: _Kind, variables: _Variables) -> None:
    table = kind.table(variables)
    numbers = [table[fact] for fact in _FACTS if fact in table]
    refused = "is refused by an error that names it"
    for name, text in itertools.product(numbers, NO_NUMBERS):
        with contract.rule(f"{name}={text[:30]!r} {refused}", EnvironmentVariableError, name):
            kind.detect({**variables, name: text})
    port = table.get("main_port", "MASTER_PORT")
    for text in _NO_PORTS:
        with contract.rule(f"{port}={text!r} {refused}", EnvironmentVariableError, port):
            kind({**variables, port: text}).main_port  # noqa: B018  the property raises
    for one, two in itertools.combinations(numbers, 2):
        for first, second in itertools.product(_DAMAGES, repeat=2):
            with contract.rule(f"{one}={first!r} with {two}={second!r} is accepted, or an error of rankwise"):
                try:
                    kind.detect({**variables, one: first, two: second})
                except RankwiseError:
                    continue


class _NotStored:
    """Cannot be pickled, nor stored in any other way."""

    def __reduce__(self) -> NoReturn:
        raise TypeError("this object cannot be stored")


def _checkpoint(step: int) -> dict[str, Any]:
    layers = [{"weight": torch.arange(6.0).reshape(2, 3) + step, "kind": "linear", "on": True, "none": None}]
    return {"global_step": step, "layers": layers, "half": torch.ones(2, dtype=torch.bfloat16)}


def check_checkpoint_io(checkpoint_io: CheckpointIO, folder: str | os.PathLike[str]) -> None:
    """Check that a plug-in keeps what was written, replaces it whole, and reports what is missing or fails.

    Mutates: the folder, where it writes and removes three checkpoints.

    Args:
        checkpoint_io: the plug-in.
        folder: where to write: a folder without checkpoints, or an address such as `"memory://tests"`.

    Raises:
        ContractError: with a line for each rule that the plug-in breaks.
        InvalidTypeError: for an object that is no `CheckpointIO`.
    """
    check_is_a("checkpoint_io", checkpoint_io, CheckpointIO)
    contract = Contract()
    first, second, link = (f"{os.fspath(folder)}/{name}.ckpt" for name in ("first", "second", "link"))
    _checkpoint_reading(contract, checkpoint_io, first, second)
    _checkpoint_failures(contract, checkpoint_io, first)
    _checkpoint_folder(contract, checkpoint_io, folder, (first, second, link))
    for path in (first, second, link):
        with contract.rule("a checkpoint that was removed is missing; removing it again is no error"):
            for _ in range(2):
                checkpoint_io.remove_checkpoint(path)
                checkpoint_io.teardown()
            with expect_error(CheckpointError):
                checkpoint_io.load_checkpoint(path)
    contract.check(checkpoint_io)


def _save(checkpoint_io: CheckpointIO, checkpoint: dict[str, Any], path: str) -> None:
    checkpoint_io.save_checkpoint(checkpoint, path)
    checkpoint_io.teardown()  # as at the end of a job: it waits for what is written in the background


def _expect_step(checkpoint_io: CheckpointIO, path: str, step: int) -> None:
    found, expected = checkpoint_io.load_checkpoint(path), _checkpoint(step)
    [layer], [expected_layer] = found.pop("layers"), expected.pop("layers")
    for mine, theirs in ((found, expected), (layer, expected_layer)):
        expect_equal(list(mine), list(theirs))
        for name, value in theirs.items():
            expect_equal(mine[name], value)


def _checkpoint_reading(contract: Contract, checkpoint_io: CheckpointIO, first: str, second: str) -> None:
    with contract.rule("a checkpoint that is missing is a CheckpointError", CheckpointError):
        checkpoint_io.load_checkpoint(first)
    with contract.rule("what was saved is loaded: containers, tensors with their dtype, other values"):
        _save(checkpoint_io, _checkpoint(1), first)
        _expect_step(checkpoint_io, first, 1)
    with contract.rule("a checkpoint beside it is another one"):
        _save(checkpoint_io, _checkpoint(2), second)
        _expect_step(checkpoint_io, second, 2)
        _expect_step(checkpoint_io, first, 1)
    with contract.rule("a checkpoint at the same path replaces it"):
        _save(checkpoint_io, _checkpoint(3), first)
        _expect_step(checkpoint_io, first, 3)
    with contract.rule("a checkpoint is written as it was when save_checkpoint was called"):
        changed = _checkpoint(4)
        checkpoint_io.save_checkpoint(changed, second)
        changed["layers"][0]["weight"].zero_()
        checkpoint_io.teardown()
        _expect_step(checkpoint_io, second, 4)


def _checkpoint_failures(contract: Contract, checkpoint_io: CheckpointIO, path: str) -> None:
    sentence = "a checkpoint that cannot be written is a CheckpointError, in teardown() at the latest"
    with contract.rule(sentence, CheckpointError):
        _save(checkpoint_io, {**_checkpoint(5), "bad": _NotStored()}, path)
    with contract.rule("a save that has failed leaves the previous checkpoint"):
        _expect_step(checkpoint_io, path, 3)


def _checkpoint_folder(
    contract: Contract, checkpoint_io: CheckpointIO, folder: str | os.PathLike[str], paths: tuple[str, ...]
) -> None:
    first, second, link = paths
    with contract.rule("has_checkpoint and list_checkpoints find what was saved, and nothing else"):
        expect_equal([checkpoint_io.has_checkpoint(path) for path in (first, second)], [True, True])
        expect_equal(checkpoint_io.has_checkpoint(f"{first}.other"), False)
        expect_equal(sorted(checkpoint_io.list_checkpoints(folder)), ["first.ckpt", "second.ckpt"])
        expect_equal(dict(checkpoint_io.list_checkpoints(f"{os.fspath(folder)}/none")), {})
    with contract.rule("link_checkpoint makes a checkpoint available at another path"):
        checkpoint_io.link_checkpoint(first, link)
        checkpoint_io.teardown()
        _expect_step(checkpoint_io, link, 3)
    with contract.rule("it stays there when the first one is replaced"):
        _save(checkpoint_io, _checkpoint(6), first)
        _expect_step(checkpoint_io, link, 3)
        _expect_step(checkpoint_io, first, 6)
