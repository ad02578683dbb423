"""The table of strategies shows what is registered."""

import json

import pytest

from rankwise import DDPStrategy, StrategyRegistry
from rankwise.doctor import main


def test_every_name_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """Each registered name has a line, with what it stands for and its description."""
    StrategyRegistry.register("ddp_listed", DDPStrategy, "for this test", timeout=5)
    try:
        assert main(["strategies"]) == 0
    finally:
        StrategyRegistry.remove("ddp_listed")
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in lines[1 : lines.index("")]]
    assert names == sorted([*StrategyRegistry, "ddp_listed"])
    [line] = [line for line in lines if line.startswith("ddp_listed ")]
    assert line.split(maxsplit=3) == ["ddp_listed", "DDPStrategy(timeout=5)", "popen", "for this test"]


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Programs get the class, the start method, the arguments and the defaults of each."""
    assert main(["strategies", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert list(listed) == list(StrategyRegistry)
    forkserver = listed["ddp_forkserver_find_unused_parameters_true"]
    assert forkserver["class"] == "DDPStrategy"
    assert forkserver["start_method"] == "forkserver"
    assert forkserver["arguments"] == {"start_method": "forkserver", "find_unused_parameters": True}
    assert forkserver["defaults"]["timeout"] == "0:10:00"
    assert listed["single_device"]["start_method"] is None
    assert listed["single_device"]["defaults"]["num_nodes"] == "auto"
