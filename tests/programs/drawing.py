"""Draw random training programs."""

import math
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from tests.programs.hook_bodies import BATCH_HOOKS, BODIES, HOOKS, STEP_BODIES, STEP_HOOKS
from tests.programs.program import Action, Change, Data, Deed, Job, Learning, Options, Program, Run

SIZES = (1, 2, 3)
SHAPES = ("tuple", "dict", "nested", "record", "images", "time first", "scalar first")
PLAIN_SHAPES = ("tuple", "dict", "nested")
METRICS = ("mse", "r2", "pearson", "spearman", "root", "sum")
TRAIN_METRICS = ("mse", "spearman", "root", "sum")  # of one sample, and continued on other numbers of ranks
EVALUATIONS = ("validate", "test", "predict")


@st.composite
def programs(
    draw: st.DrawFn, world_sizes: tuple[int, ...] = SIZES, *, shuffles: bool = True, draws: bool = True
) -> Program:
    """Draw a program that can run: every rank has a batch in every epoch.

    `shuffles` and `draws` are whether torch may shuffle, and hooks may draw random numbers.
    """
    job_sizes = draw(st.lists(st.sampled_from(world_sizes), min_size=1, max_size=3))
    train = draw(_training_data(max(job_sizes), shuffles=shuffles))
    learning = draw(_learnings())
    # Iterable data can only be read again from its beginning by the same number of ranks.
    can_stop = train.kind == "map" or len(set(job_sizes)) == 1
    options = draw(_options(train, learning, can_stop=can_stop))
    if train.kind != "map" and options.uneven_inputs == "error":  # every rank must have as many samples
        same = math.lcm(*job_sizes)
        train = replace(train, num_samples=math.ceil(train.num_samples / same) * same)
    is_seeded = draw(st.booleans())
    says_batch_size = draw(st.booleans()) or (train.kind != "map" and train.shape not in PLAIN_SHAPES)
    can_fold = is_seeded and train.kind == "map" and not train.sizes and train.order != "sampler"
    jobs: list[Job] = []
    for size in job_sizes:
        has_saved = not learning.late and any(run.has_fit for job in jobs for run in job.runs)
        can = {"can_resume": not learning.late, "can_fold": can_fold, "can_stop": can_stop}
        validates = True if learning.schedule == "plateau" else None
        jobs.append(draw(_jobs(size, has_saved=has_saved, has_validation=validates, **can)))
    return Program(
        draw(st.integers(0, 99)),
        train,
        draw(_evaluation_data()),
        learning,
        options,
        tuple(jobs),
        changes=draw(_changes(learning, options)),
        deeds=draw(_deeds(options, draws=draws)),
        is_seeded=is_seeded,
        metrics=draw(_some(METRICS)),
        train_metrics=draw(_some(TRAIN_METRICS)),
        says_batch_size=says_batch_size,
    )


def _some(names: tuple[str, ...]) -> st.SearchStrategy[tuple[str, ...]]:
    """Draw no name, one or two."""
    return st.lists(st.sampled_from(names), max_size=2, unique=True).map(tuple)


@st.composite
def _changes(draw: st.DrawFn, learning: Learning, options: Options) -> tuple[Change, ...]:
    """Draw what is frozen and unfrozen within fits, at batches of all ranks; the head is always trained."""
    last = 0 if options.uneven_inputs == "join" else 4
    places: Any = st.builds(
        Change,
        epoch=st.integers(0, 2),
        batch=st.integers(0, last),
        action=st.sampled_from(["freeze", "unfreeze"]),
        part=st.sampled_from([part for part in ("body", "side") if part not in learning.late]),
    )
    changes: list[Change] = [] if learning.is_manual else draw(st.lists(places, max_size=3))
    added = [Change(0, draw(st.integers(0, min(last, 2))), "add", part) for part in learning.late]
    return (*changes, *added)


@st.composite
def _deeds(draw: st.DrawFn, options: Options, *, draws: bool) -> tuple[Deed, ...]:
    """Draw what hooks do; hooks of batches are not called on a rank that has none left."""
    hooks = [hook for hook in HOOKS if options.uneven_inputs != "join" or hook not in BATCH_HOOKS]
    deeds = []
    for hook in draw(st.lists(st.sampled_from(hooks), max_size=4)):
        bodies = STEP_BODIES if hook in STEP_HOOKS else BODIES
        body = draw(st.sampled_from([body for body in bodies if draws or body not in ("draw", "noise")]))
        owner = "optimizer" if hook == "step" else draw(st.sampled_from(["callback", "module"]))
        deeds.append(Deed(owner, hook, body))
    return tuple(deeds)


