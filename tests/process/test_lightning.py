"""Lightning's `Trainer` and `Fabric` on rankwise's strategies, and its modules in rankwise's Trainer."""

import json
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any

import pytest

from tests.helpers.load import slowdown
from tests.helpers.needs import need_installed
from tests.helpers.ports import free_port
from tests.helpers.scripts import WITHOUT_COVERAGE, RunningScript, ScriptResult, ScriptRunner

need_installed("lightning")

SOAK = pytest.mark.soak
TORCHRUN = "torchrun"
WORKERS = ("rankwise_ddp_fork", "rankwise_ddp_spawn", "rankwise_ddp_forkserver")  # run a stage only
OTHERS = ("rankwise_ddp", "rankwise_ddp_spawn", "rankwise_ddp_forkserver")
STRATEGIES = ["rankwise_ddp_fork", *(pytest.param(name, marks=SOAK) for name in OTHERS)]
STARTS = [*STRATEGIES, pytest.param(TORCHRUN, marks=SOAK)]
"""What starts the two ranks: a strategy, or torchrun. The default is the fastest."""
IMPORTED = ("torch._dynamo", "lightning.pytorch", "rankwise")


def start(
    run_script: ScriptRunner, source: str, how: str, *args: str, env: Mapping[str, str | None] | None = None
) -> RunningScript:
    """Start a program with a strategy's name and `args`; or under torchrun, twice."""
    path = run_script.write(source)
    if how != TORCHRUN:
        return run_script.start(path, how, *args, env=env, preload=IMPORTED, siblings=1)
    options = ["--nproc-per-node=2", f"--master-port={free_port()}"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(path), "rankwise_ddp", *args]
    return run_script.start_command(command, env=env)


def run(run_script: ScriptRunner, *program: str, env: Mapping[str, str | None] | None = None) -> ScriptResult:
    return start(run_script, *program, env=env).finish(timeout=240)


BEGIN = """
import json, os, pickle, signal, sys, time, warnings
from pathlib import Path
sys.modules["mpi4py.MPI"] = None  # Lightning's detection starts MPI, where it is installed

import torch
from lightning import pytorch as pl
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
QUIET = dict(accelerator="cpu", enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1)

class Data(pl.LightningDataModule):
    def __init__(self, batch_size, rows=16):
        super().__init__()
        self.save_hyperparameters()
        self.prepared, self.stages = 0, []

    def prepare_data(self):
        self.prepared += 1

    def setup(self, stage):
        self.stages.append(stage)
        x = torch.arange(4.0 * self.hparams.rows).view(-1, 4).sin()
        self.data = TensorDataset(x, x.sum(1, keepdim=True))

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=self.hparams.batch_size)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader

class Encoder(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        assert self.trainer is not None
        return torch.relu(self.layer(x))

class Module(pl.LightningModule):
    def __init__(self, lr=0.05, is_manual=False):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = not is_manual
        self.encoder, self.head = Encoder(), torch.nn.Linear(4, 1)
        self.steps_seen, self.notes = 0, []

    def loss(self, batch):
        return (self.head(self.encoder(batch[0])) - batch[1]).pow(2).mean()

    def training_step(self, batch, batch_idx):
        self.steps_seen += 1
        loss = self.loss(batch)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch), sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.log_dict({"test": self.loss(batch)}, sync_dist=True)

    def predict_step(self, batch, batch_idx):
        return self.head(self.encoder(batch[0]))

    def on_train_epoch_end(self):
        ranks = self.all_gather(torch.tensor(float(self.global_rank))).sum()
        self.notes.append([self.current_epoch, self.global_step, float(ranks) >= 0])

    def on_save_checkpoint(self, checkpoint):
        checkpoint["steps_seen"] = self.steps_seen

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), self.hparams.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

def loader(batch_size):
    data = Data(batch_size, 8)
    data.setup("fit")
    return data.train_dataloader()
"""

