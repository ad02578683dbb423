"""Record what Lightning gives: python -m tests.process.migration.record [NAME ...].

A name is that of a script, or `hooks`. Without names everything is recorded.
"""

import importlib
import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.helpers.logger_files import variables
from tests.helpers.scripts import WITHOUT_COVERAGE, RunningScript, ScriptRunner
from tests.process.helpers import module_runner
from tests.process.migration import recording, records

HERE = Path(__file__).parent
SCRIPTS = HERE / "scripts"
NAMES = sorted(path.stem for path in SCRIPTS.glob("*.py") if path.stem not in ("__init__", "shared"))
ON_TWO = ("--devices", "2", "--strategy")
FORKED = (*ON_TWO, "ddp_fork")
OWN_STEPS = {
    "fabric_dcgan": "the noise depends on the size of the batch",
    "finetuning": "batch normalisation sees half a batch",
    "gan": "the noise depends on the size of the batch",
    "hydra_template": "batch normalisation sees half a batch",
    "text_classifier": "words are padded to the longest in the batch",
    "vae": "the noise depends on the size of the batch",
}
"""Scripts whose steps on two processes are not those of one, and why: compared with Lightning on two."""
WRONG_IN_LIGHTNING = {
    "finetuning": "does not synchronise what is unfrozen in training: its processes end with other weights",
    "transformer_lm": "repeats a sample with drop_last=True, for a step more than one process has",
}
"""Scripts that Lightning trains wrongly on two processes, and how."""
RECORDED_ON_TWO = OWN_STEPS.keys() - WRONG_IN_LIGHTNING.keys()
Result = dict[str, Any]  # "weights", "metrics" at the end, "history" of the logger, other "values"

NO_HOOKS_OF_MODULES = {
    *("all_gather", "clip_gradients", "forward", "freeze", "load_from_checkpoint", "log", "log_dict"),
    *("lr_schedulers", "manual_backward", "optimizers", "print", "to_onnx", "to_tensorrt", "to_torchscript"),
    *("toggle_optimizer", "toggled_optimizer", "unfreeze", "untoggle_optimizer"),
}
"""Lightning's methods that the user calls, not the Trainer."""

NO_HOOKS_OF_DATA_MODULES = {"from_datasets", "load_from_checkpoint"}


# ----------------------------------------------------------------------------------------- running scripts


def environment(folder: Path, library: str) -> dict[str, str | None]:
    """Return variables: one thread, for the same order of additions; and files of W&B in a folder."""
    without = WITHOUT_COVERAGE if library == "lightning" else {}
    return {"OMP_NUM_THREADS": "1", **variables(folder / "wandb"), **without}


def start_all(
    run: ScriptRunner, scripts: Path, library: str, names: Iterable[str], on_two: Iterable[str]
) -> RunningScript:
    """Start a program that runs scripts on two processes, and then scripts on one, where they start threads.

    They write to `LIBRARY/2` and `LIBRARY/1` in the runner's folder.
    """
    own = run.folder / library
    rounds = [str(own / "1"), ",".join(names)]
    if on_two := sorted(on_two):
        keep_order = ["--keep-order"] * (library == "lightning")
        rounds = [str(own / "2"), ",".join(on_two), *FORKED, *keep_order, "--", *rounds]
    return run.start(HERE / "runner.py", str(scripts), *rounds, env=environment(own, library))


def run_in_lightning(run: ScriptRunner, names: Sequence[str]) -> None:
    """Run scripts in Lightning, on one process and, those that are compared on two, on two."""
    on_two = RECORDED_ON_TWO.intersection(names)
    ended = start_all(run, SCRIPTS, "lightning", names, on_two).finish(timeout=600)
    assert ended.returncode == 0, ended


def result(folder: Path, name: str) -> Result:
    """Return what a script has written, unless it failed."""
    error = json.loads((folder / f"{name}.json").read_text())["error"]
    assert error is None, error
    return load(folder / f"{name}.pt")


def load(path: Path) -> Result:
    """Return what a script has written."""
    found: Result = torch.load(path)
    return found


def results_of_lightning(folder: Path, name: str) -> dict[str, Any]:
    """Return what a script has given in Lightning by number of processes, as a record has it."""
    counts = ("1", "2") if name in RECORDED_ON_TWO else ("1",)
    return {count: records.summary(result(folder / count, name)) for count in counts}


# ----------------------------------------------------------------------------------------- hooks


def _methods(kinds: Iterable[type]) -> set[str]:
    return {
        name
        for kind in kinds
        for name, value in vars(kind).items()
        if name[0] != "_" and not isinstance(value, property) and callable(getattr(kind, name))
    }


def hooks_of_lightning() -> dict[str, list[str]]:
    """Return the names of all hooks of Lightning's classes."""
    library = importlib.import_module("lightning.pytorch")
    hooks = importlib.import_module("lightning.pytorch.core.hooks")
    modules = _methods([hooks.ModelHooks, hooks.DataHooks, hooks.CheckpointHooks, library.LightningModule])
    data_modules = _methods([hooks.DataHooks, library.LightningDataModule])
    assert not NO_HOOKS_OF_MODULES - set(dir(library.LightningModule))
    assert not NO_HOOKS_OF_DATA_MODULES - set(dir(library.LightningDataModule))
    return {
        "module": sorted(modules - NO_HOOKS_OF_MODULES),
        "callback": sorted(_methods([library.Callback])),
        "datamodule": sorted(data_modules - NO_HOOKS_OF_DATA_MODULES),
    }


def calls_of_lightning(folder: Path, shared: recording.Hooks) -> dict[str, list[str]]:
    """Return the calls of the hooks that both libraries have, by program."""
    return {name: recording.record(name, "lightning", folder / name, shared) for name in recording.PROGRAMS}


# ----------------------------------------------------------------------------------------- the command


def sources(name: str) -> list[Path]:
    """Return the files on which a record depends."""
    if name == "hooks":
        return [HERE / "recording.py"]
    return [SCRIPTS / "shared.py", *sorted(SCRIPTS.glob(f"{name}.*"))]


def main(names: Sequence[str]) -> None:
    """Write records."""
    scripts = [name for name in names if name != "hooks"]
    assert {*scripts} <= {*NAMES}, f"There are {', '.join(NAMES)}, and hooks."
    with tempfile.TemporaryDirectory() as folder, module_runner(Path(folder)) as run:
        if scripts:
            run_in_lightning(run, scripts)
        for name in scripts:
            records.write(name, sources(name), results_of_lightning(run.folder / "lightning", name))
        if "hooks" in names:
            hooks = hooks_of_lightning()
            calls = calls_of_lightning(run.folder, recording.shared_with(hooks))
            records.write("hooks", sources("hooks"), {"hooks": hooks, "calls": calls})


if __name__ == "__main__":
    main(sys.argv[1:] or [*NAMES, "hooks"])
