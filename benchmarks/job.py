"""The job that every contender does: a model, its batches, and marks of when things happen on each rank."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

_WARM_UP = 10  # steps
_PAUSE_S = 0.005

_begun: list[tuple[float, float]] = []
"""When the steps of this process began: on the clock of all processes, and in its processor time."""


@dataclass  # not frozen: Lightning refuses to give such to spawned processes
class Job:
    """What a contender trains, and how.

    Attributes:
        contender: a name in the table of contenders.
        start: `"here"` in this process, of which there is one for each rank, or by the contender's own
            launcher: `"ddp"` (it starts programs), `"ddp_fork"`, `"ddp_spawn"`.
        model: `"tiny"`, an MLP 32-64-10 with batches of 32; `"medium"`, 5 million parameters with batches of
            16; `"large"`, 50 million (200 MB).
        device: where the model is: `"cpu"`; raw torch, rankwise and Lightning's Trainer also take `"cuda"`.
            Batches begin on the CPU.
        folder: where ranks leave marks; none without one.
        has_extras: whether there is a progress bar, a CSV file with a line every 50 steps, and a checkpoint.
        holds: whether each rank waits within its last step until the folder has a file `go`.
    """

    contender: str
    start: str = "here"
    model: str = "tiny"
    device: str = "cpu"
    steps: int = 2
    ranks: int = 1
    folder: str = ""
    has_extras: bool = False
    holds: bool = False

    def to_json(self) -> str:
        """Return the job as text, for `from_json`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Return the job of a text."""
        return cls(**json.loads(text))

    def make_model(self) -> nn.Sequential:
        """Return the model, which has the same parameters in each call."""
        import torch
        from torch import nn

        torch.manual_seed(0)
        sizes = {"tiny": (32, 64, 10), "medium": (512, 2048, 1900, 16), "large": (64, 7000, 7000, 10)}
        layers: list[nn.Module] = []
        for number, width in enumerate(sizes[self.model][1:]):
            layers += [nn.Linear(sizes[self.model][number], width), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    def batches(self) -> Batches:
        """Return the batches, which are in memory."""
        import torch

        size, features = {"tiny": (32, 32), "medium": (16, 512), "large": (2, 64)}[self.model]
        return Batches(torch.randn(size, features), torch.randint(10, (size,)), self.steps)

    def begin_step(self) -> None:
        """Note that a step begins. Runs on: every rank, first thing in a step."""
        _begun.append((time.perf_counter(), time.process_time()))
        if self.folder and len(_begun) == 2:
            self.mark("first_step")
        if self.holds and len(_begun) == self.steps:
            self.mark("holding")
            while not Path(self.folder, "go").exists():
                time.sleep(_PAUSE_S)

    def mark(self, what: str) -> None:
        """Write to the folder, if there is one, when something happened in this process."""
        if self.folder:
            new = Path(self.folder, f"new-{os.getpid()}")
            new.write_text(repr(time.perf_counter()))
            new.rename(Path(self.folder, f"{what}-{os.getpid()}"))

    def moment(self, what: str) -> float:
        """Return when the last process has marked something."""
        return max(float(path.read_text()) for path in Path(self.folder).glob(f"{what}-*"))


@dataclass  # not frozen, as `Job`
class Batches:
    """The same batch in every step: samples (B, F), labels (B,). Lightning takes a list for many loaders."""

    samples: Tensor
    labels: Tensor
    steps: int

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return repeat((self.samples, self.labels), self.steps)


def take_times() -> tuple[float, float]:
    """Return wall and processor time of a step in seconds, the mean after some steps; forget all steps."""
    times = _begun[_WARM_UP:]
    _begun.clear()
    (begun, worked), (end, work) = times[0], times[-1]
    return (end - begun) / (len(times) - 1), (work - worked) / (len(times) - 1)


class Steps:
    """Training steps, for modules of rankwise and Lightning; the base class beside it is theirs."""

    log: Any

    def set_job(self, job: Job) -> None:
        """Take a job, and make its model."""
        self.job, self.net = job, job.make_model()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        from torch.nn.functional import cross_entropy

        self.job.begin_step()
        loss = cross_entropy(self.net(batch[0]), batch[1])
        if self.job.has_extras:
            self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        import torch

        return torch.optim.SGD(self.net.parameters(), lr=0.01)

    def on_train_end(self) -> None:
        self.job.mark("trained")
