"""A run whose processes are killed resumes from its last checkpoint, with the same result."""

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from rankwise.errors import WorkerKilledError
from tests.helpers.scripts import RunningScript, ScriptRunner
from tests.process import resume_tasks as tasks
from tests.process.helpers import ddp, with_tests
from tests.process.resume_tasks import SAMPLES, KillAt, KillWhileSaving, Net, Noting, everything, train


def strategy(devices: int, **options: Any) -> Any:
    """Return a strategy that forks, with many small buckets: three ranks then add up in another order."""
    return ddp("fork", devices=devices, bucket_cap_mb=0.001, **options)


def killed_and_resumed(devices: int, folder: Path, kills: list[Any], workers: int) -> dict[str, Any]:
    """Train, get killed, resume with another seed, and so on to the end."""
    for number, kill in enumerate(kills):
        with pytest.raises(WorkerKilledError):
            train(strategy(devices), folder, seed=3 + number, kill=kill, workers=workers)
    return everything(train(strategy(devices), folder, seed=99, workers=workers))


@pytest.mark.parametrize(("devices", "workers"), [(2, 2), pytest.param(3, 0, marks=pytest.mark.soak)])
def test_killed_run_ends_the_same(devices: int, workers: int, tmp_path: Path) -> None:
    """SIGKILL for rank 1 within an epoch, for rank 0 while it saves, for rank 1 within the next epoch."""
    whole = everything(train(strategy(devices), tmp_path / "whole", seed=3, workers=workers))
    per_epoch = whole["progress"].global_step // 2
    kills = [KillAt(1, 3), KillWhileSaving(2), KillAt(1, per_epoch + 1)]
    assert killed_and_resumed(devices, tmp_path / "parts", kills, workers) == whole


WITHOUT_COMPLEX = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="gloo has no complex numbers in older versions"
)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("weighting", "module"),
    [
        ("logged", tasks.Weighing),
        pytest.param(None, tasks.Looking, marks=(pytest.mark.soak, WITHOUT_COMPLEX)),
    ],
)
def test_it_goes_on_to_the_bit(weighting: str | None, module: type[Net], tmp_path: Path) -> None:
    """A run with logged weights, or with sparse and complex gradients, ends the same if it stopped."""
    options = {"gradient_weighting": weighting}
    resumed, whole = resumed_and_whole(tmp_path, module, 3, options)
    assert resumed == whole


def resumed_and_whole(
    folder: Path, module: type[Net], devices: int, options: dict[str, Any], **arguments: Any
) -> list[dict[str, Any]]:
    """Train two epochs, with a stop between them, and without."""
    found = []
    for part, epochs in (("parts", 1), ("parts", 2), ("whole", 2)):
        arguments |= {"module": module(), "max_epochs": epochs}
        found.append(everything(train(strategy(devices, **options), folder / part, seed=3, **arguments)))
    return found[1:]


@pytest.mark.soak
@pytest.mark.parametrize("devices", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_a_static_graph_goes_on(devices: int, tmp_path: Path) -> None:
    """Two ranks end with the same bits; three, whose first buckets are others, with the same numbers."""
    options = {"static_graph": True}
    resumed, whole = resumed_and_whole(tmp_path, tasks.Descending, devices, options, accumulate=3)
    assert resumed == whole or devices == 3
    for name, values in whole["weights"].items():
        torch.testing.assert_close(torch.tensor(resumed["weights"][name]), torch.tensor(values))


@pytest.mark.parametrize(("before", "after"), [(1, 2), (3, 2)])
def test_other_number_of_ranks(before: int, after: int, tmp_path: Path) -> None:
    """Killed within an epoch, a run goes on with other ranks and sees each sample of the epoch once."""

    def fit(ranks: int, **options: Any) -> None:
        options["batch_size"] = 12 // ranks
        train(strategy(ranks), tmp_path, seed=2 + ranks, module=Noting(tmp_path), **options)

    with pytest.raises(WorkerKilledError):
        kill = KillAt(before - 1, 3)
        fit(before, kill=kill)
    fit(after, max_epochs=1)
    seen = {path.stem: torch.load(path).flatten().tolist() for path in tmp_path.glob("*.pt")}
    lost = [f"3-{rank}" for rank in range(after, before)]  # the step that was killed, and was made again
    samples = [int(number) for name, numbers in seen.items() if name not in lost for number in numbers]
    assert sorted(samples) == list(range(SAMPLES))
    assert len(seen) - len(lost) == 2 * before + 2 * after


SCRIPT = """
    import sys, torch
    from tests.process.resume_tasks import everything, train
    from tests.process.test_resuming import strategy

    folder, seed, epochs, out = sys.argv[1:]
    trainer = train(strategy(2), folder, seed=int(seed), workers=2, max_epochs=int(epochs))
    torch.save(repr(everything(trainer)), out)
"""


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kills", [4])
def test_killed_from_outside(kills: int, run_script: ScriptRunner, tmp_path: Path) -> None:
    """After SIGKILL of the main process or a rank at any moment the result is the undisturbed run's."""
    chance, epochs, out = random.Random(11), "8", tmp_path / "out.pt"
    script = run_script.write(SCRIPT)

    def start(folder: str, seed: int) -> RunningScript:
        return run_script.start(script, str(tmp_path / folder), str(seed), epochs, str(out), env=with_tests())

    assert start("whole", 3).finish(timeout=300).returncode == 0
    whole = torch.load(out, weights_only=False)
    out.unlink()
    for number in range(kills):
        running = start("parts", 3 + number)
        _wait_for_processes(running, 3)  # the main process and two ranks, in the order of their starts
        time.sleep(chance.random())
        if len(alive := running.processes()[:3]) == 3:
            alive[chance.randrange(3)].kill()
        running.finish(timeout=300)
    assert start("parts", 99).finish(timeout=300).returncode == 0
    assert torch.load(out, weights_only=False) == whole


def _wait_for_processes(running: RunningScript, count: int) -> None:
    deadline = time.monotonic() + 60
    while len(running.processes()) < count and time.monotonic() < deadline:
        time.sleep(0.05)
