"""Profilers: what they measure in a stage, what they print, and that none costs nothing."""

import pickle
import time
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from rankwise.callbacks import EarlyStopping
from rankwise.errors import InvalidArgumentError, InvalidTypeError, UnknownNameError
from rankwise.profilers import (
    AdvancedProfiler,
    PassThroughProfiler,
    Profiler,
    PyTorchProfiler,
    SimpleProfiler,
    create_profiler,
)
from tests.helpers.raising import raises
from tests.unit.trainer.helpers import Failing, Line, fitted, loader, trainer


class Notes(Profiler):
    """Notes which actions start and stop."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    @override
    def start(self, action_name: str) -> None:
        self.seen.append(f"+{action_name}")

    @override
    def stop(self, action_name: str) -> None:
        self.seen.append(f"-{action_name}")

    @override
    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        self.seen.append(f"setup {stage} {local_rank}")

    @override
    def teardown(self, stage: str | None) -> None:
        self.seen.append(f"teardown {stage}")


class Augments(Line):
    """Measures a block of its own."""

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with self.trainer.profiler.profile("augmentation"):
            return super().training_step(batch, batch_idx)

    @override
    def on_train_start(self) -> None:
        """Is measured."""


def test_the_actions_of_a_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Epochs, batches, steps, hooks and blocks of the module are counted; a table is printed at the end."""
    profiler, stopping = SimpleProfiler(), EarlyStopping("loss")
    train = trainer(tmp_path, profiler=profiler, max_epochs=2, callbacks=stopping)
    train.fit(Augments(), loader(), loader(4))
    counts = {action: len(durations) for action, durations in profiler.recorded_durations.items()}
    assert counts == {
        "run_training_epoch": 2,
        "run_training_batch": 8,
        "train_dataloader_next": 10,  # with the end of each epoch
        "batch_to_device": 12,
        "training_step": 8,
        "augmentation": 8,
        "backward": 8,
        "optimizer_step": 8,
        "run_validation_batch": 4,
        "validation_dataloader_next": 6,
        "validation_step": 4,
        "[Module]Augments.on_train_start": 1,
        f"[Callback]{stopping.state_key}.on_train_start": 1,
        f"[Callback]{stopping.state_key}.on_validation_end": 2,
        f"[Callback]{stopping.state_key}.on_train_epoch_end": 2,
    }
    first, header, *rows = capsys.readouterr().out.splitlines()
    assert first.startswith("Profile of fit: ")
    assert header.split() == ["action", "calls", "mean", "(s)", "total", "(s)", "share"]
    assert len(rows) == len(counts)
    assert rows[0].startswith("run_training_epoch")
    assert profiler.current_actions == {}
    summary = profiler.summary()  # has the time of the stage, also later
    time.sleep(0.01)
    assert profiler.summary() == summary


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_the_actions_of_other_stages(tmp_path: Path, stage: str) -> None:
    """Their batches and steps are counted, of that stage only."""
    profiler, kind = SimpleProfiler(), stage.replace("validate", "validation")
    train = fitted(tmp_path, profiler=profiler)
    getattr(train, stage)(Line(), loader())
    counts = {action: len(durations) for action, durations in profiler.recorded_durations.items()}
    names = (f"run_{kind}_batch", f"{kind}_step", "batch_to_device")
    assert counts == {**dict.fromkeys(names, 4), f"{kind}_dataloader_next": 5}


def test_a_profiler_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is set up and torn down with the stage; actions are within each other. Without summary no print."""
    profiler = Notes()
    trainer(tmp_path, profiler=profiler).validate(Line(), loader(2), verbose=False)
    assert profiler.seen == [
        "setup validate 0",
        *("+validation_dataloader_next", "-validation_dataloader_next", "+run_validation_batch"),
        *("+batch_to_device", "-batch_to_device", "+validation_step", "-validation_step"),
        "-run_validation_batch",
        *("+validation_dataloader_next", "-validation_dataloader_next"),
        "teardown validate",
    ]
    assert capsys.readouterr().out == ""


def test_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was started is stopped, and the strategy's methods are its own again."""
    profiler = SimpleProfiler()
    train = trainer(tmp_path, profiler=profiler)
    raises(ValueError, "broken", train.fit, Failing(), loader())
    assert (profiler.current_actions, capsys.readouterr().out) == ({}, "")
    assert "backward" not in vars(train.strategy)
    train.fit(Line(), loader())


