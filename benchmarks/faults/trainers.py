"""The jobs that train with a Trainer: rankwise's or Lightning's."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.faults.job import SCRIPTED, Job, Trap, lonely

JOB = Job.of_environment()
IS_OURS = JOB.contender.startswith("rankwise")
library: Any = importlib.import_module("rankwise" if IS_OURS else "lightning")
strategies: Any = importlib.import_module("rankwise" if IS_OURS else "lightning.pytorch.strategies")
callbacks: Any = importlib.import_module("rankwise.callbacks" if IS_OURS else "lightning.pytorch.callbacks")


class Module(library.TrainingModule if IS_OURS else library.LightningModule):  # type: ignore[misc] # either's
    """A layer that is trained on ones."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        JOB.come("mid-step", self.trainer.global_rank, batch_idx)
        return self.net(batch[0]).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Faults(callbacks.Callback):  # type: ignore[misc] # either's
    """Saves after each step, and triggers the job's fault."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        lonely[:] = [dist.new_group(timeout=JOB.timeout)]

    def on_train_batch_end(self, trainer: Any, *others: Any) -> None:
        trainer.save_checkpoint(JOB.checkpoint)

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        if trainer.global_rank == 0:
            checkpoint["trap"] = Trap(JOB, trainer.global_step - 1)
        else:
            JOB.come("while saving", 1, trainer.global_step - 1)

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        if sys.exc_info()[0] is None:
            JOB.come("at teardown", trainer.global_rank)


class Strategy(strategies.DDPStrategy):  # type: ignore[misc] # either's
    """Triggers a fault before the process group exists."""

    def setup_environment(self) -> None:
        local_rank = self.local_rank if IS_OURS else int(os.environ.get("LOCAL_RANK", "0"))
        JOB.come("before the group", local_rank)
        super().setup_environment()


def strategy() -> Strategy:
    """Return the job's strategy, with its timeouts."""
    if IS_OURS:
        start_method = "popen" if JOB.contender in SCRIPTED else "spawn"
        return Strategy(start_method=start_method, timeout=JOB.timeout, init_timeout=JOB.init_timeout)
    return Strategy(timeout=JOB.only_timeout, process_group_backend="gloo")


def main() -> None:
    """Run as the process that the user starts, or as one of its workers; record the result."""
    if JOB.who == "main":
        signal.signal(signal.SIGALRM, lambda number, frame: JOB.happen())
    is_main = os.environ.get("LOCAL_RANK", "0") == "0"
    data = torch.utils.data.TensorDataset(torch.ones(12, 4))
    try:
        trainer = library.Trainer(
            strategy=strategy(),
            accelerator="cpu",
            devices=2,
            max_epochs=1,
            callbacks=[Faults()],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            default_root_dir=JOB.folder,
        )
        trainer.fit(Module(), torch.utils.data.DataLoader(data, batch_size=2))
    except BaseException as error:
        if is_main:
            Path(JOB.folder, "caught").write_text(type(error).__name__)
        raise


if __name__ == "__main__":
    main()
