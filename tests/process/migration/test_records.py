"""What Lightning gives is recorded for these scripts and versions, and differences from it are found."""

from pathlib import Path

import pytest
import torch

from tests.helpers.needs import need_installed
from tests.process.migration import records
from tests.process.migration.record import NAMES, sources
from tests.process.migration.records import differences, summary


def test_every_script_is_recorded() -> None:
    """There is a record for each, and for the hooks."""
    assert records.names() == sorted([*NAMES, "hooks"])


@pytest.mark.parametrize("name", [*NAMES, "hooks"])
def test_a_record_is_of_today(name: str) -> None:
    """It was made with the script as it is, and with the versions that are installed."""
    need_installed("lightning")
    assert records.problem(name, sources(name)) is None


def test_older_records_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record of another script, or of other versions, names the command that makes a new one."""
    monkeypatch.setattr(records, "RECORDS", tmp_path)
    monkeypatch.setattr(records, "versions", lambda: {"torch": "2.1.0"})
    script = tmp_path / "script.py"
    script.write_text("first")
    records.write("script", [script], {"1": summary({"weights": torch.ones(2)})})
    assert records.problem("script", [script]) is None
    script.write_text("second")
    assert f"Fix: {records.COMMAND} script" in str(records.problem("script", [script]))
    script.write_text("first")
    monkeypatch.setattr(records, "versions", lambda: {"torch": "2.0.0"})
    assert f"Fix: {records.COMMAND}" in str(records.problem("script", [script]))


def test_differences_are_found() -> None:
    """The comparison finds values that differ, that are missing, and lists of other lengths."""
    first = {"w": torch.ones(2), "m": {"a": 1.0, "b": 2.0}, "l": [1, 2], "t": "x"}
    second = {"w": torch.tensor([1.0, 1.1]), "m": {"a": 1.1, "c": 2.0}, "l": [1, 3], "t": "y"}
    assert differences(first, first) == []
    found = [line.split()[0].rstrip(":") for line in differences(first, second)]
    assert found == ["/w/1", "/m/a", "/m/b", "/m/c", "/l/1", "/t"]
    assert differences([1], [1, 2]) == [": [1] became [1, 2]"]
    assert differences(torch.ones(2), torch.ones(3)) != []


@pytest.mark.parametrize("index", [0, 1, 500, 998, 999])
def test_every_entry_counts(index: int) -> None:
    """An entry of a large tensor that differs by a hundredth is found, whether it is recorded or not."""
    first = torch.linspace(-1, 1, 1000)
    second = first.clone()
    second[index] += 0.01
    assert differences(summary(first), summary(first)) == []
    assert differences(summary(first), summary(second)) != []
    assert differences(summary(first), summary(first.view(2, 500))) != []
