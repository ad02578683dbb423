"""The tables of docs/migrating have every difference between Lightning's names and arguments and ours."""

import ast
import enum
import importlib
import inspect
import re
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from rankwise import Callback, DataModule, Fabric, StrategyRegistry, Trainer, TrainingModule
from rankwise.compatibility.names import CALLBACK_METHODS, MISSING_HOOKS, MISSING_NAMES, TRAINER_ARGUMENTS
from rankwise.errors import MissingNameError, RankwiseError
from rankwise.trainer import hooks
from tests.docs.test_migrating import PAGES, problems
from tests.helpers.needs import need_installed

need_installed("lightning")

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # what Lightning and its dependencies warn of
    pytest.mark.usefixtures("pl"),  # importing Lightning changes the environment
]

TABLES = "".join(page.read_text() for page in PAGES if page.name.startswith("differences_"))
HEADER = "| Lightning | rankwise | why | write |"


ELSEWHERE = ("DataLoader", "SimpleProfiler", "PyTorchProfiler", "RankwiseStrategy")
"""Classes that are not among the names of `test_migrating`."""


class Row(NamedTuple):
    """A line of a table: a section, and what is in its columns."""

    section: str
    lightning: str
    rankwise: str
    why: str
    write: str

    @property
    def code(self) -> str:
        """The code of the first column."""
        return " ".join(_code(self.lightning))


def _code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def _sections() -> Iterator[tuple[str, str]]:
    for text in TABLES.split("\n## ")[1:]:
        name, _, rest = text.partition("\n")
        yield name, rest


def _rows() -> Iterator[Row]:
    for section, text in _sections():
        is_here = False
        for line in text.splitlines():
            is_here = line == HEADER or (is_here and line.startswith("|"))
            if is_here and line not in (HEADER, "|---|---|---|---|"):
                cells = [cell.strip() for cell in line.strip("|").split(" | ")]
                yield Row(section, *cells)


ROWS = list(_rows())


def is_listed(*names: str) -> bool:
    """Return whether the code in the first column of a row has all these names."""
    patterns = [rf"(?<!\w){re.escape(name)}(?!\w)" for name in names]
    return any(all(re.search(pattern, row.code) for pattern in patterns) for row in ROWS)


def two_columns(first: str) -> dict[str, str]:
    """Return what a table of two columns says of each name in its first, whose header is `first`."""
    pattern = rf"^\| {first} \| write \|\n\|---\|---\|\n((?:\|.*\n)+)"
    [table] = re.findall(pattern, f"{TABLES}\n", re.MULTILINE)
    found: dict[str, str] = {}
    for line in table.splitlines():
        names, _, text = line.strip("| ").partition(" | ")
        found |= dict.fromkeys(_code(names), text.replace("`", ""))
    return found


def plain(remedies: Any) -> dict[str, str]:
    """Return remedies as a table has them."""
    return {name: text.replace("{value!r}", "...").replace("`", "") for name, text in remedies.items()}


# ------------------------------------------------------------------ the tables


def test_every_row_is_whole() -> None:
    """Each line has what Lightning does, what happens here, why, and what to write."""
    assert len(ROWS) > 150
    assert [row for row in ROWS if not all(row)] == []


def test_code_can_be_written() -> None:
    """What to write parses; the names, methods and arguments in it are ours."""
    no_code = re.compile(r"[\w.-]+$|pip |python |torchr")
    code = [code for row in ROWS for code in _code(row.write) if not no_code.match(code)]
    assert len(code) > 80
    found = [problem for each in code for problem in problems(each)]
    assert [each for each in found if not re.search(rf"({'|'.join(ELSEWHERE)}) is nowhere", each)] == []


def test_refused_hooks() -> None:
    """The table of hooks that are refused is the code's."""
    tables = hooks.REFUSED.values()
    shown = two_columns("hook")
    for table in tables:
        expected = {name: text for name, text in plain(table).items() if "define it in" not in text}
        assert {name: shown.get(name) for name in expected} == expected
    assert shown.keys() <= {name for table in tables for name in table}


@pytest.mark.parametrize("kind", ["strategy", "precision", "environment", "launcher", "logger", "profiler"])
def test_refused_methods(kind: str) -> None:
    """So is that of the methods that are refused in strategies and in what they, or a Trainer, are given."""
    assert two_columns(f"method of an? {kind}") == plain(MISSING_HOOKS[kind])


