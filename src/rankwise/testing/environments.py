"""`check_environment`: the contract of a cluster environment."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from rankwise.checks import check_is_a, check_value
from rankwise.environments import ClusterEnvironment
from rankwise.errors import EnvironmentVariableError, InvalidTypeError, RankwiseError
from rankwise.ranks import RankInfo
from rankwise.testing.contract import Contract, expect, expect_equal, expect_error

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


def check_environment(
    environment: type[ClusterEnvironment],
    variables: Mapping[str, str],
    ranks: RankInfo,
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
    _check_facts(contract, environment, variables, ranks)
    _check_missing(contract, environment, variables, ranks)
    _check_damaged(contract, environment, variables)
    _check_messages(contract, environment, variables)
    contract.check(environment)


_Kind = type[ClusterEnvironment]
_Variables = Mapping[str, str]


def _check_facts(contract: Contract, kind: _Kind, variables: _Variables, ranks: RankInfo) -> None:
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


def _check_missing(contract: Contract, kind: _Kind, variables: _Variables, ranks: RankInfo) -> None:
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


def _check_damaged(contract: Contract, kind: _Kind, variables: _Variables) -> None:
    table = kind.table(variables)
    numbers = [table[fact] for fact in _FACTS if fact in table]
    for name, text in itertools.product(numbers, NO_NUMBERS):
        with (
            contract.rule(f"{name}={text[:30]!r} is refused by an error that names it"),
            expect_error(EnvironmentVariableError, name),
        ):
            kind.detect({**variables, name: text})
    port = table.get("main_port", "MASTER_PORT")
    for text in _NO_PORTS:
        with (
            contract.rule(f"{port}={text!r} is refused by an error that names it"),
            expect_error(EnvironmentVariableError, port),
        ):
            kind({**variables, port: text}).main_port  # noqa: B018  the property raises
    for one, two in itertools.combinations(numbers, 2):
        for first, second in itertools.product(_DAMAGES, repeat=2):
            with contract.rule(f"{one}={first!r} with {two}={second!r} is accepted, or an error of rankwise"):
                try:
                    kind.detect({**variables, one: first, two: second})
                except RankwiseError:
                    continue


def _check_messages(contract: Contract, kind: _Kind, variables: _Variables) -> None:
    read = kind({**variables, "OTHER_SECRET": _SECRET})
    with contract.rule("its repr has the class and its variables, and nobody else's"):
        expect(repr(read).startswith(kind.__name__), f"{read!r} does not begin with {kind.__name__}")
        expect_equal(read.seen(), dict(variables))
        expect(_SECRET not in repr(read), f"{read!r} shows OTHER_SECRET")
