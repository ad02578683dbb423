"""A program that launches many times, well and badly in turn, and samples what it has of the machine.

`python -m tests.process.many_launches KIND LAUNCHES [EVERY] [gc-off]` prints a sample after each EVERY
launches, as a JSON object in a line. KIND is a start method, "elastic", "script" (the processes of one
script, which launch together) or "command" (a command that is run again after each failure).

With "script" and "command" this process is a rank, whose collectives torch's flight recorder keeps: by
default the last 2,000 with their stacks, about 6 KiB a launch until it is full. That is no leak of a launch,
so here the recorder keeps so few that it is full before the first sample.
"""

import atexit
import gc
import itertools
import json
import logging
import math
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from multiprocessing import util
from pathlib import Path
from typing import Any

import psutil
import torch

from rankwise.strategies import DDPStrategy
from tests.helpers.own_process import few_files
from tests.process.exception_tasks import FAILS_AT, Fails
from tests.process.host_cases import strategy_of
from tests.process.training_tasks import Regression, loader, quiet_trainer

Sample = dict[str, Any]

GOOD = ("group", "fit", "no group", "thread")
BAD = ("exception", "killed", "refused", "exit", "few files", "not readable", "fit fails", "not picklable")


def _in_turn(good: Sequence[str], bad: Sequence[str]) -> tuple[str, ...]:
    count = math.lcm(len(good), len(bad))
    return tuple(how for number in range(count) for how in (good[number % len(good)], bad[number % len(bad)]))


KINDS = {
    **dict.fromkeys(("fork", "forkserver", "spawn"), _in_turn(GOOD, BAD)),
    "elastic": _in_turn((*GOOD[:3], "restarts"), BAD),  # torch's agent runs in the main thread only
    "script": _in_turn(("group", "fit"), ("other devices", "other rendezvous")),  # others end its ranks
    "command": (
        *("group", "exception", "few files"),
        *("fit", "killed", "few files"),
        *("group", "exit", "few files"),
    ),
}
"""What is launched, over and over again."""

_RECORDED = "20"
"""How many collectives torch's flight recorder keeps; read when a process creates its first group."""

# ------------------------------------------------------------------------------------------- samples