def test_refused_methods_of_callbacks(pl: Any) -> None:
    """So is that of callbacks, with each public method that a callback of Lightning has, and ours lacks."""
    shown, own = two_columns("method of a callback"), importlib.import_module("rankwise.callbacks")
    assert shown == {name: text for table in CALLBACK_METHODS.values() for name, text in plain(table).items()}
    missing = {
        name
        for theirs, ours in ((getattr(pl.callbacks, each, None), getattr(own, each)) for each in own.__all__)
        for name in (public(theirs) - public(ours) if isinstance(theirs, type) else ())
        if inspect.isroutine(getattr(theirs, name)) and name not in shown
    }
    assert missing == set()


def test_missing_names() -> None:
    """So are those of names that do not exist, and of arguments of older versions and other libraries."""
    assert two_columns("name") == plain(MISSING_NAMES)
    assert two_columns("argument") == plain(TRAINER_ARGUMENTS)


# ------------------------------------------------------------------ Lightning's classes and ours


@pytest.fixture(scope="module")
def pl() -> Any:
    """Return `lightning.pytorch`."""
    return importlib.import_module("lightning.pytorch")


def public(owner: object) -> set[str]:
    """Return public names, without properties that only refuse."""
    kind = owner if isinstance(owner, type) else type(owner)
    members = {name: inspect.getattr_static(kind, name, None) for name in dir(owner) if name[0] != "_"}
    return {name for name, each in members.items() if not isinstance(each, property) or each.fget is not None}


def parameters(function: Any) -> tuple[dict[str, inspect.Parameter], bool]:
    """Return the parameters of a function that have names, and whether it takes others, too."""
    try:
        found = inspect.signature(function).parameters
    except (TypeError, ValueError):  # it has none
        return {}, True
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = {name: each for name, each in found.items() if each.kind not in kinds}
    takes_any = any(each.kind is each.VAR_KEYWORD for each in found.values())
    return {name: each for name, each in named.items() if name not in ("self", "cls")}, takes_any


def other_arguments(theirs: Any, ours: Any) -> list[str]:
    """Return the arguments that a function of ours does not have, or that have another default."""
    own, takes_any = parameters(ours)
    found = []
    for name, parameter in parameters(theirs)[0].items():
        if name not in own:
            found += [name] * (not takes_any)
        elif parameter.default is not parameter.empty:
            found += [name] * (_described(parameter.default) != _described(own[name].default))
    return found


def _described(default: Any) -> str:
    """Return a default value as text; functions, and values of an enumeration, by their names."""
    named = default.value if isinstance(default, enum.Enum) else default
    return named.__name__ if inspect.isfunction(named) else repr(named)


def test_arguments_of_the_trainer(pl: Any) -> None:
    """Each argument of Lightning's Trainer or its methods that we lack, or has another default, is listed."""
    others = other_arguments(pl.Trainer, Trainer)
    assert others
    assert [name for name in others if not is_listed(name)] == []
    assert _unlisted_arguments(pl.Trainer, Trainer) == []


def test_attributes_of_the_trainer(pl: Any) -> None:
    """Each public attribute that our Trainer lacks is in a table."""
    alone = importlib.import_module("lightning.pytorch.plugins.environments").LightningEnvironment()
    options: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "logger": False}
    theirs = pl.Trainer(plugins=[alone], **options)
    missing = public(theirs) - public(Trainer(**options))
    assert missing
    assert [name for name in sorted(missing) if not is_listed(name)] == []


CLASSES = [("LightningModule", TrainingModule), ("LightningDataModule", DataModule), ("Callback", Callback)]


@pytest.mark.parametrize(("name", "ours"), CLASSES)
def test_methods(pl: Any, name: str, ours: type[Any]) -> None:
    """Each public name of a class that ours lacks is in a table, and each argument of its methods."""
    theirs = getattr(pl, name)
    missing = {each for each in public(theirs) - public(ours) if not is_listed(each)}
    assert sorted(missing) == []
    assert _unlisted_arguments(theirs, ours) == []


def _unlisted_arguments(theirs: Any, ours: Any) -> list[tuple[str, str]]:
    methods = [name for name in public(theirs) & public(ours) if inspect.isroutine(getattr(theirs, name))]
    found = [
        (method, argument)
        for method in sorted(methods)
        for argument in other_arguments(getattr(theirs, method), getattr(ours, method))
    ]
    names = [(pair, pair[1:] if pair[1] == "pl_module" else pair) for pair in found]
    return [pair for pair, listed in names if not is_listed(*listed)]


