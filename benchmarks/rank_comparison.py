"""The time in which the ranks compare what they hold, beside an epoch of 100 steps of training."""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from torch.nn.functional import cross_entropy

from benchmarks.job import Job
from benchmarks.programs import run_ranks
from benchmarks.results import Result, Row, rows_of
from benchmarks.sampling import Sampling
from rankwise import Callback, Trainer, TrainingModule
from rankwise.trainer.consistency import compare_ranks

_STEPS = 100
_CALLS = 20
_EPOCH = f"an epoch of {_STEPS} steps"
# Case: the model, and the share of the rounds that it takes part in.
_CASES = {"tiny model, 2 ranks": ("tiny", 1), "5 million parameters, 2 ranks": ("medium", 5)}


def measure(sampling: Sampling) -> Result:
    """Measure all cases, one epoch for a round."""
    request = {"rounds": sampling.rounds, "cases": [*_CASES][: 1 if sampling.is_quick else None]}
    rows = [Row.of_json(row) for row in run_ranks("benchmarks.rank_comparison", request)]
    return Result("rank_comparison", rows)


class Model(TrainingModule):
    """The model of a job."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.net = job.make_model()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        import torch

        return torch.optim.SGD(self.parameters(), lr=0.1)


class Clock(Callback):
    """Measures both in turn: a comparison before each epoch, and the epoch's steps."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {_EPOCH: [], "a comparison": []}

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        context = trainer.context(module)
        context.wrapped = context.stage.wrapped
        begun = time.perf_counter()
        for _ in range(_CALLS):
            compare_ranks(context, "in a benchmark")
        self.times["a comparison"].append((time.perf_counter() - begun) / _CALLS)
        self.begun = time.perf_counter()

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.times[_EPOCH].append(time.perf_counter() - self.begun)


def main() -> None:
    """Run as a program: train on two ranks."""
    request = json.loads(sys.argv[1])
    warnings.simplefilter("ignore")
    rows: list[Row] = []
    for case in request["cases"]:
        model, share = _CASES[case]
        job, clock = Job("rankwise", model=model, steps=_STEPS), Clock()
        trainer = Trainer(
            strategy="ddp_fork",
            accelerator="cpu",
            devices=2,
            callbacks=[clock],
            max_epochs=max(2, request["rounds"] // share) + 1,
            use_distributed_sampler=False,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Model(job), job.batches())
        rows += rows_of(case, "s", {name: times[1:] for name, times in clock.times.items()})
    Path(request["folder"], "result").write_text(json.dumps([row.to_json() for row in rows]))


if __name__ == "__main__":
    main()
