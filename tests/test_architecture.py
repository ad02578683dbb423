"""The rules of the house, read off the source: directions of import, no cycles, what every error needs."""

import functools
import importlib
import re
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import architecture
from tests.helpers.architecture import Module, read_package

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "src" / "rankwise"
MODULES = read_package(PACKAGE)
ABOVE_THE_ERRORS = [module for name, module in MODULES.items() if name != "rankwise.errors"]
ERRORS = architecture.public_errors(MODULES["rankwise.errors"])

LINES = 600
FILES = 14
FUNCTION_LINES = 20  # of nine functions in ten, docstrings aside
LONGER = {"rankwise.errors": 900}  # one tree, which is read as a whole; its classes are a few lines each


# ------------------------------------------------------------------------------------- rankwise itself


# Tables of modules that are imported when they are used, or that are known by name in a stack of frames.
HOMES = ("", ".callbacks", ".launchers.commands", ".loggers", ".lightning", ".testing")
TABLES = {
    **{f"rankwise{name}": "_HOMES" for name in HOMES},
    "rankwise.launchers.multiprocess": "PRELOAD",
    "rankwise.process_group.interception": "_INNER_MODULES",
}
RULES: dict[str, tuple[Any, ...]] = {
    "no module imports from a part above it, or from a neighbouring leg": (architecture.wrong_directions,),
    "no module imports itself by way of others, inside functions and for types too": (architecture.cycles,),
    "a private module is imported by its own folder only": (architecture.private_imports,),
    "a string names a module in a table only, where it exists": (architecture.modules_in_strings, TABLES),
    "every package has an `__all__`": (architecture.without_all,),
    "no public name is defined in two files": (architecture.names_with_several_meanings,),
    "nothing that rankwise relies on disappears under `python -O`": (architecture.bare_asserts,),
    "`hasattr` is used for a stated reason only": (architecture.unexplained_hasattr,),
    "a file that has grown has more than one role": (architecture.long_files, LINES, LONGER),
    "a folder of many files has more than one subject": (architecture.crowded_folders, FILES),
    "the first line of every file is a sentence": (architecture.unroled_files,),
}


@pytest.mark.parametrize("rule", RULES)
def test_rules(rule: str) -> None:
    """No module breaks a rule."""
    find, *settings = RULES[rule]
    assert find(MODULES, *settings) == []