def sample() -> Sample:
    """Return what this process has. Garbage is collected first, or else last, where that is switched off."""
    if gc.isenabled():
        gc.collect()
    process = psutil.Process()
    held: Sample = {
        "descriptors": dict(sorted(_descriptors().items())),
        "threads": dict(sorted(_tasks().items())),
        "children": sorted(f"{each.name()} {each.status()}" for each in process.children()),
        "listening": sum(each.status == psutil.CONN_LISTEN for each in process.net_connections("inet")),
        "files": sorted(map(str, Path(tempfile.gettempdir()).iterdir())),
        "shared memory": sorted(map(str, Path("/dev/shm").glob(f"*{os.getpid()}*"))),
        "handlers": [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "environment": dict(os.environ),
        "exit hooks": atexit._ncallbacks(),
        "hooks of multiprocessing": [len(util._finalizer_registry), len(util._afterfork_registry)],  # type: ignore[attr-defined]
        "loggers": len(logging.root.manager.loggerDict),
        "modules": len(sys.modules),
        "gc": [gc.isenabled(), gc.get_freeze_count()],
    }
    gc.collect()
    return {**held, "memory": _memory(), "objects": _objects()}


def _descriptors() -> Counter[str]:
    found: Counter[str] = Counter()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # of the listing itself
            found[re.sub(r"\d+", "N", str(path.readlink()))] += 1
    return found


def _tasks() -> Counter[str]:
    """Return the names of threads, also those that are not Python's; joined ones have a second to go."""
    deadline = time.monotonic() + 1.0
    while True:
        paths = [*Path("/proc/self/task").glob("*/comm")]
        if len(paths) <= threading.active_count() or time.monotonic() > deadline:
            return Counter(re.sub(r"\d+", "N", path.read_text().strip()) for path in paths)
        time.sleep(0.001)


def _memory() -> dict[str, int]:
    """Return what the process has written, in KiB; the parts of its address space; Python's own blocks."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    written = sum(
        int(line.split()[1]) for line in lines if line.startswith(("Private_Dirty", "Shared_Dirty"))
    )
    maps = len(Path("/proc/self/maps").read_text().splitlines())
    return {"written_kib": written, "maps": maps, "blocks": sys.getallocatedblocks()}


def _objects() -> dict[str, int]:
    return Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.get_objects())


SLACK = {"written_kib": 6 << 10, "maps": 30}
"""How much more memory there may be: allocators keep pieces."""


def growth(first: Sample, last: Sample) -> list[str]:
    """Return what has grown between two samples, a line each."""
    launches = last["launch"] - first["launch"]
    # What a launch leaves there is at least one object for every 20 launches.
    slack = {"descriptors": 0, "threads": 0, "objects": 3 + launches / 20, "memory": 300 + launches}
    problems = [
        f"{name} of {what}: {first[name].get(what, 0)} -> {count}"
        for name, more in slack.items()
        for what, count in last[name].items()
        if count - first[name].get(what, 0) > SLACK.get(what, more)
    ]
    return problems + [
        f"{name}: {first[name]} -> {last[name]}"
        for name in first.keys() - {"launch", "outcomes", "seconds", *slack}
        if first[name] != last[name]
    ]


# ------------------------------------------------------------------------------------------- what is launched


class NotReadable:
    """A value that can be pickled, but not unpickled."""

    def __reduce__(self) -> Any:
        return int, ("not a number",)


def job(strategy: Any, how: str) -> Any:
    """Succeed, or fail on rank 1."""
    if how == "no group":
        return os.environ["RANK"]
    how = strategy.broadcast(how)
    if strategy.global_rank == 1:
        fail(how)
        if how == "not picklable":
            return lambda: None
        if how == "not readable":
            return NotReadable()
    if how in BAD:
        strategy.barrier()
    return torch.ones(1000)


def fail(how: str) -> None:
    if how == "exception" or (how == "restarts" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"):
        raise ValueError("planned", torch.ones(1000))
    if how == "exit":
        sys.exit(3)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)


def launch(strategy: DDPStrategy, how: str) -> Any:
    if how.startswith("fit"):
        model = Regression() if how == "fit" else Fails(1, "sgd")
        try:
            return quiet_trainer(strategy, 2, max_steps=FAILS_AT + 1).fit(model, loader(12, 2))
        finally:
            model.__dict__.clear()  # a trainer and its model refer to each other
    if how == "thread":
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(strategy.launch, job, how).result()
    return strategy.launch(job, how, init_process_group=how != "no group")


METHODS = {"elastic": "elastic-fork", "script": "popen", "command": "popen"}
OPTIONS: dict[str, dict[str, Any]] = {
    "other devices": {"devices": 3},
    "other rendezvous": {"rendezvous": "tcp"},
    "restarts": {"max_restarts": 1},
}


def new_strategy(kind: str, how: str) -> DDPStrategy:
    command = [sys.executable, "-m", "tests.process.many_launches", "rank", how]
    options = {"command": command} if kind == "command" else OPTIONS.get(how, {})
    return strategy_of(METHODS.get(kind, kind), **options)


def launch_as(kind: str, how: str, number: int) -> str:
    """Launch by a new strategy; return what came of it."""
    config: Any = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    strategy = new_strategy(kind, how)
    try:
        if how == "refused":
            config["daemon"] = True
        with few_files(number % 40) if how == "few files" else nullcontext():
            launch(strategy, how)
    except Exception as error:
        sys.stderr.write(f"{number} {how}: {type(error).__name__}: {error}"[:300] + "\n")
        return type(error).__name__
    finally:
        config.pop("daemon", None)
    return "good"


# ------------------------------------------------------------------------------------------- the program


def be_rank(how: str) -> None:
    """Be the other rank of a command: its first launch is `how`, its second one fails."""
    for each in (how, "group"):
        launch(new_strategy("command", ""), each)


def main(kind: str, launches: int, every: int) -> None:
    os.environ["TORCH_FR_BUFFER_SIZE"] = _RECORDED
    outcomes: Counter[str] = Counter()
    started = time.monotonic()
    for number, how in enumerate(itertools.islice(itertools.cycle(KINDS[kind]), launches), 1):
        outcomes[f"{how}: {launch_as(kind, how, number)}"] += 1
        if number % every == 0:
            held = {"launch": number, "rank": os.environ.get("RANK", "0"), "outcomes": outcomes}
            seconds = round(time.monotonic() - started, 1)
            sys.stdout.write(json.dumps({**held, "seconds": seconds, **sample()}) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        be_rank(sys.argv[2])
    else:
        if "gc-off" in sys.argv:
            gc.disable()
        main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
