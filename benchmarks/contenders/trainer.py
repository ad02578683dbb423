"""The job with Lightning's Trainer."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger

from benchmarks.job import Job, Steps

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Module(Steps, pl.LightningModule):  # type: ignore[misc]  # which has no types where it is not installed
    """The job's model."""


def train(job: Job) -> None:
    """Train here, or on ranks that the strategy starts."""
    module = Module()
    module.set_job(job)
    strategy = job.start if job.start != "here" else "ddp" if job.ranks > 1 else "auto"
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    if job.has_extras:
        options = {
            "logger": CSVLogger(job.folder or "."),
            "callbacks": [ModelCheckpoint(), TQDMProgressBar()],
        }
        options |= {"log_every_n_steps": 50}
    trainer = pl.Trainer(
        accelerator=job.device,
        devices=job.ranks,
        strategy=strategy,
        max_epochs=1,
        use_distributed_sampler=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, job.batches())
    job.mark("returned")
