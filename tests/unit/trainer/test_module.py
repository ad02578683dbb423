"""What a module offers beside its hooks."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from rankwise.errors import InvalidTypeError, LifecycleError
from rankwise.loggers import CSVLogger
from tests.unit.trainer.helpers import Line, fitted, loader, trainer


def test_without_a_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    """Counters and ranks are 0, there is no logger, and `print` prints."""
    module = Line()
    counters = (module.current_epoch, module.global_step, module.global_rank, module.local_rank)
    assert (counters, module.logger, module.loggers) == ((0, 0, 0, 0), None, [])
    module.print("one", "two", sep="-")
    assert capsys.readouterr().out == "one-two\n"
    assert module.example_input_array is None
    with pytest.raises(LifecycleError, match=r"Line\.trainer"):
        module.all_gather(torch.ones(2))


def test_with_a_trainer(tmp_path: Path) -> None:
    """The loggers are the trainer's; alone, gathering returns what it gets; a copy leaves the trainer out."""
    module, loggers = Line(), [CSVLogger(tmp_path, "a"), CSVLogger(tmp_path, "b")]
    fitted(tmp_path, module, logger=loggers)
    assert (module.logger, module.loggers, module.global_step) == (loggers[0], loggers, 4)
    assert torch.equal(module.all_gather({"a": [2.0]})["a"][0], torch.tensor(2.0, dtype=torch.float64))
    assert copy.deepcopy(module)._trainer is None
    assert module._trainer is not None


def test_dtype() -> None:
    """It is that of the floating-point parameters or buffers."""
    module = Line()
    assert module.bfloat16().dtype is torch.bfloat16
    module.register_buffer("number", torch.zeros((), dtype=torch.int64))
    del module.layer
    assert module.dtype is torch.get_default_dtype()


def test_freezing() -> None:
    """A frozen module is not trained and in evaluation mode, until it is unfrozen."""
    module = Line()
    module.freeze()
    assert not any([module.training, module.layer.training, module.layer.weight.requires_grad])
    module.unfreeze()
    assert module.training
    assert module.layer.weight.requires_grad


def test_no_training_module(tmp_path: Path) -> None:
    """A module of torch's is refused."""
    with pytest.raises(InvalidTypeError, match="an instance of TrainingModule"):
        trainer(tmp_path).fit(nn.Linear(1, 1), loader())  # type: ignore[arg-type]  # the mistake
