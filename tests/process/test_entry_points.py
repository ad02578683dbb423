"""Names that an installed package adds, in real jobs: strategy, hook, logger and environment."""

import os
import sys
from pathlib import Path

from tests.helpers.installed import BROKEN, WORKING, install
from tests.helpers.ports import free_port
from tests.helpers.scripts import ScriptRunner
from tests.process.helpers import with_tests

FIT = """
import sys
from rankwise import StrategyRegistry
from tests.process.training_tasks import Regression, loader, quiet_trainer

if __name__ == "__main__":
    devices, *names = sys.argv[1:]
    for name in names:
        strategy = StrategyRegistry.create(name, accelerator="cpu", comm_hook="HALVE")
        logging = {"logger": "Plug_Log:suffix=!", "log_every_n_steps": 1}
        trainer = quiet_trainer(strategy, devices, max_epochs=1, **logging)
        trainer.fit(Regression(), loader(8, 4))
        print(f"{trainer.strategy.environment.name} of {trainer.world_size}", flush=True)
"""


def path_with(folder: Path) -> dict[str, str | None]:
    """Return the variables of a program that finds packages in a folder, too."""
    return {"PYTHONPATH": os.pathsep.join([str(folder), with_tests()["PYTHONPATH"] or ""])}


def test_names_in_a_job(run_script: ScriptRunner, tmp_path: Path) -> None:
    """Two ranks train with a package's strategies, hook and logger; the second finds the names again.

    Broken environments beside them are warnings, each with its package.
    """
    install(tmp_path, WORKING + BROKEN)
    result = run_script(FIT, "2", "DDP_plug_small", "ddp_brief", env=path_with(tmp_path), siblings=1)
    assert result.returncode == 0, result
    assert "plug! " in result.stdout, result
    assert result.stdout.count("local of 2") >= 2, result
    assert "The entry point 'gone' of package plug 1.2 cannot be used: AttributeError" in result.stderr
    assert "The entry point 'number' of package plug 1.2 cannot be used" in result.stderr


def test_an_environment_is_detected(run_script: ScriptRunner, tmp_path: Path) -> None:
    """Processes that a package's launcher has started are the ranks of one job."""
    install(tmp_path, WORKING)
    path, port = run_script.write(FIT), str(free_port())
    running = []
    for rank in range(2):
        ranks = {"PLUG_RANK": str(rank), "PLUG_SIZE": "2", "PLUG_HEAD": "127.0.0.1", "PLUG_PORT": port}
        running.append(run_script.start(path, "auto", "ddp", env={**path_with(tmp_path), **ranks}))
    for program in running:
        result = program.finish(timeout=80)
        assert result.returncode == 0, result
        assert "plugenv of 2" in result.stdout, result


def test_they_are_listed(run_script: ScriptRunner, tmp_path: Path) -> None:
    """The table of strategies and the doctor's report name the package."""
    install(tmp_path, WORKING)
    command, path = [sys.executable, "-m", "rankwise"], path_with(tmp_path)
    listed = run_script.command([*command, "strategies"], env=path, siblings=1)
    assert "small buckets (package plug 1.2)" in listed.stdout, listed
    report = run_script.command([*command, "doctor", "--no-collectives"], env=path, siblings=1)
    assert "plug 1.2 adds strategies: DDP_Plug, strategies: more, environments: plugenv" in report.stdout
    assert "not plugenv: none of its variables is set" in report.stdout
