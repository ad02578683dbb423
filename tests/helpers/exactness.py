"""Training runs on N ranks, and what one process makes of the same global data."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from rankwise import TrainingModule

FEATURES = 3


@dataclass(frozen=True)
class Case:
    """A training run: the model, the data, how it is split, and how gradients are averaged."""

    world_size: int
    num_samples: int
    batch_size: int
    accumulate: int
    kind: str = "mlp"
    optimizer: str = "sgd"
    weighting: str | None = "samples"
    sync_mode: str = "auto"
    uneven_inputs: str = "error"
    clip: float = 0.0
    clip_algorithm: str = "norm"
    bucket_cap_mb: float = 25
    max_epochs: int = 2
    drop_last: bool = False

    @property
    def trainer_options(self) -> dict[str, Any]:
        """What a `Trainer` is told."""
        clipping = {"gradient_clip_val": self.clip, "gradient_clip_algorithm": self.clip_algorithm}
        limits = {"max_epochs": self.max_epochs, "accumulate_grad_batches": self.accumulate}
        return {**limits, **clipping, "uneven_inputs": self.uneven_inputs}

    @property
    def strategy_options(self) -> dict[str, Any]:
        """What a `DDPStrategy` is told."""
        of_ddp = {"bucket_cap_mb": self.bucket_cap_mb, "find_unused_parameters": self.kind == "branching"}
        return {"gradient_weighting": self.weighting, "sync_mode": self.sync_mode, **of_ddp}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw a training run that has at least one batch on every rank."""
    world_size = draw(st.integers(1, 4))
    batch_size = draw(st.integers(1, 5))
    drop_last = draw(st.booleans())
    least = world_size * batch_size if drop_last else world_size
    kind = draw(st.sampled_from(["linear", "mlp", "branching"]))
    return Case(
        world_size,
        draw(st.integers(least, least + 30)),
        batch_size,
        draw(st.integers(1, 3)),
        kind=kind,
        optimizer=draw(st.sampled_from(["sgd", "adam", "adamw"])),
        weighting=draw(st.sampled_from(["samples", "logged", None])),
        sync_mode=draw(st.sampled_from(["auto", "single_auto_sync", "multi_auto_sync", "forced_sync"])),
        uneven_inputs=draw(st.sampled_from(["error", "join"])),
        clip=draw(st.sampled_from([0.0, 0.3])),
        clip_algorithm=draw(st.sampled_from(["norm", "value"])),
        bucket_cap_mb=draw(st.sampled_from([25, 0.0001])),
        drop_last=drop_last,
    )


class Model(TrainingModule):
    """A model in float64 whose loss is a mean over samples."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.case = case
        width = {"linear": 1, "mlp": 4, "branching": 4}[case.kind]
        self.first = nn.Linear(FEATURES, width).double()
        self.second = nn.Linear(width, 1).double()
        self.branch = nn.Linear(width, 1).double() if case.kind == "branching" else None

    def loss(self, samples: Tensor) -> Tensor:
        """Return the mean loss; a branching model uses another layer for every other kind of sample."""
        hidden = torch.tanh(self.first(samples))
        errors = self.second(hidden) - samples.sum(dim=1, keepdim=True)
        is_odd = samples[:, :1] > 0
        if self.branch is not None and bool(is_odd.any()):  # where no sample needs it, it is unused
            errors = errors + self.branch(hidden) * is_odd
        mean: Tensor = errors.square().mean()
        return mean

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        [samples] = batch
        if self.case.weighting == "logged":
            self.log_weight(len(samples))
        return self.loss(samples)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        kinds: dict[str, Any] = {
            "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
            "adam": lambda p: torch.optim.Adam(p, lr=0.02),
            "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1),
        }
        optimizer: torch.optim.Optimizer = kinds[self.case.optimizer](self.parameters())
        return optimizer


def dataset(count: int) -> Dataset[tuple[Tensor, ...]]:
    """Return the same random samples every time."""
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(count, FEATURES, dtype=torch.float64, generator=generator))


def loader(case: Case) -> DataLoader[Any]:
    """Return the loader that the ranks share."""
    return DataLoader(dataset(case.num_samples), batch_size=case.batch_size, drop_last=case.drop_last)


def shares(case: Case) -> list[list[Tensor]]:
    """Return each rank's batches: every world_size-th sample, padded from the start or dropped."""
    [samples] = dataset(case.num_samples)[:]
    per_rank = case.num_samples / case.world_size
    count = case.num_samples
    if case.uneven_inputs == "error":
        count = (math.floor if case.drop_last else math.ceil)(per_rank) * case.world_size
    order = [number % case.num_samples for number in range(count)]
    own = [samples[order[rank :: case.world_size]] for rank in range(case.world_size)]
    batches = [list(share.split(case.batch_size)) for share in own]
    if case.drop_last:
        batches = [[batch for batch in mine if len(batch) == case.batch_size] for mine in batches]
    return batches


def expected_weights(case: Case) -> Tensor:
    """Train one process on the concatenated data of all ranks, window by window, by hand."""
    model = Model(case)
    optimizer = model.configure_optimizers()
    batches = shares(case)
    for _ in range(case.max_epochs):
        for start in range(0, max(map(len, batches)), case.accumulate):
            window = [batch for mine in batches for batch in mine[start : start + case.accumulate]]
            optimizer.zero_grad()
            _loss(case, model, window).backward()
            _clip(case, model)
            optimizer.step()
    return weights(model)


def _loss(case: Case, model: Model, window: list[Tensor]) -> Tensor:
    """Return the mean over samples; where nothing weighs batches, over batches."""
    if case.weighting is None:
        return torch.stack([model.loss(batch) for batch in window]).mean()
    return model.loss(torch.cat(window))


def _clip(case: Case, model: nn.Module) -> None:
    if case.clip and case.clip_algorithm == "norm":
        nn.utils.clip_grad_norm_(model.parameters(), case.clip)
    elif case.clip:
        nn.utils.clip_grad_value_(model.parameters(), case.clip)


def weights(model: nn.Module) -> Tensor:
    """Return all parameters in one tensor."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