STAGES = """
import rankwise.integrations.lightning

class Ends(pl.Callback):
    epochs = 0

    def on_train_epoch_end(self, trainer, pl_module):
        self.epochs += 1

def run(batch_size, folder, **arguments):
    pl.seed_everything(1, workers=True, verbose=False)
    module, ends, data = Module(), Ends(), Data(batch_size, 8)
    best = pl.callbacks.ModelCheckpoint(monitor="val", save_top_k=1, dirpath=folder)
    logger = pl.loggers.CSVLogger(folder)
    trainer = pl.Trainer(max_epochs=3, callbacks=[ends, best], logger=logger, **arguments, **QUIET)
    trainer.fit(module, loader(batch_size), loader(batch_size))
    first = module.head.weight.tolist()
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    trainer.fit_loop.max_epochs = 5
    trainer.fit(module, datamodule=data)
    trainer.save_checkpoint(f"{folder}/end.ckpt")
    adam, schedule = trainer.optimizers[0].state_dict(), trainer.lr_scheduler_configs[0].scheduler
    (validated,) = trainer.validate(module, loader(batch_size), verbose=False)
    predicted = trainer.predict(module, loader(batch_size))
    saved = torch.load(best.best_model_path, weights_only=False)
    return trainer.is_global_zero, {
        "weights": [first, module.head.weight.tolist(), saved["state_dict"]["head.weight"].tolist()],
        "averages": adam["state"][0]["exp_avg"].tolist(),
        "metrics": metrics,
        "validated": validated,
        "predicted": torch.cat(predicted).flatten().tolist(),
        "counters": [trainer.global_step, trainer.current_epoch, ends.epochs, module.steps_seen],
        "schedule": [adam["param_groups"][0]["lr"], schedule.last_epoch],
        "is_attached": [trainer.optimizers[0].param_groups[0]["params"][0] is module.encoder.layer.weight],
        "stages": [data.stages, trainer.datamodule is data],
        "state": str(trainer.state),
        "best": Path(best.best_model_path).name,
        "logged": sorted(each.name for each in Path(folder).glob("lightning_logs/*")),
    }

if __name__ == "__main__":
    strategy = sys.argv[1]
    _, alone = run(8, f"alone-{os.environ.get('LOCAL_RANK', 0)}", strategy="auto", devices=1)
    is_zero, together = run(4, "together", strategy=strategy, devices=2)
    if is_zero:
        states = torch.load("together/end.ckpt", weights_only=False)["optimizer_states"]
        together["saved_averages"] = states[0]["state"][0]["exp_avg"].tolist()
        print(json.dumps([alone, together]))
"""


def last_line(result: ScriptResult) -> Any:
    assert result.returncode == 0, result
    return json.loads(result.stdout.splitlines()[-1])


def assert_equal(found: Any, expected: Any) -> None:
    """Compare nested lists and dictionaries; numbers to 1e-6."""
    if isinstance(expected, dict):
        assert sorted(found) == sorted(expected)
        for name in expected:
            assert_equal(found[name], expected[name])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for own, other in zip(found, expected, strict=True):
            assert_equal(own, other)
    else:
        assert found == (pytest.approx(expected, abs=1e-6) if isinstance(expected, float) else expected)


@pytest.mark.quick
@pytest.mark.parametrize(
    "how", [*STARTS, pytest.param("rankwise_ddp_find_unused_parameters_true", marks=SOAK)]
)
def test_two_ranks_are_one(run_script: ScriptRunner, how: str) -> None:
    """Two fits, validation and prediction leave what Lightning leaves after them in one process."""
    alone, together = last_line(run(run_script, BEGIN + STAGES, how))
    predicted = alone["predicted"]
    if how not in WORKERS:
        alone["predicted"] = predicted[::2]
    else:  # all ranks' predictions come back
        alone["predicted"] = [*predicted[::2], *predicted[1::2]]
    assert_equal(together.pop("saved_averages"), alone["averages"])
    assert_equal(together, alone)


FAILURE = """
import rankwise.integrations.lightning

class Failing(Module):
    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == 2 and self.global_rank == 1:
            Path("failed_s").write_text(str(time.monotonic()))
            print("failing", flush=True)
            if sys.argv[2] == "raise":
                raise ValueError("loss is nan")
            time.sleep(60) if sys.argv[2] == "sleep" else os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)

class Report(pl.Callback):
    def on_exception(self, trainer, pl_module, exception):
        print("on_exception", type(exception).__name__, flush=True)

if __name__ == "__main__":
    trainer = pl.Trainer(strategy=sys.argv[1], devices=2, logger=False, callbacks=[Report()], **QUIET)
    module = Failing()
    try:
        trainer.fit(module, loader(2))
    except BaseException as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # the main process, or torchrun's first rank
            took_s = time.monotonic() - float(Path("failed_s").read_text())
            has_group = torch.distributed.is_initialized()
            facts = [took_s, has_group, trainer.interrupted, type(module) is Failing]
            print(json.dumps([type(error).__name__, str(error), *facts]))
        raise
"""


