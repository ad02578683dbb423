"""docs/entry_points.md: its package, as pip would install it, works by its names."""

import re
from pathlib import Path

from tests.helpers.scripts import ScriptRunner
from tests.process.test_entry_points import path_with

PAGE = (Path(__file__).parents[2] / "docs" / "entry_points.md").read_text()
PROGRAM = """
from rankwise import DDPStrategy, StrategyRegistry, Trainer
from rankwise.environments import detect_environment

for name in ("ddp_site", "DDP_SITE_SMALL", "ddp_site_slow"):
    print(name, type(StrategyRegistry.create(name, comm_hook="site_average")).__name__)
trainer = Trainer(accelerator="cpu", logger="site_log", enable_progress_bar=False)
print(type(trainer.logger).__name__, detect_environment({"SITE_RANK": "x"}))
"""


def test_the_package(run_script: ScriptRunner, tmp_path: Path) -> None:
    """Each name of the page is found, and the environment takes part in detection."""
    [project], [module] = (
        re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL) for language in ("toml", "python")
    )
    groups = re.sub(r'\[project.entry-points."(.*)"\]', r"[\1]", project.partition("\n\n")[2])
    metadata = tmp_path / "site_cluster-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: site-cluster\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(groups.replace('"', ""))
    (tmp_path / "site_cluster.py").write_text(module)
    result = run_script(PROGRAM, env=path_with(tmp_path))
    for name in ("ddp_site", "DDP_SITE_SMALL", "ddp_site_slow"):
        assert f"{name} SiteDDP\n" in result.stdout, result
    assert "The variables of site cannot be right: SITE_SIZE" in result.stderr, result