@pytest.mark.parametrize("name", [name for name, module in MODULES.items() if "\n__all__ = " in module.text])
def test_public_names_exist(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every name in `__all__` is there."""
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # importing Lightning sets it
    module = importlib.import_module(name)
    missing = [public for public in getattr(module, "__all__", []) if getattr(module, public, None) is None]
    assert missing == []


def test_functions_are_short() -> None:
    """Nine functions in ten can be read at once."""
    lengths = architecture.function_lengths(MODULES)
    assert lengths[len(lengths) * 9 // 10] < FUNCTION_LINES


# Names that the code once had for these things; see docs/glossary.md for today's.
METAPHORS = re.compile(
    r"whereabouts|last_?words|letting_go|echo_of|(?<!progress_bar_)pulse(?!_style)|\bseat\b", re.IGNORECASE
)  # rich has a style for bars of unknown length, "pulse"
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]


def test_no_metaphors() -> None:
    """Code and pages use the standard terms."""
    paths = [*PAGES, *(module.path for module in MODULES.values())]
    assert {path: found for path in paths if (found := METAPHORS.findall(path.read_text()))} == {}


def test_every_error_is_in_the_tree_and_public() -> None:
    """The tree on top of the file has every class, below its own base; so has `__all__`."""
    errors = MODULES["rankwise.errors"]
    assert architecture.tree_of_errors(errors) == architecture.bases_of_errors(errors)
    assert set(ERRORS) == set(architecture.bases_of_errors(errors))


def test_errors_are_documented() -> None:
    """Every public error has its place in docs/failures.md."""
    words = (REPOSITORY / "docs" / "failures.md").read_text().replace("`", " ").split()
    assert set(ERRORS) - set(words) == set()


ONLY_BASES = {"RankwiseError", "WorkerError"}  # they have no text of their own
BETWEEN_RANKS = {
    *("CollectiveMismatchError", "NodesLostError", "PeerAuthenticationError", "ProcessGroupError"),
    *("RankMismatchError", "RankZeroFailedError", "RendezvousTimeoutError", "StopAgreementError"),
    *("TensorMismatchError", "UnevenInputsError", "UnusedParametersError", "WorkerExitedError"),
    *("WorkerKilledError", "WorkerRaisedError", "WorkerTimedOutError"),
}


@functools.cache
def errors_expected(*folders: str) -> set[str]:
    """Return what the tests in these folders fail without, but for the two files that name every error."""
    not_counted = {Path(__file__), REPOSITORY / "tests" / "unit" / "test_errors.py"}
    paths = {path for folder in folders for path in (REPOSITORY / "tests" / folder).rglob("test_*.py")}
    return architecture.errors_expected(paths - not_counted)


def test_errors_are_provoked() -> None:
    """Every public error is demanded by a test; by one with real ranks where it is theirs."""
    assert set(ERRORS) - ONLY_BASES - errors_expected(".") == set()
    assert BETWEEN_RANKS - errors_expected("process", "cluster") == set()


def test_every_error_is_raised() -> None:
    """No public error is there for nothing, but for the bases of others."""
    errors = importlib.import_module("rankwise.errors")
    bases = {base.__name__ for name in ERRORS for base in getattr(errors, name).__mro__[1:]}
    assert set(ERRORS) - bases - architecture.raised_errors(ABOVE_THE_ERRORS, ERRORS) == set()


def test_test_folders_are_packages() -> None:
    """Two test files may have one name, and workers can import what a test defines."""
    folders = {path.parent for path in (REPOSITORY / "tests").rglob("*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


# ------------------------------------------------------------------------------------- the checks themselves


def plant(folder: Path, sources: Mapping[str, str]) -> dict[str, Module]:
    """Write a package named `house`, of files given by their path without `.py`."""
    for name, source in {"__init__": "", **sources}.items():
        path = folder / "house" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
    return read_package(folder / "house")


LOOP = "house.trainer.loop"
FOR_TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:"
TYPES_ONLY = f"{FOR_TYPES}\n    import {LOOP}\n"
IN_A_METHOD = "class A:\n    def f(self):\n        if self:\n            from house import registry"
BY_NAME = f"import importlib\nimportlib.import_module('{LOOP}')"


@pytest.mark.parametrize(
    ("importer", "source", "imported"),
    [
        ("errors", "import house.ranks", "house.ranks"),
        ("ranks", "from house.errors import SomeError", None),
        ("data/shard", "from house.strategies import Strategy", "house.strategies"),
        ("data/shard", f"def f():\n    import {LOOP}", LOOP),
        ("data/shard", "from ..registry import table", "house.registry"),
        ("data/shard", "from . import strategies", None),
        ("data/shard", "import house", "house"),
        ("data/shard", "from house.precision import base", "house.precision.base"),
        ("data/shard", "from house.process_group import base", None),
        ("process_group/base", "from house.data import shard", "house.data.shard"),
        ("launchers/spawn", "from house.process_group import base", None),
        ("strategies/ddp", BY_NAME, LOOP),
        ("strategies/ddp", TYPES_ONLY, LOOP),
        ("callbacks/base", f"{FOR_TYPES}\n    from house.trainer import Trainer", None),
        ("callbacks/base", "from house.trainer import Trainer", "house.trainer"),
        ("callbacks/base", TYPES_ONLY, LOOP),
        ("strategies/ddp", f"{TYPES_ONLY}else:\n    import {LOOP}", LOOP),
        ("strategies/ddp", IN_A_METHOD, "house.registry"),
        ("strategies/ddp", "import os.path, json", None),
    ],
)
def test_wrong_directions_are_found(tmp_path: Path, importer: str, source: str, imported: str | None) -> None:
    """An import upwards is found in every spelling, for types too, but for the Trainer that hooks take."""
    names = ("errors", "ranks", "registry", "data/__init__", "strategies/__init__", "trainer/loop")
    more = ("precision/base", "process_group/__init__", "data/shard", "trainer/__init__")
    modules = plant(tmp_path, {**dict.fromkeys((*names, *more), ""), importer: source})
    name = importer.replace("/", ".")
    assert architecture.wrong_directions(modules) == (
        [f"house.{name} imports {imported}"] if imported else []
    )


def test_a_part_without_a_place_is_found(tmp_path: Path) -> None:
    """A new folder or file right under the package must be given a place in the order."""
    found = architecture.wrong_directions(plant(tmp_path, {"cellar/wine": ""}))
    assert found == ["house.cellar.wine has no place in MAY_IMPORT: give 'cellar' one"]


FINDINGS: dict[str, tuple[Callable[[dict[str, Module]], list[Any]], dict[str, str], list[Any]]] = {
    "a cycle, once, one that is closed inside a function too; but no shared import": (
        architecture.cycles,
        {
            "a": "from house import b, d",
            "b": "def f():\n    from house.c import x",
            "c": "import house.a, house.d",
            "d": "",
        },
        ["house.a -> house.b -> house.c -> house.a"],
    ),
    "a package without `__all__`, but no module without one": (
        architecture.without_all,
        {"a/__init__": "__all__ = ['x']", "b/__init__": "x = 1", "c": "x = 1"},
        ["house", "house.b"],
    ),
    "two meanings of a function, class or constant, but not of private names and type variables": (
        architecture.names_with_several_meanings,
        {
            "a": "T = TypeVar('T')\n_x = y = 1\ndef f():\n    z = 1",
            "b": "T = TypeVar('T')\n_x = 1\nclass y: ...\nz: int = 1",
            "c": "async def f(): ...",
        },
        ["f: house.a, house.c", "y: house.a, house.b"],
    ),
    "an import of a private module, but not by its neighbours and its own package": (
        architecture.private_imports,
        {
            "a/__init__": "from house.a import _b",
            "a/_b": "",
            "a/c": "from house.a._b import x",
            "d/__init__": "",
            "d/e": "from house.a import _b",
        },
        ["house.d.e imports house.a._b"],
    ),
    "a module's name in any string but in the table, where it must be a module's": (
        lambda modules: architecture.modules_in_strings(modules, {"house.a": "HOMES"}),
        {"a": "HOMES = {'x': 'house.b', 'y': 'house.lost'}\nOTHER = 'house.b'\n'house'", "b": ""},
        ["house/a.py:1: there is no 'house.lost'", "house/a.py:2: 'house.b'"],
    ),
    "more files than the limit, without `__init__`": (
        lambda modules: architecture.crowded_folders(modules, 1),
        {"a/__init__": "", "a/b": "", "a/c": "", "d/e": ""},
        ["house/a: 2 files"],
    ),
    "the length of functions, without the docstring; inner ones count by themselves": (
        architecture.function_lengths,
        {"a": "def f():\n    '''Two\n    lines.'''\n    def g(): ...\n    return g"},
        [1, 3],
    ),
    "an assert wherever it stands, but not the word in a string": (
        architecture.bare_asserts,
        {"a": "def f(x):\n    if x:\n        assert x, 'assert'", "b": "'assert x'"},
        ["house/a.py:3"],
    ),
    "`hasattr` without a reason on its line or above it": (
        architecture.unexplained_hasattr,
        {"a": "\nhasattr(a, 'x')\n\nhasattr(a, 'y')  # why: old\n# why: old\nhasattr(a, 'z')\n"},
        ["house/a.py:2"],
    ),
    "a file with more lines than the last length that is allowed": (
        lambda modules: architecture.long_files(modules, 4, {"house.c": 5}),
        {"a": "\n" * 4, "b": "\n" * 5, "c": "\n" * 5},
        ["house.b: 5 lines"],
    ),
    "a file that begins with code": (
        architecture.unroled_files,
        {"__init__": '"""A house."""', "a": "import os", "b": '"""Say what."""'},
        ["house.a"],
    ),
}


@pytest.mark.parametrize("what", FINDINGS)
def test_what_is_found(tmp_path: Path, what: str) -> None:
    """Each check finds what it is for, and nothing else."""
    find, sources, expected = FINDINGS[what]
    found = find(plant(tmp_path, sources))
    assert [str(each).replace(f"{tmp_path}/", "") for each in found] == [str(each) for each in expected]


def test_errors_are_found(tmp_path: Path) -> None:
    """Public exception classes are told from helpers and private ones, use from import."""
    errors = """
        __all__ = ["Base", "Leaf", "Unused", "helper"]
        class Base(Exception): ...
        class Leaf(Base, ValueError): ...
        class Unused(Base): ...
        class _Private(Base): ...
        def helper(): ...
    """
    user = "from house.errors import Unused, Leaf\nraise Leaf()"
    modules = plant(tmp_path, {"errors": errors, "a": user})
    names = architecture.public_errors(modules["house.errors"])
    assert names == ["Base", "Leaf", "Unused"]
    assert architecture.raised_errors([modules["house.a"]], names) == {"Leaf"}


def test_the_tree_of_errors_is_read(tmp_path: Path) -> None:
    """Each name has the one above it as its parent, and the builtin in brackets."""
    errors = '''
        """The exceptions.

        Base
        |-- Middle (ValueError)      some words
        |   `-- Leaf (KeyError)
        `-- Last
        """
        class Base(Exception): ...
        class Middle(Base, ValueError): ...
        class Leaf(Middle, KeyError): ...
        class Last(Base): ...
        class _Private(Base): ...
    '''
    module = plant(tmp_path, {"errors": errors})["house.errors"]
    tree = {"Base": (), "Middle": ("Base", "ValueError"), "Leaf": ("Middle", "KeyError"), "Last": ("Base",)}
    assert architecture.tree_of_errors(module) == tree
    assert architecture.bases_of_errors(module) == tree


def expected_by(folder: Path, source: str) -> set[str]:
    path = folder / "test_planted.py"
    path.write_text(source)
    return architecture.errors_expected([path])


@pytest.mark.parametrize(
    "source",
    [
        "with pytest.raises(Found): run()",
        "with raises(errors.Found, match='text'): run()",
        "with pytest.raises((Other, Found)): run()",
        "with pytest.raises(RuntimeError, match=r'raised Found: '): run()",
        "with pytest.raises(RuntimeError, match=Found.__name__): run()",
        "assert isinstance(error, Found)",
        "assert any(isinstance(error, (Other, Found)) for error in errors)",
        "assert type(error) is Found",
        "assert error.exception_type == Found.__name__",
        "assert 'Found: what happened' in result.stderr, result",
        "assert result.stderr.count('Found') == 2",
        "assert all(text.startswith('Found: ') for text in texts)",
    ],
)
def test_expected_errors_are_found(tmp_path: Path, source: str) -> None:
    """An error that a test fails without is found in every spelling."""
    assert "Found" in expected_by(tmp_path, source)


@pytest.mark.parametrize(
    "source",
    [
        '"""Docstring about Missed."""',
        "# Comment on Missed",
        "from errors import Missed",
        'SCRIPT = "from errors import Missed\\ntry: run()\\nexcept Missed: pass"',
        "try: run()\nexcept Missed: pass",
        "TABLE = {'how': Missed}",
        "Missed(), errors.Missed()",
        "assert str(Missed(path='x')) == 'text'",
        "assert str(errors.Missed(path='x')) == 'text'",
        "assert ok, 'Missed'",
        "assert not isinstance(error, Missed)",
        "assert 'Missed' not in result.stderr",
        "assert type(error) is not Missed",
    ],
)
def test_errors_only_mentioned_are_not_found(tmp_path: Path, source: str) -> None:
    """What stands in a test that does not fail without the error has provoked nothing."""
    assert "Missed" not in expected_by(tmp_path, source)