def test_fabric() -> None:
    """So are those of Fabric."""
    theirs = importlib.import_module("lightning.fabric").Fabric
    missing = public(theirs) - public(Fabric(accelerator="cpu", devices=1))
    assert [name for name in sorted(missing) if not is_listed(name)] == []
    assert [name for name in other_arguments(theirs, Fabric) if not is_listed(name)] == []
    assert _unlisted_arguments(theirs, Fabric) == []


@pytest.mark.parametrize(
    "module",
    ["callbacks", "loggers", "plugins", "plugins.environments", "profilers", "strategies", "utilities"],
)
def test_modules(module: str) -> None:
    """Each public name of a module is ours, or refused and in a table; so is each argument of its classes."""
    theirs = importlib.import_module(f"lightning.pytorch.{module}")
    own = importlib.import_module(f"rankwise.lightning.{module}")
    missing, others = [], []
    for name in getattr(theirs, "__all__", None) or public(theirs):
        if name not in two_columns("name"):
            ours = _own(own, name)
            missing += [name] * (ours is None)
            others += _of_class(getattr(theirs, name), ours)
    assert missing == []
    assert [pair for pair in others if not is_listed(*pair)] == []


def _own(module: Any, name: str) -> Any:
    try:
        return getattr(module, name)
    except MissingNameError:
        return None


def _of_class(theirs: Any, ours: Any) -> list[tuple[str, str]]:
    if not isinstance(theirs, type) or not isinstance(ours, type):
        return []
    return [(theirs.__name__, name) for name in other_arguments(theirs, ours)]


def _precisions() -> list[str]:
    module = importlib.import_module("lightning.fabric.plugins.precision.precision")
    kinds = (module._PRECISION_INPUT_STR, module._PRECISION_INPUT_STR_ALIAS)
    return [value for kind in kinds for value in kind.__args__]


@pytest.mark.parametrize("argument", ["precision", "strategy", "accelerator", "profiler"])
def test_values(pl: Any, argument: str) -> None:
    """Each value of an argument that Lightning knows by name is accepted, or is in a table."""
    values = {
        "precision": _precisions(),
        "strategy": [name for name in pl.strategies.StrategyRegistry if not name.startswith("rankwise")],
        "accelerator": ["auto", "gpu", *pl.accelerators.AcceleratorRegistry],
        "profiler": ["simple", "advanced", "pytorch", "xla"],
    }[argument]
    refused = [value for value in values if not _is_accepted(argument, value)]
    assert [value for value in refused if not is_listed(argument, value)] == []


def _is_accepted(argument: str, value: str) -> bool:
    if argument == "strategy":
        return value in StrategyRegistry
    if value in ("cuda", "gpu"):  # refused where there is none
        return True
    options: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "logger": False, argument: value}
    try:
        Trainer(**options)
    except RankwiseError:
        return False
    return True


# ------------------------------------------------------------------ rows that are no longer true


def test_names_that_exist_by_now() -> None:
    """A row does not say of a name that it does not exist here, if it does."""
    owners = {"trainer": Trainer, "self": TrainingModule}
    found = []
    for row in ROWS:
        for code in _code(row.lightning) if re.match("do(es)? not exist", row.rankwise) else ():
            owner, _, name = code.partition(".")
            if owner in owners and name.isidentifier() and name in public(owners[owner]):
                found.append(code)
    assert found == []


def test_missing_names_that_exist_by_now() -> None:
    """No module of the namespace has a name of which the page says that it does not exist."""
    names = ("callbacks", "core", "fabric", "loggers", "plugins", "profilers", "strategies", "trainer")
    modules = [importlib.import_module(f"rankwise.lightning.{name}") for name in (*names, "utilities")]
    assert [name for name in MISSING_NAMES for module in modules if name in vars(module)] == []


def test_defaults_that_are_equal_by_now(pl: Any) -> None:
    """A row does not say of an argument of the Trainer that it has another default, if it has not."""
    rows = [row.lightning for row in ROWS if row.section == "Arguments of the Trainer"]
    names = {_code(row)[0] for row in rows if " by default" in row}
    assert names == set(other_arguments(pl.Trainer, Trainer))


def test_the_checks_can_fail() -> None:
    """A name that is in no row, an argument with another default, and code that does not parse, are found."""
    assert is_listed("num_sanity_val_steps")
    assert not is_listed("num_sanity_val_step")
    assert not is_listed("num_sanity_val_steps", "Fabric")
    assert other_arguments(lambda a, b=1, c=2: None, lambda a, b=3: None) == ["b", "c"]
    with pytest.raises(SyntaxError):
        ast.parse("Trainer(")
    with warnings.catch_warnings():
        assert "x" not in two_columns("hook")
