"""Where torch's flight record goes: to where torch's variables say, or to a place of the user's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankwise.monitoring.flight_recorder import write_flight_record


@pytest.fixture(autouse=True)
def _is_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "50")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if not write_flight_record(0):
        pytest.skip("this torch has no flight record to write")


def test_it_is_the_users_alone(tmp_path: Path) -> None:
    """Not in a folder that all users share, and not for them to read."""
    path = Path(write_flight_record(3))
    assert path == tmp_path / "cache" / "torch" / "rankwise_flight_record_3"
    assert path.stat().st_mode & 0o777 == 0o600
    assert write_flight_record(3) == str(path)  # over the one before


def test_a_link_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else's link in the place of the file does not make this rank write to where it leads."""
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "record"))
    assert write_flight_record(1) == str(tmp_path / "record1")
    (tmp_path / "mine").write_text("precious")
    (tmp_path / "record2").symlink_to(tmp_path / "mine")
    assert write_flight_record(2) == ""
    assert (tmp_path / "mine").read_text() == "precious"
