"""`ddp_notebook` in a real Jupyter kernel: definitions, output and exceptions of cells, the interrupt."""

import importlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rankwise.processes.signals import INTERRUPT_NOTICE
from tests.helpers.needs import need_installed
from tests.helpers.processes import wait_until_gone
from tests.process.helpers import with_tests

need_installed("nbclient", "ipykernel")

DEFINE = """
import time, torch
from rankwise import StrategyRegistry
from tests.process.training_tasks import Regression, loader, quiet_trainer

class Line(Regression):
    def training_step(self, batch, batch_idx):
        return self(batch[0]).pow(2).mean()

data = loader(8, 2)

def create(max_epochs):
    return quiet_trainer("ddp_notebook", 2, max_epochs=max_epochs, enable_progress_bar=True)

def train():
    trainer, module = create(1), Line()
    before = module.net[0].weight.detach().clone()
    trainer.fit(module, data)
    print("steps", trainer.global_step, "changed", not torch.equal(before, module.net[0].weight))

def strategy():
    return StrategyRegistry.create("ddp_notebook", accelerator="cpu", devices=2)
"""

SAY = """
factor = 7
def say(strategy):
    print(f"rank {strategy.global_rank} says {factor * strategy.world_size}", flush=True)

strategy().launch(say)
"""

RAISE = """
def fail(strategy):
    if strategy.global_rank == 1:
        raise ValueError("from the cell")
    strategy.barrier()

strategy().launch(fail)
"""

SLOW = """
class Slow(Line):
    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and self.current_epoch == 0:
            print("in a step", flush=True)
        time.sleep(0.02)
        return super().training_step(batch, batch_idx)

trainer, module = create(1000), Slow()
trainer.fit(module, data)
"""

AFTERWARDS = """
saved = torch.load("last.ckpt", weights_only=True)
step = trainer.global_step
print(trainer.interrupted, saved["global_step"] == step > 0)
print(torch.equal(saved["state_dict"]["net.0.weight"], module.net[0].weight))
trainer.max_steps = step + 3
trainer.fit(module, data)
print("then", trainer.global_step - step, trainer.state.status)
"""

HANG = """
def hang(strategy):
    print("hanging", flush=True)
    if strategy.global_rank == 0:
        strategy.barrier()
    time.sleep(100)

strategy().launch(hang)
"""


class Kernel:
    """A kernel, and the notebook that runs in it."""

    def __init__(self, folder: Path) -> None:
        nbformat: Any = importlib.import_module("nbformat")
        from nbclient import NotebookClient

        self._new_cell: Callable[[str], Any] = nbformat.v4.new_code_cell
        self.notebook: Any = nbformat.v4.new_notebook()
        self.client: Any = NotebookClient(
            self.notebook, kernel_name="python3", allow_errors=True, timeout=60, interrupt_on_timeout=False
        )
        self.client.resources = {"metadata": {"path": str(folder)}}

    def run(self, source: str) -> str:
        """Run a cell; return its output, the error's name and value included."""
        cell = self._new_cell(source)
        self.notebook.cells.append(cell)
        self.client.execute_cell(cell, len(self.notebook.cells) - 1)
        return "\n".join(self._text(output) for output in cell.outputs)

    def interrupt_when(self, source: str, text: str, count: int) -> str:
        """Run a cell, and press the interrupt button when it has printed `text` so often."""
        presser = threading.Thread(target=self._press_when, args=(len(self.notebook.cells), text, count))
        presser.start()
        try:
            return self.run(source)
        finally:
            presser.join()

    def _press_when(self, index: int, text: str, count: int) -> None:
        deadline = time.monotonic() + 50
        while time.monotonic() < deadline:
            outputs = self.notebook.cells[index].outputs if len(self.notebook.cells) > index else []
            if "".join(self._text(output) for output in outputs).count(text) >= count:
                break
            time.sleep(0.05)
        self.process.send_signal(2)  # what the button makes Jupyter's server do

    @property
    def process(self) -> psutil.Process:
        """The kernel's own process."""
        return psutil.Process(self.client.km.provisioner.pid)

    @staticmethod
    def _text(output: Any) -> str:
        if output.output_type == "error":
            return f"{output.ename}: {output.evalue}"
        return str(output.get("text", ""))


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    """Start a kernel; end it after the test."""
    monkeypatch.setenv("PYTHONPATH", str(with_tests()["PYTHONPATH"]))
    kernel = Kernel(tmp_path)
    with kernel.client.setup_kernel():
        yield kernel


def check_texts(output: str, *texts: str) -> None:
    """All texts are in a cell's output."""
    assert [text for text in texts if text not in output] == [], output


def test_notebook(kernel: Kernel) -> None:
    """One kernel: output and exceptions in the cell, an interrupt that ends all workers, training again."""
    assert kernel.run(DEFINE) == ""
    check_texts(kernel.run(SAY), "rank 0 says 14", "rank 1 says 14")
    raised = kernel.run(RAISE)
    check_texts(raised, "WorkerRaisedError: Worker global_rank=1", "raised ValueError: from the cell")
    assert "steps 2 changed True" in kernel.run("train()")
    trained = kernel.interrupt_when(SLOW, "in a step", 2)
    # The progress bar is that of rank 0, which is another process.
    check_texts(trained, "KeyboardInterrupt", INTERRUPT_NOTICE, "Epoch 0: ")
    check_texts(kernel.run(AFTERWARDS), "True True\nTrue\n", "then 3 finished")
    assert "KeyboardInterrupt" in kernel.interrupt_when(HANG, "hanging", 2)
    assert wait_until_gone(kernel.process.children, timeout_s=10) == []
    assert "steps 2 changed True" in kernel.run("train()")
    refused = kernel.run('StrategyRegistry.create("ddp_spawn", devices=2, accelerator="cpu").launch(say)')
    check_texts(refused, "LaunchRefusedError", "ddp_notebook")