def test_none(tmp_path: Path) -> None:
    """Without a profiler functions and iterators stay what they are."""
    profiler, items = trainer(tmp_path).profiler, iter([1])
    assert isinstance(profiler, PassThroughProfiler)
    assert profiler.profiled("action", print) is print
    assert profiler.iterated("action", items) is items
    model = Line()
    profiler.instrument(model, training_step="action")
    assert "training_step" not in vars(model)
    with profiler.profile("action") as name:
        assert name == "action"


def test_a_file_for_each_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a folder or a name the summary goes to a file; a name alone means the folder of the logs."""
    trainer(tmp_path, profiler=SimpleProfiler(tmp_path / "new", "mine")).test(Line(), loader(), verbose=False)
    simple = SimpleProfiler(filename="mine", extended=False)
    trainer(tmp_path, profiler=simple).test(Line(), loader(), verbose=False)
    assert (tmp_path / "new" / "test-mine-0.txt").read_text().startswith("Profile of test: ")
    header = (tmp_path / "test-mine-0.txt").read_text().splitlines()[1]
    assert header.split() == ["action", "mean", "(s)", "total", "(s)"]
    assert capsys.readouterr().out == ""


def calls(table: str, function: str) -> int:
    """Return how often a function was called, by its row in a table of `pstats`."""
    rows = [line for line in table.splitlines() if line.endswith(f"({function})")]
    return int(rows[0].split()[0]) if rows else 0


def test_functions_of_a_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table has the module's functions, of the last stage only. The profiler can be pickled."""
    profiler = AdvancedProfiler()
    trainer(tmp_path, profiler=profiler).fit(Augments(), loader())
    out, table = capsys.readouterr().out, pickle.loads(pickle.dumps(profiler)).summary()
    assert (calls(table, "training_step"), "pstats.py" in table, table in out) == (4, False, True)
    trainer(tmp_path, profiler=profiler).validate(Line(), loader(), verbose=False)
    assert calls(capsys.readouterr().out, "training_step") == 0


def test_torchs_profiler(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Operators and actions of three batches are in a table and a trace; that none was measured is said."""
    profiler = PyTorchProfiler(tmp_path, "ops", row_limit=50)
    train = fitted(tmp_path, profiler=profiler, max_epochs=2)
    train.validate(Line(), loader(10))
    for stage, action in (("fit", "training_step"), ("validate", "validation_step")):
        table = (tmp_path / f"{stage}-ops-0.txt").read_text()
        [row] = [line.split() for line in table.splitlines() if line.split()[:1] == [action]]
        assert row[-1] == "3"
        assert "aten::addmm" in table
        assert (tmp_path / f"{stage}-ops-0.pt.trace.json").stat().st_size > 0
    assert profiler.profiler is None
    assert pickle.loads(pickle.dumps(profiler)).row_limit == 50
    trainer(tmp_path, profiler="pytorch").fit(Line(), loader(2))
    assert "no batch was measured" in capsys.readouterr().out
    # Arguments of torch's replace the schedule.
    seen: list[Any] = []
    profiler = PyTorchProfiler(schedule=None, on_trace_ready=seen.append, sort_by_key="count", row_limit=99)
    trainer(tmp_path, profiler=profiler).fit(Line(), loader(2))
    assert "training_step" in capsys.readouterr().out
    assert len(seen) == 1


def test_names(tmp_path: Path) -> None:
    """They are Lightning's; other names and types, and actions out of order, are refused."""
    kinds: dict[str | None, type[Profiler]] = {None: PassThroughProfiler}
    kinds |= {"Simple": SimpleProfiler, "advanced": AdvancedProfiler, "pytorch": PyTorchProfiler}
    for given, kind in kinds.items():
        assert type(create_profiler(given)) is kind
    with pytest.raises(UnknownNameError, match=r"profiler 'xla'.*\n.*\n.*'advanced', 'pytorch', 'simple'"):
        trainer(tmp_path, profiler="xla")
    raises(InvalidTypeError, "profiler", trainer, tmp_path, profiler=SimpleProfiler)
    profiler = SimpleProfiler()
    with pytest.raises(InvalidArgumentError, match="action_name='action'"):
        profiler.stop("action")  # before it has started
    profiler.start("action")
    raises(InvalidArgumentError, "action_name='action'", profiler.start, "action")
    profiler.teardown(None)
