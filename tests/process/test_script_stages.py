"""Stages of one script, whose processes go on after `fit`: one model, one random state, their own ranks."""

from typing import Any

import pytest

from tests.helpers.scripts import ScriptRunner
from tests.helpers.shared import computed_once
from tests.process.helpers import TORCHRUN, printed_by_ranks, with_tests

SCRIPT = """
    import json, os, random, time
    import torch
    from torch import nn
    from torch.utils.data import DataLoader
    from rankwise import TrainingModule, rank_zero_only, seed_everything
    from rankwise.checkpoint import TorchCheckpointIO
    from rankwise.errors import CheckpointError
    from tests.process.training_tasks import FEATURES, Regression, dataset, loader, quiet_trainer

    def drawn():
        return [random.random(), float(torch.rand(1))]

    def network():
        layers = [nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 1)]
        return nn.Sequential(*layers).double()

    class Norm(Regression):
        def __init__(self):
            super().__init__()
            self.net = network()

        def test_step(self, batch, batch_idx):
            self.log("test", nn.functional.mse_loss(self(batch[0]), batch[1]))

    class Late(Regression):  # its weights differ between the processes
        def __init__(self):
            TrainingModule.__init__(self)

        def setup(self, stage):
            facts["in setup"] = drawn()
            torch.manual_seed(os.getpid())
            self.net = network()

    seed_everything(3)
    trainer, model = quiet_trainer("ddp", 2, max_epochs=2), Norm()
    facts = {"before": [trainer.global_rank, trainer.is_global_zero, rank_zero_only.rank], "drawn": [drawn()]}
    trainer.fit(model, loader(64, 4))
    facts["drawn"].append(drawn())
    facts["test"] = float(trainer.test(model, loader(64, 8), verbose=False)[0]["test"])
    facts["drawn"].append(drawn())
    model.eval()
    with torch.no_grad():
        x, y = dataset(64).tensors
        facts["by hand"] = float(nn.functional.mse_loss(model(x), y))
    same = DataLoader([(torch.ones(FEATURES).double(),)] * 4)
    torch.manual_seed(os.getpid())
    facts["predicted"] = torch.cat(quiet_trainer("ddp", 2).predict(Late(), same)).flatten().tolist()
    facts["rank"] = trainer.global_rank

    class SlowIO(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint, path):
            time.sleep(0.5)
            super().save_checkpoint(checkpoint, path)

    trainer = quiet_trainer("ddp", 2, max_steps=1, plugins=SlowIO())
    trainer.fit(Regression(), loader(8, 4))
    for path in ("checkpoints/first", "checkpoints/second"):
        trainer.save_checkpoint(path)
        facts[os.path.basename(path)] = os.path.exists(path)
    try:
        trainer.save_checkpoint("checkpoints")
    except CheckpointError as error:
        facts["error"] = str(error).partition("Fix")[0]
    trainer.test(Regression(), loader(8, 4), verbose=False)
    if trainer.is_global_zero:
        trainer.save_checkpoint("checkpoints/of rank 0 alone")
        facts["saved alone"] = os.path.exists("checkpoints/of rank 0 alone")
    print(json.dumps(facts), flush=True)
"""


@pytest.fixture(params=[(), pytest.param(TORCHRUN, marks=pytest.mark.soak)], ids=["ddp", "torchrun"])
@computed_once
def facts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank of the script prints, by rank."""
    printed = printed_by_ranks(tmp_path_factory.mktemp("script"), SCRIPT, request.param)
    return sorted(printed, key=lambda facts: int(facts["rank"]))


@pytest.mark.quick
def test_all_ranks_wait_for_a_checkpoint_after_a_fit(facts: list[dict[str, Any]]) -> None:
    """It is complete when `save_checkpoint` returns, on any rank; a failure is raised on each."""
    assert [(own["first"], own["second"]) for own in facts] == [(True, True)] * 2
    assert all("is a folder" in own["error"] for own in facts), facts
    assert facts[0]["saved alone"]


def test_ranks_are_known_before_the_first_fit(facts: list[dict[str, Any]]) -> None:
    """A Trainer has its process's rank from its constructor on, and so has `rank_zero_only`."""
    assert [own["before"] for own in facts] == [[0, True, 0], [1, False, 1]]


def test_evaluation_uses_rank_zeros_state(facts: list[dict[str, Any]]) -> None:
    """All ranks test what rank zero would save, its batch normalisation included; a stage takes its weights.

    Also where each process has initialised the weights by itself, all predict with rank zero's.
    """
    first, second = facts
    assert first["test"] == second["test"] == pytest.approx(first["by hand"], rel=1e-12)
    assert first["by hand"] == second["by hand"]
    assert first["predicted"] == second["predicted"]
    assert len(set(first["predicted"])) == 1


def test_ranks_draw_the_same_before_the_batches(facts: list[dict[str, Any]]) -> None:
    """All ranks split data alike between the stages, each time anew, and in `setup`, also unseeded."""
    first, second = facts
    assert (first["drawn"], first["in setup"]) == (second["drawn"], second["in setup"])
    assert len({tuple(drawn) for drawn in first["drawn"]}) == 3


UNSEEDED = """
    import json, random, sys
    {first}
    import rankwise
    import numpy as np
    import torch
    from torch.utils.data import random_split
    from tests.process.training_tasks import Regression, loader, quiet_trainer

    numbers = [random.random(), float(torch.rand(())), float(np.random.rand()), float(torch.randn(()))]
    training, _ = random_split(torch.arange(40).tolist(), [32, 8])
    numbers += list(training.indices)
    print(json.dumps(numbers), flush=True)
    {second}
    quiet_trainer("ddp", 3, max_epochs=1).fit(Regression(), loader(12, 2))
"""


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param("", "", marks=pytest.mark.soak),
        *(("import torch", ""), ("import torch; torch.manual_seed(3)", "random.seed(4)")),
    ],
    ids=["before all others", "after torch", "seeded"],
)
def test_processes_begin_with_the_same_random_state(
    first: str, second: str, run_script: ScriptRunner
) -> None:
    """Numbers of torch, NumPy and Python, and a random split, are the same before the launch."""
    siblings = 2 if first else 0  # without `first`, nothing has been imported before
    result = run_script(UNSEEDED.format(first=first, second=second), env=with_tests(), siblings=siblings)
    numbers, *others = result.check_returncode().stdout.splitlines()
    assert others == [numbers] * 2
