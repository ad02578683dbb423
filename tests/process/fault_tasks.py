"""What the processes of one cell of the table of failures run: a short fit in which one of them fails."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import torch._dynamo  # what the first wrapper imports, which takes longer than some of these jobs may
import torch.distributed as dist
from torch import Tensor

from rankwise.callbacks import Callback
from rankwise.strategies import DDPStrategy
from tests.helpers import leak_checks, processes
from tests.process.fault_table import GRACE_S, WHEN, Cell
from tests.process.training_tasks import Regression, loader, quiet_trainer

MESSAGE = "the fault of this test"
SCRIPT = Path(__file__).with_name("fault_program.py")
STEPS = 3
CHECKPOINT = "saved/last.ckpt"
"""Where a job saves, in its folder."""
_LEAD_S = 0.1  # the time for the other rank to reach the call in which it waits
_LONG_S = 60.0
_MAIN_HANGS_S = 4.0  # the ranks do not need a main process that is no rank: it has to continue by itself


@dataclass(frozen=True)
class Fault:
    cell: Cell | None
    folder: str  # where the processes of the job write their reports
    delay_s: float = 0.0  # the fault happens so much later
    step: int = 1  # in which it happens
    leaves_things: bool = False  # the main process leaves one of each thing behind that the tests look for

    def happen_if_due(self, when: str, strategy: DDPStrategy, step: int = 1) -> None:
        cell = self.cell
        if cell is None or cell.when != when or step != self.step:
            return
        if cell.rank == strategy.global_rank:
            if when == WHEN[0] and cell.hangs:  # the other rank waits from its arrival on
                _wait_for(Path(self.folder, f"arrived{1 - strategy.global_rank}"))
            time.sleep(_LEAD_S + self.delay_s)
            self.happen()
        elif cell.rank is None:
            (Path(self.folder) / f"moment{strategy.global_rank}").touch()
            time.sleep(0.3)  # so that main fails while this rank is here
            _wait_for(Path(self.folder, "stamp"))  # however slow it is

    def happen(self) -> None:
        assert self.cell is not None
        how = self.cell.how
        stamp = Path(self.folder, "stamp")
        stamp.with_suffix(".new").write_text(repr(time.monotonic()))
        stamp.with_suffix(".new").rename(stamp)
        if how == "raises":
            raise ValueError(MESSAGE)
        if how == "exits 0":
            sys.exit(0)
        if how == "exits 3":
            os._exit(3)
        if how == "hangs outside a collective":
            time.sleep(_MAIN_HANGS_S if self.cell.who == "main" else _LONG_S)
        elif how == "hangs inside a collective":
            dist.all_reduce(torch.ones(1), group=_separate_group[0])
        else:
            os.kill(os.getpid(), signal.Signals[how])

    def fail_when_due(self) -> None:
        """Fail, in a main process that is no rank, when both ranks have reached the phase."""
        for rank in range(2):
            _wait_for(Path(self.folder, f"moment{rank}"))
        time.sleep(self.delay_s)
        assert self.cell is not None
        if self.cell.how in ("SIGKILL", "SIGSTOP"):
            self.happen()
        else:  # in the main thread, wherever it is
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)


def _wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.01)


_separate_group: list[Any] = []  # a group that only the rank that hangs uses
_left_open: list[Any] = []


class FaultyStrategy(DDPStrategy):
    fault: Fault

    def setup_environment(self) -> None:
        Path(self.fault.folder, f"arrived{self.global_rank}").touch()
        self.fault.happen_if_due("before the group", self)
        super().setup_environment()


class FaultyCallback(Callback):
    """Saves after each step; fails in a step, while rank 0 writes, or at teardown, if the fault says so."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        if self.fault.cell is not None and self.fault.cell.how == "hangs inside a collective":
            _separate_group[:] = [dist.new_group(timeout=trainer.strategy.timeout)]

    def on_before_backward(self, trainer: Any, module: Any, loss: Tensor) -> None:
        self.fault.happen_if_due("mid-step", trainer.strategy, trainer.global_step)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.save_checkpoint(Path(self.fault.folder, CHECKPOINT))

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        is_inside = self.fault.cell is not None and self.fault.cell.how == "hangs inside a collective"
        if trainer.global_rank == 1 or is_inside:
            self.fault.happen_if_due("while saving", trainer.strategy, trainer.global_step - 1)
        else:
            checkpoint["trap"] = FaultWhilePickling(self.fault, trainer)

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        if sys.exc_info()[0] is None:
            self.fault.happen_if_due("at teardown", trainer.strategy)


