"""torch's flags: set within a stage, and restored after it."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.trainer.helpers import Line, fitted, loader, trainer

Flags = tuple[bool, bool, bool, str | None]


def flags() -> Flags:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    )


class Looking(Line):
    """Records the flags within each stage; may fail."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        self.flags: list[Flags] = []
        self.fails = fails

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.flags.append(flags())
        if self.fails:
            raise RuntimeError
        return super().training_step(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.flags.append(flags())


@pytest.mark.parametrize(
    ("arguments", "within"),
    [
        ({}, (False, False, False, None)),
        ({"deterministic": True}, (True, False, False, ":4096:8")),
        ({"deterministic": "warn"}, (True, True, False, ":4096:8")),
        ({"benchmark": True}, (False, False, True, None)),
    ],
)
def test_in_force_within_stages(tmp_path: Path, arguments: dict[str, Any], within: Flags) -> None:
    """They are set in every stage, and restored after it."""
    before, model, train = flags(), Looking(), trainer(tmp_path, max_steps=1, **arguments)
    train.fit(model, loader())
    train.test(model, loader(2))
    assert model.flags == [within, within]
    assert flags() == before == (False, False, False, None)


@pytest.mark.parametrize(("arguments", "within"), [({}, False), ({"benchmark": True}, True)])
def test_deterministic_excludes_benchmarking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], within: bool
) -> None:
    """With deterministic cuDNN chooses its algorithm without a benchmark, unless that is asked for.

    Flags are restored after an error too. A cuBLAS workspace that the user has set is used, and kept.
    """
    with pytest.raises(RuntimeError):
        fitted(tmp_path, Looking(fails=True), deterministic=True, benchmark=True)
    assert flags() == (False, False, False, None)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    model = Looking()
    fitted(tmp_path, model, max_steps=1, deterministic=True, **arguments)
    assert model.flags[0] == (True, False, within, ":16:8")
    assert flags() == (False, False, True, ":16:8")


def test_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`validate` and `test` print what they return, unless told not to."""
    train, model = trainer(tmp_path), Line()
    train.test(model, loader(), verbose=False)
    train.predict(model, loader())
    assert capsys.readouterr().out == ""
    [metrics] = train.test(model, loader())
    header, _, line = capsys.readouterr().out.splitlines()
    assert header.split(" | ") == ["Test metric", "DataLoader 0"]
    name, value = line.split("|")
    assert name.strip() == "test_loss"
    assert float(value) == pytest.approx(metrics["test_loss"])
    train.validate(model, loader())
    assert capsys.readouterr().out.startswith("Validate metric | DataLoader 0")
