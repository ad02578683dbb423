"""Loggers by name, with options: for a Trainer and a Fabric."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rankwise.errors import DuplicateNameError, InvalidTypeError, UnknownArgumentError, UnknownNameError
from rankwise.fabric import Fabric
from rankwise.loggers import CSVLogger, Logger, LoggerRegistry
from tests.helpers.raising import raises
from tests.unit.trainer.helpers import trainer


class Silent(Logger):
    """Writes nothing."""

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None: ...

    def log_hyperparams(self, params: Any) -> None: ...


def test_a_trainers_loggers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name in any case, with options; the folder is the option's, the Trainer's or, in Fabric, this one."""
    made = trainer(tmp_path, logger=["CSV:name=digits,version=3", Silent(), "csv:save_dir=elsewhere"]).loggers
    assert [type(each) for each in made] == [CSVLogger, Silent, CSVLogger]
    assert made[0].log_dir == str(tmp_path / "digits" / "version_3")
    assert made[2].save_dir == str(Path("elsewhere").absolute())
    monkeypatch.chdir(tmp_path)
    [own] = Fabric(accelerator="cpu", devices=1, loggers="csv").loggers
    assert (type(own), own.save_dir) == (CSVLogger, str(tmp_path))


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("cvs", UnknownNameError, "Unknown logger 'cvs'. Did you mean 'csv'?"),
        ("csv:versoin=3", UnknownArgumentError, "Did you mean 'version'"),
        ("csv:name", InvalidTypeError, "name:option=value"),
    ],
)
def test_wrong_names(name: str, error: type[Exception], text: str, tmp_path: Path) -> None:
    """A name that is unknown, or has wrong options, is refused."""
    raises(error, re.escape(text), trainer, tmp_path, logger=name)


def test_registering(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's logger can have a name; what it makes must be a logger."""
    monkeypatch.setattr(LoggerRegistry, "_entries", dict(LoggerRegistry._entries))
    LoggerRegistry.register("Silent", Silent, "writes nothing")
    assert LoggerRegistry.describe("SILENT") == "writes nothing"
    assert type(trainer(tmp_path, logger="silent").logger) is Silent
    raises(DuplicateNameError, "Logger 'silent' is registered", LoggerRegistry.register, "silent", Silent)
    raises(InvalidTypeError, "a subclass of Logger", LoggerRegistry.register, "text", "csv")
    LoggerRegistry.register("number", lambda: 3)  # type: ignore[arg-type,return-value]  # wrong on purpose
    raises(InvalidTypeError, "logger 'number'", trainer, tmp_path, logger="number")
