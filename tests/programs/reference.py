"""The hand-written loop of one process: what a program gives, worked out without rankwise."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor, nn

from tests.programs import hook_bodies, learning
from tests.programs.learning import Net, Samples
from tests.programs.program import Action, Data, Job, Program, Run

Outcome = dict[str, Any]
Seen = list[list[tuple[int, list[int]]]]  # of each rank: epoch and sample numbers of each training batch


def run_job(
    program: Program, job: Job, saved: Learner | None, seen: list[Seen], draws: list[list[float]]
) -> tuple[list[Outcome], Any]:
    """Return what each action of a job gives, and the learner that its last run saves.

    `saved` is the learner that the job before has saved; `seen`, for each fit of the job, the batches of the
    ranks, from which the order is taken where torch shuffles; `draws` the random numbers that rank 0 has
    drawn in hooks.
    """
    outcomes: list[Outcome] = []
    seen, draws = list(seen), list(draws)
    torch.manual_seed(program.seed)  # rank 0's where every rank has another
    for run in job.runs:
        learner = Learner(program, job.world_size, run, saved if run.resumes else None)
        for action in run.actions:
            with torch.random.fork_rng():
                if action.name == "fit":
                    learner.draws = list(draws.pop(0)) if draws else []
                    result = learner.fit(action, seen.pop(0) if seen else [])
                else:
                    result = learner.evaluate(action)
            torch.randint(2**63 - 1, ())  # a stage draws its seed
            outcomes.append({**learner.state(), **result, "random": torch.rand(2)})
            if job.world_size > 1 and not program.is_seeded:
                del outcomes[-1]["random"]  # only rank 0 has it
        if learner.optimizers:
            saved = learner.snapshot or learner
    return outcomes, saved


class Learner:
    """A model in training: what a Trainer, its module and its optimizer hold."""

    def __init__(self, program: Program, world_size: int, run: Run, saved: Learner | None) -> None:
        self.program, self.world_size, self.run = program, world_size, run
        self.net = new_net(program)
        self.subset = new_fold(program, run)
        self.data = learning.Rows(program.train, self.subset).samples
        self.optimizers: list[torch.optim.Optimizer] = []
        self.scheduler: Any = None
        self.epoch = self.step = self.batches_done = self.items_done = 0
        self.is_validated = self.is_epoch_done = False
        self.is_snapshot = False
        self.logged = Logged(program.train_metrics)
        self.notes: list[float] = []
        self.draws: list[float] = []
        self.saved = saved
        self.snapshot: Learner | None = None  # what the last checkpoint within a fit holds

    def state(self) -> Outcome:
        """Return the state that is compared after every action."""
        state: Outcome = {f"net.{name}": tensor.clone() for name, tensor in self.net.state_dict().items()}
        state["position"] = [self.epoch, self.step]
        state["optimizers"] = copy.deepcopy([optimizer.state_dict() for optimizer in self.optimizers])
        return state

    # --------------------------------------------------------------------------------- fit

    def fit(self, action: Action, seen: Seen) -> Outcome:
        """Train up to the action's limits."""
        self._begin_fit()
        self.notes = []
        fit: Outcome = {"metrics": {}, "validations": [], "notes": self.notes}
        epochs, steps = self.epoch + action.epochs, self.step + action.steps if action.steps else -1
        while self.epoch < epochs and self.step != steps:
            self._run_epoch(steps, self._stream(seen), fit)
        return fit

    def _begin_fit(self) -> None:
        if not self.optimizers:
            self.optimizers = learning.make_optimizers(self.net, self.program.learning)
            self.scheduler = learning.make_scheduler(self.optimizers[0], self.program.learning)
        if self.saved is not None:
            self._resume(self.saved)
            self.saved = None

    def _resume(self, saved: Learner) -> None:
        self.net.load_state_dict(saved.net.state_dict())
        for name, parameter in saved.net.named_parameters():
            self.net.get_parameter(name).requires_grad_(parameter.requires_grad)
        for optimizer, other in zip(self.optimizers, saved.optimizers, strict=True):
            optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
        if self.scheduler is not None:
            self.scheduler.load_state_dict(saved.scheduler.state_dict())
        self.epoch, self.step = saved.epoch, saved.step
        self.batches_done, self.items_done = saved.batches_done, saved.items_done
        self.is_validated, self.logged = saved.is_validated, copy.deepcopy(saved.logged)
        self.is_epoch_done = saved.is_epoch_done
        self.snapshot = saved if self.program.options.save_every_n_steps and saved.is_snapshot else None

    def _run_epoch(self, steps: int, stream: list[int] | None, fit: Outcome) -> None:
        first = self.batches_done
        if not first:
            self._perform("on_train_epoch_start")
        batches: list[list[Samples]] = [[]] if self.is_epoch_done else self._batches(stream)
        self.logged = logged = (
            self.logged if first else Logged(self.program.train_metrics)
        )  # a second fit continues it
        window: list[Samples] = []
        total = first + max(map(len, batches))
        if first and first == total and not self.is_epoch_done:  # an earlier run has left no batch
            self._schedule("epoch")
        if first and not self.is_validated:
            self._validate_if_due(first - 1, first == total, fit)
        for number in range(first, total):
            self._perform("on_train_batch_start", owners=("callback",))
            self._change(number)
            self._perform("on_train_batch_start", owners=("module",))
            if not window:
                self._optimizer(number).zero_grad()
                logged.last = {}
            mine = [rank_batches[number - first : number - first + 1] for rank_batches in batches]
            with self._toggled(number):
                window += self._backward(mine, logged)
            is_last = number + 1 == total
            if self._end_batch(window, number, is_last, logged, fit):
                window = []
                if not is_last and self.step == steps:
                    fit["metrics"].update(logged.values())
                    self._perform("on_train_epoch_end")
                    return
        fit["metrics"].update(logged.values())
        if self.program.learning.schedule == "plateau":
            self.scheduler.step(fit["metrics"]["val"])
        self._perform("on_train_epoch_end")
        self.epoch += 1
        self.batches_done = self.items_done = 0
        self.is_epoch_done = False

    def _end_batch(
        self, window: list[Samples], number: int, is_last: bool, logged: Logged, fit: Outcome
    ) -> bool:
        """Step and validate after a batch where that is due; return whether its window ends."""
        data = self.program.train
        is_window_end = is_last or (number + 1) % self.program.options.accumulate == 0
        self.is_validated, self.is_epoch_done = False, is_last
        self.batches_done += 1
        self.items_done += self.world_size * (1 if data.sizes else data.batch_size)
        if is_window_end:
            self._step(window, self._optimizer(number))
        if is_last:
            self._schedule("epoch")
        self._perform("on_train_batch_end")
        if is_window_end:
            fit["metrics"].update(logged.last_values())
            self._save_if_due()
            self._validate_if_due(number, is_last, fit)
        return is_window_end

    def _save_if_due(self) -> None:
        interval = self.program.options.save_every_n_steps
        if interval and self.step % interval == 0:
            self.snapshot = None
            saved = copy.deepcopy(self)
            saved.is_snapshot, self.snapshot = True, saved

    def _optimizer(self, number: int) -> torch.optim.Optimizer:
        return self.optimizers[number % len(self.optimizers)]

    @contextmanager
    def _toggled(self, number: int) -> Iterator[None]:
        """Freeze the parameters of the optimizers that do not step after this batch."""
        others = [optimizer for optimizer in self.optimizers if optimizer is not self._optimizer(number)]
        frozen = [p for optimizer in others for p in _parameters(optimizer) if p.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_(False)
        yield
        for parameter in frozen:
            parameter.requires_grad_(True)

    def _change(self, number: int) -> None:
        """Do what the script does before this batch."""
        for change in self.program.changes:
            if (change.epoch, change.batch) == (self.epoch, number):
                learning.apply_change(self.net, self.optimizers[0], change)

    def _perform(
        self,
        hook: str,
        optimizer: torch.optim.Optimizer | None = None,
        owners: Sequence[str] = ("callback", "module"),
    ) -> None:
        """Do what the bodies of a hook do: callbacks come first."""
        optimizers = self.optimizers if optimizer is None else [optimizer]
        for owner in owners:
            for deed in self.program.deeds:
                if (deed.owner, deed.hook) == (owner, hook):
                    note = hook_bodies.perform(
                        deed, self.net, optimizers, add_up=self._sum_of_ranks, draw=lambda: self.draws.pop(0)
                    )
                    self.notes.append(note)

    def _sum_of_ranks(self) -> float:
        return self.world_size * (self.world_size + 1) / 2

    def _backward(self, batches: list[list[Samples]], logged: Logged) -> list[Samples]:
        """Add the gradients of the ranks' batches, each times its weight; return those that are there.

        A rank has one batch or none. Buffers become those of rank 0.
        """
        for rank, batch in ((rank, batch) for rank, mine in enumerate(batches) for batch in mine):
            before = {name: buffer.clone() for name, buffer in self.net.named_buffers()}
            is_by_token = self.program.options.weighting == "logged"
            predicted, loss = learning.predict(self.net, batch, is_by_token=is_by_token)
            (loss * self._weight(batch)).backward()
            if rank:
                for name, buffer in self.net.named_buffers():
                    buffer.copy_(before[name])
            logged.add(rank, batch, predicted, float(loss.detach()))
        return [batch for mine in batches for batch in mine]

    def _weight(self, batch: Samples) -> float:
        weights = {"samples": float(len(batch)), "logged": float(batch.tokens.sum()), None: 1.0}
        return weights[self.program.options.weighting]

    def _step(self, window: list[Samples], optimizer: torch.optim.Optimizer) -> None:
        options, total = self.program.options, sum(map(self._weight, window))
        parameters = _parameters(optimizer)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad /= total
        if not self.program.learning.is_manual:  # there the step clips before it calls the optimizer
            self._perform("on_before_optimizer_step", optimizer)
        if options.clip and options.clip_algorithm == "norm":
            nn.utils.clip_grad_norm_(parameters, options.clip)
        elif options.clip:
            nn.utils.clip_grad_value_(parameters, options.clip)
        if self.program.learning.is_manual:
            self._perform("on_before_optimizer_step", optimizer)
        optimizer.step()
        self._perform("step", optimizer, owners=("optimizer",))
        self.step += 1
        self._schedule("step")

    def _schedule(self, moment: str) -> None:
        if self.program.learning.schedule == moment:
            self.scheduler.step()

    def _validate_if_due(self, number: int, is_last: bool, fit: Outcome) -> None:
        options = self.program.options
        interval = options.val_check_interval
        first = number - number % options.accumulate
        is_due = is_last if not interval else (number + 1) // interval > first // interval
        if self.run.has_validation and is_due and (self.epoch + 1) % options.check_val_every_n_epoch == 0:
            self._perform("on_validation_epoch_start")
            found = self._measure("val", self.program.evaluation)
            self._perform("on_validation_epoch_end")
            fit["metrics"].update(found)
            fit["validations"].append(found["val"])
            self.is_validated = True

    # --------------------------------------------------------------------------------- data

    def _batches(self, stream: list[int] | None) -> list[list[Samples]]:
        """Return each rank's batches that are left of the epoch."""
        data = self.program.train
        if data.kind != "map":
            return [mine[self.batches_done :] for mine in self._iterated(data)]
        items: list[list[int]]
        if stream is not None:
            items = [[self._position(number)] for number in stream]
        else:
            order = learning.order_of(data, len(self.data), self.epoch)
            whole = learning.cut(order, data.sizes) if data.sizes else [[number] for number in order]
            items = list(islice(cycle(whole), self.items_done, self.items_done + self._count(len(whole))))
        size = 1 if data.sizes else data.batch_size
        shares = [items[rank :: self.world_size] for rank in range(self.world_size)]
        cuts = [[share[start : start + size] for start in range(0, len(share), size)] for share in shares]
        if data.drop_last:
            cuts = [[batch for batch in mine if len(batch) == size] for mine in cuts]
        return [[self.data.pick([n for item in batch for n in item]) for batch in mine] for mine in cuts]

    def _stream(self, seen: Seen) -> list[int] | None:
        """Return what is left of the epoch in the order that the ranks have shown; None if they do not."""
        if self.program.train.order != "shuffle":
            return None
        count = self._count(len(self.data))
        shares = [[n for epoch, batch in mine if epoch == self.epoch for n in batch] for mine in seen]
        shares = [share[: len(range(rank, count, self.world_size))] for rank, share in enumerate(shares)]
        shown = [share[n] for n in range(max(map(len, shares))) for share in shares if n < len(share)]
        return shown + shown[:1] * (count - len(shown))  # where the fit stops within the epoch

    def _position(self, number: int) -> int:
        return int((self.data.numbers == number).nonzero())

    def _count(self, length: int) -> int:
        """Return how many items all ranks take of the epoch that has `length`."""
        left = max(0, length - self.items_done)
        rest = left % self.world_size
        if rest == 0 or self.program.options.uneven_inputs == "join":
            return left
        return left - rest if self.program.train.drop_last else left + self.world_size - rest

    def _iterated(self, data: Data) -> list[list[Samples]]:
        order = learning.order_of(data, len(self.data), self.epoch)
        shares = [order[rank :: self.world_size] for rank in range(self.world_size)]
        cuts = [_chunks(share, data.batch_size, drop_last=data.drop_last) for share in shares]
        if self.program.options.uneven_inputs == "truncate":
            cuts = [mine[: min(map(len, cuts))] for mine in cuts]
        return [[self.data.pick(batch) for batch in mine] for mine in cuts]

    # --------------------------------------------------------------------------------- evaluation

    def evaluate(self, action: Action) -> Outcome:
        """Validate, test or predict."""
        loaders = self.program.evaluation_loaders(action.num_loaders)
        if action.name == "predict":
            predictions = [self._predictions(data) for data in loaders]
            return {"predictions": predictions if len(loaders) > 1 else predictions[0]}
        prefix = {"validate": "val", "test": "test"}[action.name]
        found = [self._measure(prefix, data) for data in loaders]
        if len(loaders) == 1:
            return {"metrics": found}
        named = [
            {f"{name}/dataloader_idx_{number}": value for name, value in one.items()}
            for number, one in enumerate(found)
        ]
        return {"metrics": named}

    def _predictions(self, data: Data) -> list[Tensor]:
        order = learning.order_of(data, data.num_samples, 0)
        chunks = _chunks(order, data.batch_size, drop_last=data.drop_last)
        return [self._predict(learning.samples(data).pick(chunk)) for chunk in chunks]

    def _predict(self, batch: Samples) -> Tensor:
        self.net.eval()
        with torch.no_grad():
            predicted: Tensor = self.net(batch.x)
        self.net.train()
        return predicted

    def _measure(self, prefix: str, data: Data) -> dict[str, float]:
        order = learning.order_of(data, data.num_samples, self.epoch)
        chunks = _chunks(order, data.batch_size, drop_last=data.drop_last)
        batches = [learning.samples(data).pick(chunk) for chunk in chunks]
        predicted = [self._predict(batch) for batch in batches]
        whole = learning.samples(data).pick([number for chunk in chunks for number in chunk])
        errors = (self._predict(whole) - whole.y).square()
        found = {prefix: float(errors.mean()), f"{prefix}_max": float(errors.max())}
        found.update(_computed(prefix, self.program.metrics, list(zip(predicted, batches, strict=True))))
        return {**found, f"{prefix}_sum": len(whole)}


def _computed(prefix: str, names: tuple[str, ...], updates: list[tuple[Tensor, Samples]]) -> dict[str, float]:
    with learning.without_warnings():
        metrics = learning.make_metrics(names)
        for name in names:
            for predicted, batch in updates:
                learning.update_metric(metrics[name], predicted, batch)
        return {f"{prefix}_metric_{name}": float(metrics[name].compute()) for name in names}


@dataclass
class Logged:
    """The training metrics of an epoch."""

    metrics: tuple[str, ...]
    losses: list[tuple[float, int]] = field(default_factory=list)
    largest: float = float("-inf")
    updates: list[tuple[Tensor, Samples]] = field(default_factory=list)
    last: dict[int, tuple[float, int]] = field(default_factory=dict)  # of each rank in this window

    def add(self, rank: int, batch: Samples, predicted: Tensor, loss: float) -> None:
        """Add a batch."""
        self.losses.append((loss, len(batch)))
        self.last[rank] = (loss, len(batch))
        self.updates.append((predicted, batch))
        self.largest = max(self.largest, float(batch.x.max()))

    def values(self) -> dict[str, float]:
        """Return the mean loss over samples, the largest feature, the number of samples, metric objects."""
        found = {"train": _mean(self.losses), "train_max": self.largest}
        found["train_sum"] = sum(size for _, size in self.losses)
        return {**found, **_computed("train", self.metrics, self.updates)}

    def last_values(self) -> dict[str, float]:
        """Return the mean and the largest of the ranks' last losses in this window."""
        last = list(self.last.values())
        return {"last": _mean(last), "last_max": max(loss for loss, _ in last)}


def _mean(losses: list[tuple[float, int]]) -> float:
    return sum(loss * size for loss, size in losses) / sum(size for _, size in losses)


def new_net(program: Program) -> Net:
    """Build the network as the script does, from the global random state."""
    net = Net(program.learning.net)
    for part in (*program.learning.frozen, *program.learning.late):
        for parameter in learning.part_of(net, part):
            parameter.requires_grad_(False)
    return net


def new_fold(program: Program, run: Run) -> list[int] | None:
    """Draw a random half of the data from the global random state; None for all data."""
    if not run.is_fold:
        return None
    order: list[int] = torch.randperm(program.train.num_samples).tolist()
    return order[: (len(order) + 1) // 2]


def _parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _chunks(items: Sequence[int], size: int, *, drop_last: bool) -> list[list[int]]:
    chunks = [list(items[start : start + size]) for start in range(0, len(items), size)]
    return [chunk for chunk in chunks if len(chunk) == size or not drop_last]
