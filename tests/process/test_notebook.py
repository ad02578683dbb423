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

need_installed("nbclient", "ipykernel")

DEFINE = """
import time, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from rankwise import StrategyRegistry, Trainer, TrainingModule

class Line(TrainingModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

data = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2)

def create(max_epochs):
    return Trainer(strategy="ddp_notebook", accelerator="cpu", devices=2, max_epochs=max_epochs, logger=False,
                   enable_checkpointing=False)

def train():
    trainer, module = create(1), Line()
    before = module.layer.weight.detach().clone()
    trainer.fit(module, data)
    print("steps", trainer.global_step, "changed", not torch.equal(before, module.layer.weight))

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
print(torch.equal(saved["state_dict"]["layer.weight"], module.layer.weight))
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
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    """Start a kernel; end it after the test."""
    kernel = Kernel(tmp_path)
    with kernel.client.setup_kernel():
        yield kernel


@pytest.mark.quick
def test_notebook(kernel: Kernel) -> None:
    """One kernel: output and exceptions in the cell, an interrupt that ends all workers, training again."""
    assert kernel.run(DEFINE) == ""
    said = kernel.run(SAY)
    assert "rank 0 says 14" in said
    assert "rank 1 says 14" in said
    raised = kernel.run(RAISE)
    assert "WorkerRaisedError: Worker global_rank=1" in raised
    assert "raised ValueError: from the cell" in raised
    assert "steps 2 changed True" in kernel.run("train()")
    trained = kernel.interrupt_when(SLOW, "in a step", 2)
    assert "KeyboardInterrupt" in trained
    assert INTERRUPT_NOTICE in trained
    assert "Epoch 0: " in trained  # the progress bar of rank 0, which is another process
    afterwards = kernel.run(AFTERWARDS)
    assert "True True\nTrue\n" in afterwards
    assert "then 3 finished" in afterwards
    assert "KeyboardInterrupt" in kernel.interrupt_when(HANG, "hanging", 2)
    assert wait_until_gone(kernel.process.children, timeout_s=10) == []
    assert "steps 2 changed True" in kernel.run("train()")
    refused = kernel.run('StrategyRegistry.create("ddp_spawn", devices=2, accelerator="cpu").launch(say)')
    assert "LaunchRefusedError" in refused
    assert "ddp_notebook" in refused