@pytest.mark.quick
@pytest.mark.parametrize(
    "how", [*STRATEGIES, *(pytest.param(f"ddp_{m}", marks=SOAK) for m in ("fork", "spawn"))]
)
@pytest.mark.parametrize("what", ["raise", pytest.param("kill", marks=SOAK)])
def test_a_rank_that_fails(run_script: ScriptRunner, how: str, what: str) -> None:
    """The failure of another rank is rankwise's exception within two seconds; callbacks learn of it.

    So it is in rankwise's Trainer, after which the module is Lightning's again.
    """
    expected, text, exit_code = {
        "raise": ("WorkerRaisedError", "raised ValueError: loss is nan", 1),
        "kill": ("WorkerKilledError", "was killed by SIGKILL", 137),
    }[what]
    source = FAILURE if how.startswith("rankwise") else FAILURE.replace("pl.Trainer", "rankwise.Trainer")
    result = run(run_script, BEGIN + source, how, what, env=WITHOUT_COVERAGE)
    assert result.returncode == exit_code, result
    assert f"on_exception {expected}" in result.stdout, result
    last = [line for line in result.stdout.splitlines() if line.startswith("[")][-1]
    name, message, took_s, *facts = json.loads(last)
    assert (name, facts) == (expected, [False, True, True])
    assert "global_rank=1" in message
    assert text in message
    assert ("in training_step" in message) == (what == "raise")
    assert took_s < 2 * slowdown()


@SOAK
@pytest.mark.parametrize(
    ("what", "text"), [("raise", "ValueError: loss is nan"), ("kill", "Signal 9 (SIGKILL)")]
)
def test_a_rank_of_torchrun_that_fails(run_script: ScriptRunner, what: str, text: str) -> None:
    """Its failure is the one that torchrun reports; no rank stays in a signal handler of Lightning's."""
    running = start(run_script, BEGIN + FAILURE, TORCHRUN, what, env=WITHOUT_COVERAGE)
    result = running.finish(timeout=60)
    ended_s = time.monotonic()
    assert result.returncode == 1, result
    assert text in result.stderr.partition("Root Cause")[2], result
    assert ended_s - float((run_script.folder / "failed_s").read_text()) < 5 * slowdown(), result


@pytest.mark.quick
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=SOAK)])
@pytest.mark.parametrize("how", STARTS)
def test_a_signal_ends_all_ranks(run_script: ScriptRunner, how: str, number: signal.Signals) -> None:
    """Ctrl-C, and SIGTERM, end every rank, also one that sleeps and one that waits in a collective."""
    running = start(run_script, BEGIN + FAILURE, how, "sleep", env=WITHOUT_COVERAGE)
    running.wait_for("failing", timeout=120)
    time.sleep(0.3)  # so that rank 0 waits for the other one
    sent_s = time.monotonic()
    running.send_signal_to_group(number) if number == signal.SIGINT else running.send_signal(number)
    result = running.finish(timeout=30)
    assert result.returncode == (1 if how == TORCHRUN or number == signal.SIGINT else 143), result
    assert time.monotonic() - sent_s < 5 * slowdown(), result


FABRIC = """
import json, sys
sys.modules["mpi4py.MPI"] = None

import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset
import rankwise.integrations.lightning

def main(fabric):
    fabric.seed_everything(1, workers=True, verbose=False)
    model = torch.nn.Linear(4, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
    data = TensorDataset(torch.arange(32.0).view(8, 4) / 32)
    for batch, in fabric.setup_dataloaders(DataLoader(data, batch_size=8 // fabric.world_size)):
        optimizer.zero_grad()
        fabric.backward((model(batch) - 1).pow(2).mean())
        optimizer.step()
    ranks = fabric.all_gather(torch.tensor(fabric.global_rank)).tolist()
    return model.module.weight.tolist(), ranks
"""

