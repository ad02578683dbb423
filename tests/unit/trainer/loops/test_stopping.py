"""Signals to a fit in this process: it stops at a boundary, saves, and goes on later."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typing_extensions import override

from rankwise.callbacks import Callback, ModelCheckpoint
from rankwise.checkpoint import AsyncCheckpointIO
from rankwise.environments import LocalEnvironment, SlurmEnvironment
from rankwise.errors import ConfigurationError
from rankwise.processes.signals import DEBOUNCE_S, INTERRUPT_NOTICE
from rankwise.trainer import Trainer
from tests.helpers.own_process import signal_handled
from tests.unit.environments.variables import step
from tests.unit.trainer.helpers import Line, SlowIO, loader, saved, trainer


class Queue(LocalEnvironment):  # type: ignore[misc]  # one that differs from the real one in this alone
    """A scheduler that announces the end by SIGUSR1."""

    requeue_signal = signal.SIGUSR1
    requeued = 0
    checkpoint: Path | None = None
    had_checkpoint = False

    @override
    def requeue(self) -> None:
        type(self).requeued += 1
        self.had_checkpoint = self.checkpoint is not None and self.checkpoint.exists()


class Signalled(Line):
    """Sends signals to itself in the middle of a batch, with a pause between them."""

    def __init__(self, *numbers: int, pause_s: float = 0.0) -> None:
        super().__init__()
        self.numbers = numbers
        self.pause_s = pause_s

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            for number in self.numbers:
                os.kill(os.getpid(), number)
                time.sleep(self.pause_s)
        return super().training_step(batch, batch_idx)


def stopped(model: Line, train: Trainer) -> None:
    """Fit until SIGTERM ends that, with its exit code."""
    with pytest.raises(SystemExit) as caught:
        train.fit(model, loader())
    assert caught.value.code == 143


def test_sigterm_stops_at_the_step(tmp_path: Path) -> None:
    """The step is finished, a checkpoint is written that "last" finds, the handlers are restored."""
    before = signal.getsignal(signal.SIGTERM)
    stopped(Signalled(signal.SIGTERM), trainer(tmp_path))
    assert signal.getsignal(signal.SIGTERM) is before
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 2
    model = Line()
    trainer(tmp_path).fit(model, loader(), ckpt_path="last")
    assert model.seen == ["train 2", "train 3"]


@pytest.mark.parametrize(("number", "pause_s"), [(signal.SIGTERM, DEBOUNCE_S + 0.1), (signal.SIGINT, 0.0)])
def test_the_second_one_ends_at_once(tmp_path: Path, number: int, pause_s: float) -> None:
    """A second signal ends it without a checkpoint: SIGTERM after the debounce time, Ctrl-C at any."""
    model = Signalled(number, number, pause_s=pause_s)
    (stopped if number == signal.SIGTERM else interrupted)(model, trainer(tmp_path))
    assert model.seen == ["train 0"]
    assert list(tmp_path.iterdir()) == []


def test_an_echo_is_no_second_one(tmp_path: Path) -> None:
    """A signal that comes twice at once, to a whole cgroup and from an agent, is one request."""
    model = Signalled(signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM)
    stopped(model, trainer(tmp_path, plugins=[Queue()]))
    assert (tmp_path / "last.ckpt").exists()


def test_an_own_handler_is_called_too(tmp_path: Path) -> None:
    """The earlier handler is called after ours, and is restored afterwards."""
    heard: list[int] = []

    def own(signum: int, frame: object) -> None:
        heard.append(signum)

    with signal_handled(signal.SIGTERM, own):
        stopped(Signalled(signal.SIGTERM), trainer(tmp_path))
        assert heard == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGTERM) is own


def test_requeue(tmp_path: Path) -> None:
    """The scheduler's signal stops training like SIGTERM, and the job goes back into the queue."""
    saving = ModelCheckpoint(dirpath=tmp_path / "kept")
    train = trainer(tmp_path, plugins=[Queue()], callbacks=[saving])
    stopped(Signalled(signal.SIGUSR1), train)
    assert Queue.requeued == 1
    assert (tmp_path / "kept" / "last.ckpt").exists()


def step_of_slurm(restarts: int, auto_requeue: bool = True, **variables: str) -> SlurmEnvironment:
    """A step of one task, in a job that was started again `restarts` times."""
    environ = {**step(0, "1", place=(0, 0)), "SLURM_RESTART_COUNT": str(restarts), **variables}
    return SlurmEnvironment(environ, auto_requeue=auto_requeue)


def test_a_requeued_job_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`fit` continues by itself, but not another step, from another `ckpt_path`, or if it is switched off."""
    monkeypatch.setenv("PATH", str(tmp_path))  # no scontrol
    with pytest.warns(UserWarning, match="scontrol requeue 1042 failed"):
        stopped(Signalled(signal.SIGUSR1), trainer(tmp_path, plugins=[step_of_slurm(0)]))

    def batches(environment: SlurmEnvironment, **options: Any) -> list[str]:
        model = Line()
        trainer(tmp_path, plugins=[environment]).fit(model, loader(), **options)
        return model.seen

    whole = ["train 0", "train 1", "train 2", "train 3"]
    assert batches(step_of_slurm(1)) == whole[2:]
    for other in (
        step_of_slurm(0),
        step_of_slurm(1, SLURM_STEP_ID="4"),
        step_of_slurm(1, auto_requeue=False),
    ):
        assert batches(other) == whole
    assert batches(step_of_slurm(1), ckpt_path=saved(tmp_path, max_steps=1)) == whole[1:]


def test_the_checkpoint_of_a_requeued_job_has_no_name(tmp_path: Path) -> None:
    """Lightning's name for it is refused, and the error says what to do."""
    with pytest.raises(ConfigurationError, match=r'ckpt_path="hpc".*\n.*\n.*leave it out'):
        trainer(tmp_path).fit(Line(), loader(), ckpt_path="hpc")


