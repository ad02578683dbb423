"""The programs of docs/*.md run as written, and print what the page shows."""

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from rankwise import Fabric, SingleDeviceStrategy, Strategy
from tests.cluster.digits import VARIABLES
from tests.docs.pages import DOCS, REPOSITORY, blocks
from tests.helpers.scripts import ScriptRunner
from tests.process.helpers import PYTEST, with_tests
from tests.process.test_entry_points import path_with
from tests.process.training_tasks import Regression, loader, quiet_trainer

# --------------------------------------------------------------------------------------- docs/clusters.md

CLUSTERS = (DOCS / "clusters.md").read_text()
OWN = {"MY_RANK": "0", "MY_SIZE": "1", "MY_LOCAL_RANK": "0", "MY_LOCAL_SIZE": "1"}
OWN |= {"MY_HEAD": "localhost", "MY_PORT": "29500"}


def test_an_environment_of_ones_own(run_script: ScriptRunner) -> None:
    """The class on the page reads its ranks from its own variables."""
    [source] = blocks(CLUSTERS)
    result = run_script(f"{source}\nprint(trainer.strategy.environment)\n", env=OWN)
    assert result.returncode == 0, result
    assert "MY_RANK=0" in result.stdout, result


def test_programs_exist() -> None:
    """Every example in a command exists, and shell scripts are executable."""
    named = set(re.findall(r"examples/[\w/]+\.\w+", "".join(blocks(CLUSTERS, "bash"))))
    assert len(named) >= 10
    for name in named:
        path = REPOSITORY / name
        assert path.exists(), name
        assert path.suffix != ".sh" or path.stat().st_mode & 0o111, name


def test_what_the_doctor_prints(run_script: ScriptRunner) -> None:
    """The titles on the page are those of a report, in order, and its options exist."""
    shown = [line for line in blocks(CLUSTERS, "text")[0].splitlines() if re.match(r"[A-Z]", line)]
    doctor = [sys.executable, "-m", "rankwise", "doctor"]
    result = run_script.command([*doctor, "--no-collectives"], env=VARIABLES, siblings=1)
    assert result.returncode == 0, result
    printed = [line for line in result.stdout.splitlines() if line in shown]
    assert [title for title in shown if title != "All-reduce"] == printed, result
    usage = run_script.command([*doctor, "--help"], env=VARIABLES, siblings=1)
    options = re.findall(r"`(--[\w-]+)", CLUSTERS.partition("## Slurm")[0])
    assert [option for option in options if option not in usage.stdout] == [], usage


# ----------------------------------------------------------------------------------- docs/entry_points.md

SITE = """
from rankwise import DDPStrategy, StrategyRegistry, Trainer
from rankwise.environments import detect_environment

for name in ("ddp_site", "DDP_SITE_SMALL", "ddp_site_slow"):
    print(name, type(StrategyRegistry.create(name, comm_hook="site_average")).__name__)
trainer = Trainer(accelerator="cpu", logger="site_log", enable_progress_bar=False)
print(type(trainer.logger).__name__, detect_environment({"SITE_RANK": "x"}))
"""


def test_the_package(run_script: ScriptRunner, tmp_path: Path) -> None:
    """Each name of the page is found, as pip would install it; its environment takes part in detection."""
    page = (DOCS / "entry_points.md").read_text()
    [project], [module] = blocks(page, "toml"), blocks(page)
    groups = re.sub(r'\[project.entry-points."(.*)"\]', r"[\1]", project.partition("\n\n")[2])
    metadata = tmp_path / "site_cluster-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: site-cluster\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(groups.replace('"', ""))
    (tmp_path / "site_cluster.py").write_text(module)
    result = run_script(SITE, env=path_with(tmp_path))
    for name in ("ddp_site", "DDP_SITE_SMALL", "ddp_site_slow"):
        assert f"{name} SiteDDP\n" in result.stdout, result
    assert "The variables of site cannot be right: SITE_SIZE" in result.stderr, result


# -------------------------------------------------------------------------------------- docs/extending.md

