"""What is trained while signals arrive: importable, so that spawned workers find it."""

import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from rankwise import Trainer
from rankwise.callbacks import Callback
from rankwise.processes.fork_safety import import_dynamo
from tests.helpers import processes
from tests.process.resume_tasks import ThroughTorch
from tests.process.training_tasks import Regression, dataset, quiet_trainer

WHO = ("rank", "main", "group")
OPTIONS = ("", "accumulate", "validate")
CODE = 128 + signal.SIGTERM
_LIMIT_S = 60  # for what takes a second where nothing else runs


class Slow(Regression):
    """Takes some milliseconds for a step, so that signals arrive in the middle."""

    pause_s = 0.005
    hangs_at = -1

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        time.sleep(self.pause_s)
        if batch_idx == self.hangs_at:
            print("hanging", flush=True)
            time.sleep(60)
        return super().training_step(batch, batch_idx)

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        if batch_idx == 3 and self.trainer.num_val_batches[0] > 1000:
            print("validating", flush=True)
        time.sleep(self.pause_s)
        super().validation_step(batch, batch_idx)


class SlowIO(ThroughTorch):
    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any) -> None:
        time.sleep(2.5)
        super().save_checkpoint(checkpoint, path)


class Notes(Callback):
    """Each rank writes down its process id, that it trains, and its state at the end."""

    def __init__(self, folder: str, stops_at: int | None) -> None:
        self.folder = Path(folder)
        self.stops_at = stops_at
        self.noted = -1

    @override
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 3 and batch_idx < 12:
            (self.folder / f"pid{trainer.global_rank}").write_text(str(os.getpid()))
            print("training", flush=True)
        if trainer.global_rank == 1 and trainer.global_step == self.stops_at:
            trainer.should_stop = True

    @override
    def on_exception(self, trainer: Any, module: Any, error: BaseException) -> None:
        is_stop = isinstance(error, (SystemExit, KeyboardInterrupt))
        if is_stop and trainer.strategy.is_in_job:  # not in a caller that is no rank
            self.note(trainer, module)

    @override
    def on_fit_end(self, trainer: Any, module: Any) -> None:
        self.note(trainer, module)

    def note(self, trainer: Any, module: Any) -> None:
        self.noted = trainer.global_step
        facts = {"step": trainer.global_step, "bias": module.net[0].bias.tolist()}
        (self.folder / f"end{trainer.global_rank}").write_text(json.dumps(facts))


def train(strategy: str, folder: str, options: str = "") -> None:
    """Train for very long; `options`: accumulate, validate (long), workers, slow saving, should_stop."""
    plugins = SlowIO() if options == "slow saving" else None
    accumulated = 3 if options == "accumulate" else 1
    notes = Notes(folder, 7 if options == "should_stop" else None)
    chosen = {"plugins": plugins, "accumulate_grad_batches": accumulated, "val_check_interval": 5}
    trainer = trainer_of(strategy, folder, notes, **chosen)
    workers = 2 if options == "workers" else 0
    loader: DataLoader[Any] = DataLoader(dataset(100_000), batch_size=4, num_workers=workers)
    samples = {"validate": 33, "validate long": 80_003}.get(options)
    validation = None if samples is None else DataLoader(dataset(samples), batch_size=4)
    module = Slow()
    trainer.fit(module, loader, validation)
    print("fit has returned", flush=True)
    if options == "should_stop":
        module.hangs_at = 5
        trainer_of(strategy, folder, Notes(folder, None)).fit(module, loader)


def keep_after_signal(strategy: str, folder: str, options: str = "") -> None:
    """Train until a signal comes; print the state of the caller then, and train on where that is possible."""
    notes = Notes(folder, None)
    trainer = trainer_of(strategy, folder, notes)
    module: Any = Slow()
    workers: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": options} if options else {}
    loader = DataLoader(dataset(100_000), batch_size=4, **workers)
    try:
        trainer.fit(module, loader)
    except (KeyboardInterrupt, SystemExit):
        step, bias = trainer.global_step, module.net[0].bias.tolist()
        facts = [trainer.interrupted, trainer.received_sigterm, notes.noted]
        sys.stdout.write(f"kept {json.dumps([step, bias, *facts])}\n")
        if strategy != "ddp":  # whose other processes have ended
            trainer.callbacks, trainer.max_steps = [], step + 2
            trainer.fit(module, loader)
            sys.stdout.write(f"continued to {trainer.global_step - step}\n")
        raise


def trainer_of(strategy: str, folder: str, notes: Notes, **arguments: Any) -> Trainer:
    """Return a trainer on two ranks that saves nothing by itself."""
    return quiet_trainer(strategy, 2, max_epochs=1, callbacks=[notes], default_root_dir=folder, **arguments)


# ---------------------------------------------------------------------------------------- again and again


def send_to(main: int, who: str, folder: Path) -> None:
    """Send SIGTERM to one rank, to the main process or to the whole group."""
    if who == "group":
        os.killpg(main, signal.SIGTERM)
    else:
        os.kill(main if who == "main" else int((folder / "pid1").read_text()), signal.SIGTERM)


def check_end(folder: Path) -> None:
    """Both ranks have ended with the same weights at the same step, which the checkpoint has too."""
    ends = [json.loads((folder / f"end{rank}").read_text()) for rank in range(2)]
    assert ends[0] == ends[1], ends
    checkpoint = torch.load(folder / "last.ckpt", weights_only=True)
    assert checkpoint["global_step"] == ends[0]["step"] > 0
    assert checkpoint["state_dict"]["net.0.bias"].tolist() == ends[0]["bias"]


def series(who: str, rounds: str, seed: str, folder: str) -> None:
    """Train in a fork, send SIGTERM at a random moment, look at what is left; again and again.

    Raises:
        AssertionError: for the first round that is not in order.
    """
    import_dynamo()
    chance = random.Random(int(seed))
    for number in range(int(rounds)):
        place, options, moment_s = Path(folder) / str(number), chance.choice(OPTIONS), chance.random() / 2
        place.mkdir()
        _check_round(place, who, options, moment_s)
        print(f"round {number} {options or 'plain'}, {moment_s:.3f} s: in order", flush=True)


def _check_round(place: Path, who: str, options: str, moment_s: float) -> None:
    main: Any = multiprocessing.get_context("fork").Process(target=_train_in_session, args=(place, options))
    main.start()
    pids = [place / f"pid{rank}" for rank in range(2)]
    _wait(lambda: all(file.exists() and file.read_text() for file in pids), main, "training")
    time.sleep(moment_s)
    send_to(main.pid, who, place)
    _wait(lambda: not main.is_alive(), main, "the end")
    assert main.exitcode == CODE, (main.exitcode, place, options)
    check_end(place)
    _wait(lambda: not processes.in_session(main.pid), main, "nobody left")


def _train_in_session(folder: Path, options: str) -> None:
    os.setsid()
    train("ddp_fork", str(folder), options)


def _wait(is_so: Callable[[], bool], main: Any, what: str) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not is_so():
        if time.monotonic() > deadline:
            os.killpg(main.pid, signal.SIGUSR2)  # the stacks of all ranks
            time.sleep(1)
            os.killpg(main.pid, signal.SIGKILL)
            raise AssertionError(f"waited {_LIMIT_S} s in vain for: {what}")
        time.sleep(0.005)