LAUNCH = """
if __name__ == "__main__":
    alone, _ = Fabric(accelerator="cpu", devices=1).launch(main)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=sys.argv[1])
    if sys.argv[2] == "function":
        together, ranks = fabric.launch(main)
    else:
        fabric.launch()
        fabric.launch()  # does nothing
        together, ranks = main(fabric)
        if sys.argv[2] == "exit" and fabric.global_rank == 1:
            sys.exit(3)
        fabric.barrier()
    if fabric.is_global_zero:
        print(json.dumps([alone[0], together[0], ranks]))
"""


@pytest.mark.parametrize(
    ("how", "what"),
    [
        pytest.param("rankwise_ddp_fork", "function", marks=pytest.mark.quick),
        *(pytest.param(how, "function", marks=SOAK) for how in (*OTHERS, TORCHRUN)),
        *(pytest.param(how, "end", marks=SOAK) for how in ("rankwise_ddp", TORCHRUN)),
    ],
)
def test_fabric(run_script: ScriptRunner, how: str, what: str) -> None:
    """Two ranks of Fabric train as one: in a function, and in the rest of a script after `launch()`."""
    alone, together, ranks = last_line(run(run_script, FABRIC + LAUNCH, how, what))
    assert together == pytest.approx(alone, abs=1e-6)
    assert ranks == [0, 1]


@SOAK
def test_a_rank_of_fabric_exits(run_script: ScriptRunner) -> None:
    """Its exit status is the cause, and the script's."""
    result = run(run_script, FABRIC + LAUNCH, "rankwise_ddp", "exit")
    assert result.returncode == 3, result
    assert "WorkerExitedError: Worker global_rank=1" in result.stderr, result


OWN_ENVIRONMENT = """
from lightning.fabric.plugins import ClusterEnvironment
import rankwise.integrations.lightning
import rankwise.lightning as rl

class Shells(ClusterEnvironment):  # two shells on one machine
    creates_processes_externally = True
    main_address = "127.0.0.1"
    main_port = property(lambda self: int(os.environ["OUR_PORT"]))
    ended = 0

    detect = staticmethod(lambda: False)
    world_size = lambda self: 2
    node_rank = lambda self: 0
    global_rank = local_rank = lambda self: int(os.environ["OUR_RANK"])

    def set_world_size(self, size):
        assert size == 2

    def set_global_rank(self, rank):
        assert rank == self.global_rank()

    def teardown(self):
        self.ended += 1

if __name__ == "__main__":
    found = []
    for library, strategy in ((pl, "rankwise_ddp"), (rl, "ddp")):
        library.seed_everything(1)
        module, shells = Module(), Shells()
        trainer = library.Trainer(
            strategy=strategy, devices=2, plugins=[shells], max_epochs=2, logger=False,
            enable_checkpointing=False, **QUIET
        )
        trainer.fit(module, loader(4))
        found.append([trainer.global_rank, trainer.world_size, shells.ended, module.head.weight.tolist()])
    print(json.dumps(found))
"""


@pytest.mark.soak
def test_a_cluster_environment_of_lightnings(run_script: ScriptRunner) -> None:
    """One given as a plug-in determines ranks and address, in Lightning's Trainer and in rankwise's."""
    path, port = run_script.write(BEGIN + OWN_ENVIRONMENT), str(free_port())
    ranks = [{"OUR_RANK": str(rank), "OUR_PORT": port} for rank in range(2)]
    running = [run_script.start(path, env=each, preload=IMPORTED) for each in ranks]
    shells = [last_line(each.finish()) for each in running]
    for rank, (theirs, ours) in enumerate(shells):
        assert theirs[:3] == ours[:3] == [rank, 2, 1]
        assert_equal(ours[3], theirs[3])
    assert_equal(shells[1][0][3], shells[0][0][3])


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


@pytest.mark.timeout(600)  # by spawn, ten processes import Lightning one pair after another
@pytest.mark.parametrize(
    "strategy",
    ["ddp_fork", *(pytest.param(f"ddp{end}", marks=SOAK) for end in ("", "_spawn", "_forkserver"))],
)
def test_equal_to_lightnings_trainer(run_script: ScriptRunner, strategy: str) -> None:
    """All stages give Lightning's weights, values and predictions, on one process and on two."""
    result = run_script(BEGIN + OBJECTS, strategy, timeout=400, preload=IMPORTED)
    for own, *others in last_line(result):
        del own["checkpoint"][3]
        for other in filter(None, others):
            assert "Ends" in other["checkpoint"].pop(3)
            assert_equal(other, own)
