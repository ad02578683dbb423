"""Modules, data modules and callbacks of Lightning's own classes in a rankwise Trainer."""

import json

import pytest

from tests.helpers.load import slowdown
from tests.helpers.needs import need_installed
from tests.helpers.scripts import WITHOUT_COVERAGE, ScriptRunner
from tests.process.test_lightning import BEGIN, FAILURE, IMPORTED, assert_equal

SOAK = pytest.mark.soak
STRATEGIES = ["ddp_fork", *(pytest.param(f"ddp{end}", marks=SOAK) for end in ("", "_spawn", "_forkserver"))]

OBJECTS = """
import rankwise

QUIET |= dict(max_epochs=3, num_sanity_val_steps=0)

class Ends(pl.Callback):
    def __init__(self):
        self.epochs, self.kinds = 0, set()

    def on_train_epoch_end(self, trainer, pl_module):
        self.epochs += 1
        self.kinds |= {isinstance(pl_module, pl.LightningModule), pl_module.trainer is trainer}

    def state_dict(self):
        return {"epochs": self.epochs}

    def load_state_dict(self, state):
        self.epochs = state["epochs"]
"""

EQUAL = """
def run(trainer_class, batch_size, folder, is_manual, **where):
    pl.seed_everything(1, workers=True, verbose=False)
    module, data, ends = Module(is_manual=is_manual), Data(batch_size), Ends()
    weight = module.head.weight
    trainer = trainer_class(default_root_dir=folder, callbacks=[ends], logger=False, **where, **QUIET)
    trainer.fit(module, datamodule=data)
    found = {"fit": {name: float(value) for name, value in trainer.callback_metrics.items()}}
    found["validate"] = trainer.validate(module, datamodule=data, verbose=False)
    found["test"] = trainer.test(module, data, verbose=False)
    found["predict"] = torch.cat(trainer.predict(module, datamodule=data)).flatten().tolist()
    found["weights"] = [weight.flatten().tolist() for weight in module.state_dict().values()]
    found["notes"] = [module.notes, ends.epochs, ends.kinds == {True}, data.prepared > 0]
    found["steps"] = module.steps_seen
    assert module.head.weight is weight
    assert (type(module), type(module.encoder), type(data)) == (Module, Encoder, Data)
    assert b"rankwise" not in pickle.dumps((module, data.hparams))
    path = str(Path(folder) / "again.ckpt")
    trainer.save_checkpoint(path)
    if trainer.is_global_zero:  # which has written it
        loaded = Module.load_from_checkpoint(path, weights_only=True)
        torch.testing.assert_close(loaded.state_dict(), module.state_dict())
        saved = torch.load(path, weights_only=True)
        found["checkpoint"] = [
            saved["hyper_parameters"], saved["datamodule_hyper_parameters"]["batch_size"] == batch_size,
            saved["steps_seen"], sorted(saved["callbacks"]), saved["epoch"], saved["global_step"],
        ]
    return trainer.is_global_zero, found

if __name__ == "__main__":
    alone, found = os.environ.get("LOCAL_RANK", "0") == "0", []
    for is_manual in (False, True):
        if alone:
            own = run(pl.Trainer, 8, "lightning", is_manual, devices=1)[1]
            one = run(rankwise.Trainer, 8, "one", is_manual, devices=1)[1]
        both = None
        if not is_manual or sys.argv[1] != "ddp_fork":
            both = run(rankwise.Trainer, 4, "both", is_manual, devices=2, strategy=sys.argv[1])[1]
        if alone:
            found.append([own, one, both])
    if alone:
        print(json.dumps(found))
"""


@pytest.mark.quick
@pytest.mark.timeout(600)  # by spawn, ten processes import Lightning one pair after another
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_equal_to_lightnings_trainer(run_script: ScriptRunner, strategy: str) -> None:
    """All stages give Lightning's weights, values and predictions, on one process and on two."""
    need_installed("lightning")
    result = run_script(BEGIN + OBJECTS + EQUAL, strategy, timeout=400, preload=IMPORTED)
    assert result.returncode == 0, result
    for own, *others in json.loads(result.stdout.splitlines()[-1]):
        del own["checkpoint"][3]
        for other in filter(None, others):
            assert "Ends" in other["checkpoint"].pop(3)
            assert_equal(other, own)


@SOAK
@pytest.mark.parametrize("strategy", ["ddp_fork", "ddp_spawn"])
def test_a_rank_that_fails(run_script: ScriptRunner, strategy: str) -> None:
    """It is reported with its traceback, and the module is Lightning's again."""
    need_installed("lightning")
    source = BEGIN + FAILURE.replace("pl.Trainer", "rankwise.Trainer")
    result = run_script(source, strategy, "raise", env=WITHOUT_COVERAGE, preload=IMPORTED)
    [line] = [line for line in result.stdout.splitlines() if line.startswith("[")]
    name, message, took_s, *_, is_as_before = json.loads(line)
    assert (name, is_as_before) == ("WorkerRaisedError", True)
    assert took_s < 2 * slowdown()
    assert "raised ValueError: loss is nan" in message
    assert "in training_step" in message
