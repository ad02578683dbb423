"""The job with rankwise's Trainer."""

from __future__ import annotations

from typing import Any

from benchmarks.job import Job, Steps
from rankwise import Trainer, TrainingModule
from rankwise.callbacks import ModelCheckpoint
from rankwise.loggers import CSVLogger


class Module(Steps, TrainingModule):
    """The job's model."""


def train(job: Job) -> None:
    """Train here, or on ranks that the strategy starts."""
    module = Module()
    module.set_job(job)
    strategy = job.start if job.start != "here" else "ddp" if job.ranks > 1 else "auto"
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    if job.has_extras:
        options = {"logger": CSVLogger(job.folder or "."), "callbacks": [ModelCheckpoint()]}
        options |= {"enable_progress_bar": True, "log_every_n_steps": 50}
    trainer = Trainer(
        accelerator=job.device,
        devices=job.ranks,
        strategy=strategy,
        max_epochs=1,
        use_distributed_sampler=False,
        **options,
    )
    trainer.fit(module, job.batches())
    job.mark("returned")
