"""Names that installed packages add: found, listed, suggested, reported when broken; never in silence."""

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rankwise.errors import ConfigurationError, UnknownNameError
from rankwise.named_options import NameTable
from tests.helpers.installed import BROKEN, SHADOWED, TABLES, WORKING, installed_here


def fresh(group: str) -> NameTable[Any]:
    """Return a copy of a table, which the test may fill."""
    table = copy.copy(TABLES[group])
    table._entries, table._tried, table._broken = dict(table._entries), set(), {}
    return table


@pytest.fixture
def working(tmp_path: Path) -> Iterator[None]:
    with installed_here(tmp_path, WORKING):
        yield


each_name = pytest.mark.parametrize(
    ("group", "name", "typo"),
    [
        *(("strategies", "ddp_plug", "ddp_pulg"), ("strategies", "ddp_plug_small", "ddp_plug_smal")),
        *(("strategies", "ddp_brief", "ddp_breif"), ("environments", "plugenv", "plugen")),
        *(("comm_hooks", "halve", "hlave"), ("comm_hooks", "halve_named", "halve_name")),
        ("loggers", "plug_log", "plug_lug"),
    ],
)


@pytest.mark.usefixtures("working")
@each_name
def test_a_name_of_a_package(group: str, name: str, typo: str) -> None:
    """It is found in any case, is in the table, is listed, and is suggested for a typo."""
    assert fresh(group)[name.upper()] is not None
    assert name.title() in fresh(group)
    assert name in list(fresh(group))
    assert len(fresh(group)) > len(TABLES[group]._entries)
    with pytest.raises(UnknownNameError, match=f"Did you mean '{name}'"):
        fresh(group)[typo]


@pytest.mark.usefixtures("working")
def test_aliases_have_arguments_and_a_package() -> None:
    """Names carry arguments, and say their package; one that is removed is not found there again."""
    table: Any = fresh("strategies")
    assert table.create("DDP_plug_small").ddp_kwargs["bucket_cap_mb"] == 1
    assert table.create("ddp_brief:timeout=30").timeout.total_seconds() == 30
    described = {name: table.describe(name) for name in ("ddp_plug", "ddp_plug_small", "ddp_brief")}
    assert described == {
        "ddp_plug": "(package plug 1.2)",
        "ddp_plug_small": "small buckets (package plug 1.2)",
        "ddp_brief": "a short timeout (package plug 1.2)",
    }
    assert fresh("comm_hooks").describe("halve_named").endswith("(package plug 1.2)")
    assert fresh("loggers").describe("plug_log") == "(package plug 1.2)"
    table.remove("ddp_plug")
    assert "ddp_plug" not in table


@pytest.mark.parametrize(
    ("group", "name", "reason"),
    [
        ("strategies", "DDP_gone", "AttributeError: module 'plug' has no attribute 'Gone'."),
        ("strategies", "ddp_licence", "SystemExit: the licence has expired."),
        ("strategies", "ddp_factory", "or a function without arguments that returns"),
        ("environments", "gone", "AttributeError"),
        ("environments", "other_name", "with the attribute name = 'other_name'"),
        ("environments", "number", "expected a subclass of ClusterEnvironment"),
        ("comm_hooks", "gone", "AttributeError"),
        ("comm_hooks", "no_hook", "a function of two arguments"),
        ("loggers", "gone", "AttributeError"),
        ("loggers", "no_logger", "a subclass of Logger"),
    ],
)
def test_a_broken_entry_point(group: str, name: str, reason: str, tmp_path: Path) -> None:
    """By name it is an error each time, and no other is loaded; in a list each is a warning, once."""
    table = fresh(group)
    with installed_here(tmp_path, BROKEN):
        for _ in range(2):
            with pytest.raises(ConfigurationError) as caught:
                table[name]
            assert f"The entry point {name.lower()!r} of package plug 1.2 cannot be used" in str(caught.value)
            assert reason in str(caught.value)
            assert f"[rankwise.{group}] {name.lower()} = plug" in caught.value.seen()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            names = list(table)
            list(table)
    messages = [str(each.message) for each in seen]
    others = {point.rpartition(" = ")[0] for point in BROKEN.splitlines()} - {name.lower(), ""}
    of_group = [other for other in others if any(f"entry point {other!r}" in text for text in messages)]
    assert len(messages) == len(of_group) > 0
    assert names == sorted(TABLES[group]._entries)


@pytest.mark.parametrize(
    ("group", "name"),
    [("strategies", "ddp_spawn"), ("environments", "slurm"), ("comm_hooks", "noop"), ("loggers", "csv")],
)
@pytest.mark.parametrize("is_listed", [False, True])
def test_a_name_that_is_taken(group: str, name: str, is_listed: bool, tmp_path: Path) -> None:
    """A built-in name stays what it is, used or listed, with one warning that names the package."""
    points = SHADOWED.replace("slurm = plug:PlugEnvironment", "slurm = plug_slurm:Slurm")
    (tmp_path / "plug_slurm.py").write_text(
        "from rankwise import ClusterEnvironment\nclass Slurm(ClusterEnvironment):\n    name = 'slurm'\n"
    )
    table = fresh(group)
    with installed_here(tmp_path, points):
        with pytest.warns(UserWarning, match=f"(?i)of package plug 1.2 is not used for the name '{name}'"):
            assert list(table) if is_listed else table[name]
        assert table[name] is TABLES[group]._entries[name]