def test_a_job_is_requeued_once_its_checkpoint_is_there(tmp_path: Path) -> None:
    """The scheduler may end a requeued job at once, so an asynchronous checkpoint is finished first."""
    queue = Queue()
    queue.checkpoint = tmp_path / "last.ckpt"
    train = trainer(tmp_path, plugins=[queue, AsyncCheckpointIO(SlowIO())])
    stopped(Signalled(signal.SIGUSR1), train)
    assert queue.had_checkpoint


def test_nothing_is_saved_in_a_fast_dev_run(tmp_path: Path) -> None:
    """A trial run leaves no files, stopped or not."""
    stopped(Signalled(signal.SIGTERM), trainer(tmp_path, fast_dev_run=4))
    assert list(tmp_path.iterdir()) == []


def test_sigterm_is_known_afterwards(tmp_path: Path) -> None:
    """The Trainer says how the stage ended, to hooks too, until the next stage."""
    noted = Noted()
    train = trainer(tmp_path, callbacks=noted)
    stopped(Signalled(signal.SIGTERM), train)
    assert (train.received_sigterm, train.interrupted, train.state.status) == (True, True, "interrupted")
    assert noted.seen == [("SystemExit", True, "interrupted")]
    train.validate(Line(), loader())
    assert (train.received_sigterm, train.interrupted) == (False, False)


class Noted(Callback):
    """Notes what `on_exception` gets, and what the Trainer says then."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, bool, str]] = []

    @override
    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self.seen.append((type(exception).__name__, trainer.received_sigterm, str(trainer.state.status)))


def interrupted(model: Line, train: Trainer, *val_dataloaders: Any) -> None:
    """Fit until Ctrl-C ends that; the exception is exactly the one of which shells know."""
    with pytest.raises(KeyboardInterrupt) as caught:
        train.fit(model, loader(), *val_dataloaders)
    assert caught.type is KeyboardInterrupt


def test_ctrl_c_stops_at_the_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The step is finished, a checkpoint is written, and a fit that continues ends as an undisturbed one."""
    before = signal.getsignal(signal.SIGINT)
    noted, model = Noted(), Signalled(signal.SIGINT)
    train = trainer(tmp_path, callbacks=noted)
    interrupted(model, train)
    assert signal.getsignal(signal.SIGINT) is before
    assert capsys.readouterr().err == INTERRUPT_NOTICE
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == train.global_step == 2
    assert (train.interrupted, train.received_sigterm, train.state.stage) == (True, False, None)
    assert noted.seen == [("KeyboardInterrupt", False, "interrupted")]
    train.fit(model, loader())
    whole = Line()
    trainer(tmp_path / "whole").fit(whole, loader())
    assert model.seen == whole.seen
    assert torch.equal(model.layer.weight, whole.layer.weight)


class External(LocalEnvironment):  # type: ignore[misc]  # one that differs from the real one in this alone
    """As torchrun, which forwards the signal that a terminal sends to all."""

    creates_processes_externally = True


def test_a_forwarded_ctrl_c_is_no_second_one(tmp_path: Path) -> None:
    """Under an outer launcher one Ctrl-C may come twice."""
    interrupted(Signalled(signal.SIGINT, signal.SIGINT), trainer(tmp_path, plugins=[External()]))
    assert (tmp_path / "last.ckpt").exists()


def test_ctrl_c_within_a_validation(tmp_path: Path) -> None:
    """It ends after the batch; the fit that continues validates again."""

    class Validating(Line):
        @override
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            if self.seen.count("validate 1") == 1 and batch_idx == 1:
                os.kill(os.getpid(), signal.SIGINT)

    train, model = trainer(tmp_path), Validating()
    interrupted(model, train, loader(6))
    assert model.seen[-2:] == ["validate 0", "validate 1"]
    train.fit(model, loader(), loader(6))
    assert model.seen[6:] == ["validate 0", "validate 1", "validate 2"]


def test_a_handler_of_ones_own_for_ctrl_c(tmp_path: Path) -> None:
    """It decides: training goes on."""
    heard: list[int] = []
    model = Signalled(signal.SIGINT)
    with signal_handled(signal.SIGINT, lambda signum, frame: heard.append(signum)):
        trainer(tmp_path).fit(model, loader())
    assert heard == [signal.SIGINT]
    assert len(model.seen) == 4


def test_ctrl_c_outside_of_the_loop(tmp_path: Path) -> None:
    """Where there is no step to wait for, it ends the stage at once."""

    class Starting(Line):
        @override
        def on_fit_start(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)

    interrupted(Starting(), trainer(tmp_path))
    assert list(tmp_path.iterdir()) == []
