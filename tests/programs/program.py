"""What a random training program is: the data, the model, the options, and what the script does in order."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Data:
    """A data set of `num_samples` samples, and how a loader reads it.

    Attributes:
        kind: `"map"`; `"iterable"` and `"unsized"` split themselves by shards, with and without a length.
        order: `"given"`, `"sampler"` (the program's own permutation of each epoch) or `"shuffle"` (torch's).
        shape: what a batch looks like; see `learning.SHAPES`.
        sizes: batch sizes of a batch sampler of the program's own; empty for none.
    """

    num_samples: int
    batch_size: int
    seed: int = 0
    kind: str = "map"
    order: str = "given"
    shape: str = "tuple"
    drop_last: bool = False
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Learning:
    """The model and how it is optimized.

    Attributes:
        net: see `learning.Net`.
        frozen: parts whose parameters do not require gradients at first.
        optimizer: see `learning.make_optimizers`.
        schedule: `""`, `"epoch"`, `"step"` or `"plateau"`.
        is_manual: whether `training_step` steps two optimizers in turn, that of the head after odd batches.
        late: parts that are frozen, and that the optimizer does not have, until a change adds them; "extra"
            does not exist until then.
    """

    net: str = "mlp"
    optimizer: str = "sgd"
    schedule: str = ""
    frozen: tuple[str, ...] = ()
    late: tuple[str, ...] = ()
    is_manual: bool = False


@dataclass(frozen=True)
class Options:
    """Arguments of the Trainer and of the strategy."""

    accumulate: int = 1
    clip: float = 0.0
    clip_algorithm: str = "norm"
    uneven_inputs: str = "error"
    weighting: str | None = "samples"
    sync_mode: str = "auto"
    bucket_cap_mb: float = 25
    val_check_interval: int = 0  # 0: at the end of an epoch
    check_val_every_n_epoch: int = 1
    save_every_n_steps: int = 0  # 0: checkpoints are saved at the end of a run only


@dataclass(frozen=True)
class Change:
    """What the script does within a fit: `action` on `part`, before batch `batch` of epoch `epoch`.

    Attributes:
        action: `"freeze"`, `"unfreeze"`, or `"add"` (unfreeze, and give the optimizer a group of the part).
    """

    epoch: int
    batch: int
    action: str
    part: str


@dataclass(frozen=True)
class Deed:
    """What the body of a hook does whenever a fit calls it; see `hook_bodies`.

    Attributes:
        owner: `"callback"` or `"module"`; `"optimizer"` for `"step"`, which torch calls after a step.
    """

    owner: str
    hook: str
    body: str


@dataclass(frozen=True)
class Action:
    """One call of the Trainer.

    Attributes:
        name: `"fit"`, `"validate"`, `"test"` or `"predict"`.
        epochs: after how many epochs more a fit stops.
        steps: after how many optimizer steps more a fit stops; 0 for no limit.
        num_loaders: how many loaders an evaluation has.
    """

    name: str
    epochs: int = 1
    steps: int = 0
    num_loaders: int = 1


@dataclass(frozen=True)
class Run:
    """A Trainer and a module, and what the script does with them.

    Attributes:
        resumes: whether its first fit continues from the checkpoint that the run before has saved.
        is_fold: whether it trains on a random subset of the data, drawn from the global random state.
        trains_with_validation: whether `fit` gets a validation loader.
    """

    actions: tuple[Action, ...]
    resumes: bool = False
    is_fold: bool = False
    has_validation: bool = True

    @property
    def has_fit(self) -> bool:
        """Whether it trains, and so leaves a checkpoint."""
        return any(action.name == "fit" for action in self.actions)


@dataclass(frozen=True)
class Job:
    """What one script does on `world_size` ranks."""

    world_size: int
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class Program:
    """A random training program: jobs, one after another; a checkpoint may go from one to the next.

    Attributes:
        deeds: what the bodies of hooks do, in order.
        is_seeded: whether all ranks build the same module; otherwise rank 0's counts.
        metrics: the metric objects that evaluations log; see `learning.make_metrics`.
        train_metrics: those that training logs.
        says_batch_size: whether the module names the batch size where it logs.
    """

    seed: int
    train: Data
    evaluation: Data
    learning: Learning
    options: Options
    jobs: tuple[Job, ...]
    changes: tuple[Change, ...] = ()
    deeds: tuple[Deed, ...] = ()
    is_seeded: bool = True
    metrics: tuple[str, ...] = ()
    train_metrics: tuple[str, ...] = ()
    says_batch_size: bool = False

    def evaluation_loaders(self, count: int) -> list[Data]:
        """Return the data of `count` evaluation loaders, each with other samples."""
        first = self.evaluation
        more = [
            replace(first, seed=first.seed + 10 * number, num_samples=first.num_samples + number)
            for number in range(1, count)
        ]
        return [first, *more]
