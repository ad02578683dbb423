"""The code of docs/fabric.md runs, and prints what the page shows."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from rankwise import Fabric, SingleDeviceStrategy
from tests.helpers.scripts import ScriptRunner

PAGE = (Path(__file__).parents[2] / "docs" / "fabric.md").read_text()
SCRIPT, *SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_script_prints_its_output(run_script: ScriptRunner) -> None:
    """On two processes, as shown."""
    result = run_script(SCRIPT, siblings=1)
    assert result.returncode == 0, result
    [shown] = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    assert result.stdout == shown


def test_the_snippets_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after another, in one process, with what the script has made."""
    monkeypatch.chdir(tmp_path)
    assert len(SNIPPETS) == 3
    for snippet in SNIPPETS:
        weighting = "logged" if "weight=" in snippet else None
        fabric = Fabric(accelerator="cpu", strategy=SingleDeviceStrategy(gradient_weighting=weighting))
        own = nn.Linear(2, 1)
        before = own.weight.detach().clone()
        module, optimizer = fabric.setup(own, torch.optim.SGD(own.parameters(), lr=0.1))
        x = torch.ones(32, 2)
        loader = fabric.setup_dataloaders(DataLoader(TensorDataset(x, x[:, :1]), batch_size=8))
        names: dict[str, Any] = {"nn": nn, "fabric": fabric, "module": module, "optimizer": optimizer}
        if "load(" in snippet:
            fabric.save("line.ckpt", {"model": module, "optimizer": optimizer, "epoch": 4})
        exec(snippet, {**names, "loader": loader})
        assert "load(" in snippet or not torch.equal(own.weight, before)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["line.ckpt", "no_bias.ckpt"]