EXTENDING = (DOCS / "extending.md").read_text()
EXTENSIONS = "\n\n".join(blocks(EXTENDING))
STORAGE_IN_A_JOB = """

def test_the_storage_in_a_job(tmp_path):
    check_strategy(DDPStrategy(checkpoint_io=Below(tmp_path), **TWO, start_method="fork"))
"""
AS_A_SCRIPT = """

if __name__ == "__main__":  # each rank runs all of it
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        for name, test in list(globals().items()):
            if name.startswith("test_"):
                test(*[folder] * test.__code__.co_argcount)
                print(os.environ.get("RANK", "0"), name, "passed")
"""


def test_the_extensions(run_script: ScriptRunner) -> None:
    """Eight extensions, one for each row of the page's table, pass the suite of their kind."""
    assert EXTENDING.partition("\n## ")[0].count("](#a") == EXTENDING.count("\n## ") == 8
    path = run_script.write(EXTENSIONS, "test_page.py")
    result = run_script(PYTEST, str(path), env=with_tests(), siblings=8)  # for the launcher
    assert "8 passed" in result.stdout, result


@pytest.mark.soak
@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_other_start_methods(run_script: ScriptRunner, start_method: str) -> None:
    """The same in processes that import what they need; an environment starts none, a launcher its own."""
    program = f"{EXTENSIONS}{STORAGE_IN_A_JOB}".replace('"fork"', f'"{start_method}"')
    path = run_script.write(program, "test_page.py")
    result = run_script(PYTEST, str(path), env=with_tests(), timeout=300)
    assert "9 passed" in result.stdout, result


def test_in_a_script(run_script: ScriptRunner) -> None:
    """The same where the script is run again for each rank; a launcher starts all ranks by itself."""
    in_a_script = re.sub(r"\n\ndef test_the_launcher.*?(?=\n\n\n)", "", EXTENSIONS, flags=re.DOTALL)
    program = f"{in_a_script}{STORAGE_IN_A_JOB}{AS_A_SCRIPT}".replace('"fork"', '"popen"')
    result = run_script(program, siblings=8)
    assert result.returncode == 0, result
    assert [result.stdout.count(f"{rank} test_") for rank in (0, 1)] == [8, 8], result


# ----------------------------------------------------------------------------------------- docs/fabric.md

FABRIC = (DOCS / "fabric.md").read_text()


def test_the_script_prints_its_output(run_script: ScriptRunner) -> None:
    """On two processes, as shown."""
    result = run_script(blocks(FABRIC)[0], siblings=1)
    assert result.returncode == 0, result
    assert [result.stdout] == blocks(FABRIC, "text")


def test_the_snippets_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after another, in one process, with what the script has made."""
    monkeypatch.chdir(tmp_path)
    _, *snippets = blocks(FABRIC)
    assert len(snippets) == 3
    for snippet in snippets:
        weighting = "logged" if "weight=" in snippet else None
        fabric = Fabric(accelerator="cpu", strategy=SingleDeviceStrategy(gradient_weighting=weighting))
        own = nn.Linear(2, 1)
        before = own.weight.detach().clone()
        module, optimizer = fabric.setup(own, torch.optim.SGD(own.parameters(), lr=0.1))
        x = torch.ones(32, 2)
        data = fabric.setup_dataloaders(DataLoader(TensorDataset(x, x[:, :1]), batch_size=8))
        names: dict[str, Any] = {"nn": nn, "fabric": fabric, "module": module, "optimizer": optimizer}
        if "load(" in snippet:
            fabric.save("line.ckpt", {"model": module, "optimizer": optimizer, "epoch": 4})
        exec(snippet, {**names, "loader": data})
        assert "load(" in snippet or not torch.equal(own.weight, before)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["line.ckpt", "no_bias.ckpt"]


# -------------------------------------------------------------------------------------- docs/launchers.md

LAUNCHERS = blocks((DOCS / "launchers.md").read_text())
ON_THIS_MACHINE = {"num_nodes=2": "num_nodes=1", "devices=1": "devices=2", "10.0.0.1": "127.0.0.1"}
CHECK = """
    from rankwise.testing import check_launcher

    check_launcher(DDPStrategy(launcher=PoolLauncher(), accelerator="cpu", devices=2))