class FaultWhilePickling:
    """Fails when it is pickled: the checkpoint's file is open then, and incomplete."""

    def __init__(self, fault: Fault, trainer: Any) -> None:
        self.fault, self.trainer = fault, trainer

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        cell, step = self.fault.cell, self.trainer.global_step - 1
        if cell is not None and cell.when == "while saving" and step == self.fault.step and cell.rank == 1:
            time.sleep(3 * _LEAD_S + self.fault.delay_s)  # so that the other rank fails while this one writes
        self.fault.happen_if_due("while saving", self.trainer.strategy, step)
        return OrderedDict, ()  # which a checkpoint may hold


def fit(fault: Fault, start_method: str) -> None:
    settings: dict[str, Any] = {"grace_period_s": GRACE_S}
    if fault.cell is not None:
        settings |= {"timeout": fault.cell.timeout_s, "init_timeout": fault.cell.init_timeout_s}
    if start_method == "popen":
        settings["command"] = [sys.executable, str(SCRIPT), "--rank", as_json(fault, start_method)]
    strategy = FaultyStrategy(start_method=start_method, **settings)
    strategy.fault = fault
    saving, folder = FaultyCallback(fault), Path(fault.folder, "saved")
    trainer = quiet_trainer(strategy, 2, max_epochs=1, callbacks=[saving], default_root_dir=folder)
    trainer.fit(Regression(), loader(STEPS * 4, 2))


def run_as_main(fault: Fault, start_method: str) -> None:
    """Run a cell as the process that the user started; write down the exception and what is left."""
    checks = [
        *(leak_checks.Threads(), leak_checks.ProcessGroup(), leak_checks.Environment()),
        *(leak_checks.WorkingDirectory(), leak_checks.SignalHandlers()),
        *(leak_checks.ListeningSockets(), leak_checks.RankZeroOnly()),
    ]
    if fault.cell is not None and fault.cell.who == "main":
        signal.signal(signal.SIGALRM, lambda number, frame: fault.happen())
        threading.Thread(target=fault.fail_when_due, daemon=True).start()
    caught: BaseException | None = None
    try:
        fit(fault, start_method)
    except BaseException as error:
        caught = error
        raise
    finally:
        raised_at_s = time.monotonic()
        if fault.leaves_things:
            leave_things(Path(fault.folder))
        _separate_group.clear()  # it listens on a port
        left = [problem for check in checks for problem in check.problems()]
        if start_method != "popen" or caught is not None:  # without a failure they stay for the next job
            left += living_children()
        left += listening_sockets()
        facts = {
            "exception": "" if caught is None else type(caught).__name__,
            "ranks": [getattr(caught, "global_rank", None), *getattr(caught, "missing", ())],
            "raised_at_s": raised_at_s,
            "left": [f"in the caller: {problem}" for problem in left],
        }
        Path(fault.folder, "caught.json").write_text(json.dumps(facts))


def living_children() -> list[str]:
    """Return the descendants of this process that still live, or that it has not waited for."""
    below = processes.wait_until_gone(lambda: psutil.Process().children(recursive=True), timeout_s=0)
    return [processes.describe(process) for process in below if not processes.is_service(process)]


def listening_sockets() -> list[str]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            sockets = process.net_connections(kind="inet")
            ports = [each.laddr.port for each in sockets if each.status == psutil.CONN_LISTEN]
            found += [f"{processes.describe(process)} listens on port {port}" for port in ports]
    return found


def leave_things(folder: Path) -> None:
    """Leave one of each thing behind, but none in /dev/shm, where concurrent tests would find it."""
    subprocess.Popen(["sleep", "60"], start_new_session=True)
    listener = socket.create_server(("127.0.0.1", 0))
    listener.set_inheritable(True)
    subprocess.Popen(["sleep", "60"], close_fds=False)
    for place in (Path(os.environ["TMPDIR"]), folder / "saved", folder / "here"):
        (place / "left").touch()
    (folder / CHECKPOINT).write_bytes(b"torn")
    _left_open.append(listener)


def marker_of(folder: Path) -> str:
    return f"faults-{folder}"


def as_json(fault: Fault, start_method: str) -> str:
    cell = None if fault.cell is None else vars(fault.cell)
    return json.dumps({"start_method": start_method, **vars(fault), "cell": cell})


def from_json(text: str) -> tuple[Fault, str]:
    fields = json.loads(text)
    start_method: str = fields.pop("start_method")
    cell = fields.pop("cell")
    return Fault(cell=None if cell is None else Cell(**cell), **fields), start_method
