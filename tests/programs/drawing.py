"""Draw random training programs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from tests.programs.program import Action, Data, Job, Learning, Options, Program, Run

SIZES = (1, 2, 3)
SHAPES = ("tuple", "dict", "nested")
EVALUATIONS = ("validate", "test", "predict")


@st.composite
def programs(draw: st.DrawFn, world_sizes: tuple[int, ...] = SIZES) -> Program:
    """Draw a program that can run: every rank has a batch in every epoch."""
    job_sizes = draw(st.lists(st.sampled_from(world_sizes), min_size=1, max_size=2))
    train = draw(_training_data(max(job_sizes)))
    learning = draw(_learnings())
    options = draw(_options(train, learning))
    evaluation = draw(_evaluation_data())
    is_step_known = learning.schedule == "plateau"
    jobs: list[Job] = []
    done = 0
    for size in job_sizes:
        job, done = draw(_jobs(size, done, train, needs_validation=is_step_known))
        jobs.append(job)
    return Program(draw(st.integers(0, 99)), train, evaluation, learning, options, tuple(jobs))


@st.composite
def _training_data(draw: st.DrawFn, world_size: int) -> Data:
    batch_size = draw(st.integers(1, 4))
    drop_last = draw(st.booleans())
    least = 2 * world_size * (batch_size if drop_last else 1)
    data = Data(
        draw(st.integers(least, least + 20)),
        batch_size,
        seed=draw(st.integers(0, 9)),
        order=draw(st.sampled_from(["given", "sampler", "shuffle"])),
        shape=draw(st.sampled_from(SHAPES)),
        drop_last=drop_last,
    )
    if data.order != "shuffle" and draw(st.integers(0, 4)) == 0:
        sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
        enough = max(data.num_samples, 2 * world_size * max(sizes))
        return replace(data, sizes=tuple(sizes), drop_last=False, num_samples=enough)
    return data


@st.composite
def _evaluation_data(draw: st.DrawFn) -> Data:
    batch_size = draw(st.integers(1, 4))
    return Data(
        draw(st.integers(batch_size, 15)),
        batch_size,
        seed=draw(st.integers(10, 19)),
        order=draw(st.sampled_from(["given", "sampler"])),
        shape=draw(st.sampled_from(SHAPES)),
        drop_last=draw(st.booleans()),
    )


@st.composite
def _learnings(draw: st.DrawFn) -> Learning:
    return Learning(
        net=draw(st.sampled_from(["mlp", "running", "branching"])),
        optimizer=draw(st.sampled_from(["sgd", "nesterov", "adam", "adamw", "rmsprop"])),
        schedule=draw(st.sampled_from(["", "epoch", "step", "plateau"])),
        frozen=draw(st.sampled_from([(), ("body",), ("side",)])),
    )


@st.composite
def _options(draw: st.DrawFn, train: Data, learning: Learning) -> Options:
    every_n_epoch = 1 if learning.schedule == "plateau" else draw(st.integers(1, 2))
    weightings: list[Any] = ["samples", "logged", None]
    return Options(
        accumulate=draw(st.integers(1, 3)),
        clip=draw(st.sampled_from([0.0, 0.3])),
        clip_algorithm=draw(st.sampled_from(["norm", "value"])),
        uneven_inputs=draw(st.sampled_from(["error", "join"])),
        weighting=draw(st.sampled_from(weightings)),
        sync_mode=draw(st.sampled_from(["auto", "single_auto_sync", "multi_auto_sync", "forced_sync"])),
        bucket_cap_mb=draw(st.sampled_from([25, 0.0001])),
        val_check_interval=0 if learning.schedule == "plateau" else draw(st.integers(0, 1)),
        check_val_every_n_epoch=every_n_epoch,
    )


@st.composite
def _jobs(
    draw: st.DrawFn, world_size: int, done: int, train: Data, *, needs_validation: bool
) -> tuple[Job, int]:
    """Draw what a script does; `done` epochs may have been done by the job before."""
    runs: list[Run] = []
    for _ in range(draw(st.integers(1, 2))):
        resumes = done > 0 and draw(st.booleans())
        is_fold = not resumes and not train.sizes and draw(st.integers(0, 3)) == 0
        epochs = done if resumes else 0
        actions = []
        for name in draw(st.lists(st.sampled_from(["fit", *EVALUATIONS]), min_size=1, max_size=4)):
            epochs += name == "fit"
            actions.append(Action(name, epochs=epochs))
        if resumes and all(action.name != "fit" for action in actions):
            resumes = False
        has_validation = needs_validation or draw(st.booleans())
        runs.append(Run(tuple(actions), resumes=resumes, is_fold=is_fold, has_validation=has_validation))
        if any(action.name == "fit" for action in actions):
            done = epochs
    return Job(world_size, tuple(runs)), done