"""


@pytest.mark.soak  # the next test has the second one
@pytest.mark.parametrize("number", [0, 1], ids=["commands", "own"])
def test_launchers(run_script: ScriptRunner, tmp_path: Path, number: int) -> None:
    """Each runs a function on two ranks; there are no others. For ssh, a script runs the command here."""
    assert len(LAUNCHERS) == 2
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nshift\nexec "$@"\n')
    ssh.chmod(0o755)
    program = LAUNCHERS[number]
    for shown, here in ON_THIS_MACHINE.items():
        program = program.replace(shown, here)
    result = run_script(program, env={"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"})
    assert result.returncode == 0, result
    assert result.stdout == "ranks: 2.0\n", result


def test_the_contract_of_a_launcher(run_script: ScriptRunner) -> None:
    """The page's own launcher, here with forks, breaks one rule, as the page says."""
    result = run_script(LAUNCHERS[1].replace('"spawn"', '"fork"') + CHECK)
    assert "breaks 1 rule of its contract" in result.stderr, result
    assert "Seen: a rank that raises is a WorkerError with its number and its traceback" in result.stderr


# ------------------------------------------------------------------------------------- docs/strategies.md

STRATEGIES = (DOCS / "strategies.md").read_text()
METHODS = re.findall(r"^\| `(\w+)` \| ", STRATEGIES.partition("\n## What is called when\n")[2], re.MULTILINE)


def noting(name: str, path: Path) -> Callable[..., Any]:
    """Return an override that notes its call on rank 0, and what it is called for."""

    def method(self: Strategy, *args: Any, **kwargs: Any) -> Any:
        if not self.is_bound or self.is_global_zero:
            with path.open("a") as file:
                file.write(f"{name}\n")
        return getattr(super(self.noting_class, self), name)(*args, **kwargs)

    return method


def test_the_program_is_an_examples() -> None:
    """The page's class stands in examples/model_averaging.py, which tests/docs/test_examples.py runs."""
    [program] = blocks(STRATEGIES)
    assert program in (REPOSITORY / "examples" / "model_averaging.py").read_text()


def test_methods_are_called_in_the_order_of_the_table(tmp_path: Path) -> None:
    """A fit of one window of two batches calls each method; the first calls are in the table's order."""
    path = tmp_path / "calls"
    noting_class: Any = type("Noting", (Strategy,), {name: noting(name, path) for name in METHODS})
    noting_class.noting_class = noting_class
    trainer = quiet_trainer(noting_class(start_method="fork"), 2, max_epochs=1, accumulate_grad_batches=2)
    trainer.fit(Regression(), loader(8, 2))
    calls = path.read_text().split()
    assert [*dict.fromkeys(calls)] == METHODS
    assert (calls.count("no_backward_sync"), calls.count("sync_gradients")) == (2, 1)


# ---------------------------------------------------------------------------------------- docs/testing.md

READERS_NAMES = """
import pytest, time, torch
from rankwise import Trainer
from rankwise.checkpoint import TorchCheckpointIO as MyCheckpointIO
from rankwise.environments import ClusterEnvironment
from rankwise.strategies import DDPForkStrategy as MyStrategy
from tests.process.training_tasks import Regression, loader as samples

class MyEnvironment(ClusterEnvironment):
    name = "mine"
    variables = {
        "global_rank": "MY_RANK",
        "world_size": "MY_SIZE",
        "local_rank": "MY_LOCAL_RANK",
        "local_world_size": "MY_LOCAL_SIZE",
    }

module, loader = Regression(), samples(16, 2)
trainer = Trainer(strategy="ddp_fork", accelerator="cpu", devices=2, logger=False, enable_checkpointing=False)

"""


def test_the_examples(run_script: ScriptRunner) -> None:
    """Each program of the page passes, with the reader's own names filled in."""
    programs = blocks((DOCS / "testing.md").read_text())
    faults = next(program for program in programs if "inject_faults" in program)
    inside = "def test_faults():\n" + re.sub(r"^(?=.)", "    ", faults, flags=re.MULTILINE)
    source = "\n\n".join([READERS_NAMES, *(each for each in programs if each is not faults), inside])
    result = run_script(PYTEST, str(run_script.write(source, "test_page.py")), env=with_tests())
    assert "6 passed" in result.stdout, result