@st.composite
def _training_data(draw: st.DrawFn, world_size: int, *, shuffles: bool) -> Data:
    batch_size = draw(st.integers(1, 4))
    kind = draw(st.sampled_from(["map", "map", "iterable", "unsized"]))
    drop_last = draw(st.booleans())
    least = 2 * world_size * (batch_size if drop_last else 1)
    orders = ["given", "sampler", "shuffle"]
    data = Data(
        draw(st.integers(least, least + 20)),
        batch_size,
        seed=draw(st.integers(0, 9)),
        kind=kind,
        order=draw(st.sampled_from(orders if kind == "map" and shuffles else orders[:2])),
        shape=draw(st.sampled_from(SHAPES)),
        drop_last=drop_last,
    )
    if kind == "map" and data.order != "shuffle" and draw(st.integers(0, 4)) == 0:
        sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
        enough = max(data.num_samples, 2 * world_size * max(sizes))
        return replace(data, sizes=tuple(sizes), drop_last=False, num_samples=enough)
    return data


@st.composite
def _evaluation_data(draw: st.DrawFn) -> Data:
    batch_size, drop_last = draw(st.integers(1, 4)), draw(st.booleans())
    least = 4  # with one on each of three ranks, torchmetrics' Pearson is NaN
    return Data(
        draw(st.integers(math.ceil(least / batch_size) * batch_size if drop_last else least, 15)),
        batch_size,
        seed=draw(st.integers(10, 19)),
        order=draw(st.sampled_from(["given", "sampler"])),
        shape=draw(st.sampled_from(SHAPES)),
        drop_last=drop_last,
    )


@st.composite
def _learnings(draw: st.DrawFn) -> Learning:
    is_manual = draw(st.integers(0, 4)) == 0
    net = draw(st.sampled_from(["mlp", "running", "branching"]))
    late: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    if not (is_manual and net == "branching"):  # of the first optimizer, some batches use the body alone
        late = draw(st.sampled_from([(), (), (), ("body",), ("side",), ("extra",)]))
        frozen = () if late else draw(st.sampled_from([(), ("body",), ("side",)]))
    return Learning(
        net=net,
        optimizer=draw(st.sampled_from(["sgd", "nesterov", "adam", "adamw", "rmsprop"])),
        schedule="" if late or is_manual else draw(st.sampled_from(["", "epoch", "step", "plateau"])),
        frozen=frozen,
        late=late,
        is_manual=is_manual,
    )


@st.composite
def _options(draw: st.DrawFn, train: Data, learning: Learning, *, can_stop: bool) -> Options:
    every_n_epoch = 1 if learning.schedule == "plateau" else draw(st.integers(1, 2))
    weightings: list[Any] = ["samples", "logged", None]
    policies = ["error", "join", "truncate"]
    return Options(
        accumulate=1 if learning.is_manual else draw(st.integers(1, 3)),
        clip=draw(st.sampled_from([0.0, 0.3])),
        clip_algorithm=draw(st.sampled_from(["norm", "value"])),
        uneven_inputs=draw(st.sampled_from(policies)),
        weighting=draw(st.sampled_from(weightings if train.kind == "map" else weightings[1:])),
        sync_mode=draw(st.sampled_from(["auto", "single_auto_sync", "multi_auto_sync", "forced_sync"])),
        bucket_cap_mb=draw(st.sampled_from([25, 0.0001])),
        val_check_interval=0 if learning.schedule == "plateau" else draw(st.integers(0, 1)),
        check_val_every_n_epoch=every_n_epoch,
        save_every_n_steps=draw(st.integers(0, 3)) if can_stop and not learning.late else 0,
    )


@st.composite
def _jobs(
    draw: st.DrawFn,
    world_size: int,
    *,
    has_saved: bool,
    can_resume: bool,
    can_fold: bool,
    can_stop: bool,
    has_validation: bool | None,
) -> Job:
    """Draw what a script does; `has_saved` is whether there is a checkpoint to resume from."""
    runs: list[Run] = []
    for _ in range(draw(st.integers(1, 2))):
        names = draw(st.lists(st.sampled_from(["fit", *EVALUATIONS]), min_size=1, max_size=4))
        resumes = has_saved and "fit" in names and draw(st.booleans())
        validates = draw(st.booleans()) if has_validation is None else has_validation
        actions = [
            draw(_fits(can_stop=can_stop))
            if name == "fit"
            else Action(name, num_loaders=draw(st.sampled_from([1, 1, 2])))
            for name in names
        ]
        is_fold = can_fold and not resumes and draw(st.integers(0, 3)) == 0
        runs.append(Run(tuple(actions), resumes=resumes, is_fold=is_fold, has_validation=validates))
        has_saved = has_saved or (can_resume and "fit" in names)
    return Job(world_size, tuple(runs))


@st.composite
def _fits(draw: st.DrawFn, *, can_stop: bool) -> Action:
    steps = draw(st.integers(0, 5)) if can_stop else 0
    return Action("fit", epochs=2 if steps else 1, steps=steps)
