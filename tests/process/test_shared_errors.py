"""What only one rank finds out, such as a missing file, is the same error on every rank."""

from typing import Any

import pytest

from tests.helpers.shared import computed_once
from tests.process.helpers import TORCHRUN, printed_by_ranks

SCRIPT = """
    import json, os, sys
    from pathlib import Path
    import torch
    from rankwise.callbacks import ModelCheckpoint
    from rankwise.checkpoint import TorchCheckpointIO
    from rankwise.loggers import CSVLogger
    from tests.process.training_tasks import Regression, loader, quiet_trainer

    rank = int(os.environ["RANK"])

    class OwnError(Exception):
        pass

    class OnOneRank(TorchCheckpointIO):
        def load_checkpoint(self, path, map_location="cpu"):
            if rank == 1:
                raise OwnError("no such bucket")
            return super().load_checkpoint(path, map_location)

        def remove_checkpoint(self, path):
            raise OwnError("not removed")

    class NoHyperParameters(CSVLogger):
        def log_hyperparams(self, params):
            raise OwnError("no disk")

    def trainer(**options):
        return quiet_trainer("ddp", "auto", **{"max_epochs": 1, **options})

    def saving(folder="saved", **options):
        return {"callbacks": [ModelCheckpoint(folder, **options)], "enable_checkpointing": True}

    def fit(ckpt_path=None, **options):
        made, module = trainer(**options), Regression()
        module.hparams["size"] = 1
        made.fit(module, loader(8, 2), ckpt_path=ckpt_path)
        return made.global_step

    def outcome(function, *args, **options):
        try:
            return "returned " + str(function(*args, **options))
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    if rank == 0:
        Path("damaged.ckpt").write_bytes(b"no checkpoint")
        Path("a_file").touch()
    outcomes = {
        "missing": outcome(fit, "missing.ckpt"),
        "best": outcome(fit, "best"),
        "damaged": outcome(fit, "damaged.ckpt"),
        "test": outcome(lambda: trainer().test(Regression(), loader(8, 2), ckpt_path="missing.ckpt")),
        "saved": outcome(fit, **saving()),
        "read": outcome(fit, "saved/epoch=0-step=2.ckpt", max_epochs=2, plugins=[OnOneRank()]),
        "removed": outcome(fit, max_epochs=2, plugins=[OnOneRank()], **saving(every_n_epochs=1)),
        "folder": outcome(fit, **saving("a_file/checkpoints")),
        "hparams": outcome(fit, logger=NoHyperParameters(".")),
        "works": outcome(fit),
    }
    sys.stdout.write(json.dumps(outcomes) + "\\n")
"""


@pytest.fixture
@computed_once
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks has got from each call, rank 0 first or last."""
    return printed_by_ranks(tmp_path_factory.mktemp("errors"), SCRIPT, TORCHRUN)


def test_every_rank_raises_the_same(ranks: list[dict[str, Any]]) -> None:
    """An error of this package has one text on all ranks, and the next stage works."""
    for name, expected in {
        "missing": "CheckpointError: Checkpoint 'missing.ckpt'",
        "best": 'ConfigurationError: ckpt_path="best" finds no checkpoint',
        "damaged": "CheckpointError: Checkpoint 'damaged.ckpt'",
        "test": "CheckpointError: Checkpoint 'missing.ckpt'",
        "folder": "CheckpointError: ",
        "saved": "returned 2",
        "works": "returned 2",
    }.items():
        first, second = (found[name] for found in ranks)
        assert first == second
        assert first.startswith(expected), first


def test_every_rank_raises_another_ranks_own_error(ranks: list[dict[str, Any]]) -> None:
    """Where one rank gets an error of the user's, the others get one that names rank, type and text."""
    messages = {"read": (1, "no such bucket"), "removed": (0, "not removed"), "hparams": (0, "no disk")}
    for name, (rank, message) in messages.items():
        own, other = sorted((found[name] for found in ranks), reverse=True, key=lambda text: text[0] == "O")
        assert own == f"OwnError: {message}"
        assert f"global_rank={rank}" in other
        assert f"OwnError: {message}" in other
        assert other.startswith("WorkerRaisedError")
