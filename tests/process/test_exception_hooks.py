"""Hooks after a failure: the job ends whatever they do, a save is the rank's own, collectives are refused."""

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rankwise.callbacks import Callback, LambdaCallback
from rankwise.checkpoint import AsyncCheckpointIO
from rankwise.errors import WorkerRaisedError
from rankwise.process_group import rank_zero_first
from rankwise.trainer.data import DataModule
from tests.helpers.load import slowdown
from tests.helpers.scripts import ScriptRunner
from tests.process.continued_tasks import sharded_adam
from tests.process.exception_tasks import FAILS_AT, Fails, Hangs, Saves
from tests.process.helpers import TORCHRUN, ddp, with_tests
from tests.process.test_leaving import Slow
from tests.process.training_tasks import Regression, loader, quiet_trainer

GRACE_S = 0.5
SLOW = Slow(6 * GRACE_S)


def fail(who: int, callback: Any, **options: Any) -> Any:
    """Fit with a failure on one rank; return the caller's exception."""
    strategy = options.pop("strategy", None) or ddp("fork", grace_period_s=GRACE_S)
    module, data = options.pop("module", None) or Fails(who), options.pop("data", None) or loader(32, 4)
    with pytest.raises(WorkerRaisedError, match="the first failure") as caught:
        quiet_trainer(strategy, 2, max_epochs=1, callbacks=callback, **options).fit(module, data)
    assert caught.value.global_rank == who
    return caught.value


def check_continues(path: Path) -> None:
    """Check that a fit on two ranks continues from the step that has failed."""
    saved = torch.load(path, weights_only=True)
    assert saved["global_step"] == FAILS_AT
    assert not torch.equal(saved["state_dict"]["net.0.weight"], Regression().state_dict()["net.0.weight"])
    trainer = quiet_trainer("ddp_fork", 2, max_epochs=1)
    trainer.fit(Fails(-1), loader(32, 4), ckpt_path=path)
    assert trainer.global_step == 4


@pytest.mark.quick
@pytest.mark.parametrize("who", [0, 1])
def test_a_checkpoint_of_the_rank_that_fails(who: int, tmp_path: Path, caplog: Any) -> None:
    """The documented hook writes a complete file, whichever rank fails; the caller, no rank, does not."""
    path = tmp_path / "failed.ckpt"
    fail(who, Saves(path))
    (warned,) = caplog.records
    assert warned.getMessage().startswith(f"{path} is not written by the calling process")
    assert list(tmp_path.iterdir()) == [path]
    check_continues(path)


@pytest.mark.parametrize("io", [SLOW, AsyncCheckpointIO(SLOW)], ids=["own thread", "another thread"])
def test_a_checkpoint_that_takes_longer_than_the_grace_period(io: Any, tmp_path: Path) -> None:
    """The rank is killed only when its file is complete."""
    path = tmp_path / "failed.ckpt"
    fail(1, Saves(path), plugins=io)
    check_continues(path)


SCRIPT = """
    import sys
    from pathlib import Path
    from tests.process.exception_tasks import Fails, Hangs, Saves
    from tests.process.training_tasks import loader, quiet_trainer

    who, path, hook = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    callback = Saves(path) if hook == "saves" else Hangs()
    quiet_trainer("ddp", 2, max_epochs=1, callbacks=callback).fit(Fails(who), loader(32, 4))
"""


@pytest.mark.parametrize(
    ("who", "hook", "command"),
    [
        (0, "saves", ()),
        (0, "hangs", ()),
        *(pytest.param(1, hook, (), marks=pytest.mark.soak) for hook in ("saves", "hangs")),
        pytest.param(1, "saves", TORCHRUN, marks=pytest.mark.soak),
    ],
)
def test_a_hook_in_a_script(
    who: int, hook: str, command: tuple[str, ...], tmp_path: Path, run_script: ScriptRunner
) -> None:
    """It can save or hang also where the main process is rank 0, and save under torchrun."""
    path = tmp_path / "failed.ckpt"
    program = [sys.executable, *command, str(run_script.write(SCRIPT)), str(who), str(path), hook]
    result = run_script.command(program, env=with_tests(), siblings=2)
    assert result.returncode == 1, result
    assert "ValueError: the first failure" in result.stderr, result
    if hook == "saves":
        check_continues(path)


@pytest.mark.parametrize("who", [0, 1])
def test_a_hook_that_hangs(who: int) -> None:
    """The job ends after the grace period, with the first failure."""
    assert fail(who, Hangs()).elapsed_s < 10 * slowdown()


class RaisesToo(Callback):
    """Raises in each hook that follows a failure."""

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        sys.exit("from on_exception")

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        raise KeyError("from teardown")


class Data(DataModule):
    """Raises there, too."""

    def train_dataloader(self) -> Any:
        return loader(32, 4)

    def on_exception(self, exception: BaseException) -> None:
        raise KeyError("from on_exception")


def test_hooks_do_not_replace_the_failure(tmp_path: Path) -> None:
    """What hooks raise afterwards is logged; the next hooks are called."""
    path = tmp_path / "failed.ckpt"
    fail(0, [RaisesToo(), Saves(path)], data=Data())
    assert path.exists()


def test_hooks_do_not_replace_the_failure_of_one_process(caplog: pytest.LogCaptureFixture) -> None:
    """The failure itself is raised, with its own cause; the log has the others."""
    trainer = quiet_trainer("single_device", 1, max_epochs=1, callbacks=RaisesToo())
    with pytest.raises(ValueError, match="the first failure") as caught:
        trainer.fit(Fails(0), datamodule=Data())
    assert caught.value.__context__ is None
    hooks = [record.getMessage().partition(" ")[0] for record in caplog.records]
    assert hooks == ["RaisesToo.on_exception", "Data.on_exception", "teardown"]


CALLS: dict[str, Callable[[Any, Any], object]] = {
    "barrier": lambda trainer, module: trainer.strategy.barrier(),
    "broadcast": lambda trainer, module: trainer.strategy.broadcast(1),
    "all_reduce": lambda trainer, module: trainer.strategy.all_reduce(torch.zeros(1)),
    "all_gather": lambda trainer, module: module.all_gather(torch.zeros(1)),
    "all_gather_object": lambda trainer, module: trainer.strategy.all_gather_object(1),
    "reduce_boolean_decision": lambda trainer, module: trainer.strategy.reduce_boolean_decision(True),
    "rank_zero_first()": lambda *_: rank_zero_first().__enter__(),
    "all_reduce of float32[1] (sum) at test_exception_hooks.py": lambda *_: dist.all_reduce(torch.zeros(1)),
    "ZeroRedundancyOptimizer, which is sharded,": lambda trainer, module: trainer.save_checkpoint("sharded"),
}


def call_all(hook: str, trainer: Any, module: Any, *_: Any) -> None:
    """Call collectives in a hook after a failure; write down what they raise."""
    if trainer.global_rank != module.who or not trainer.strategy.is_in_job:
        return
    texts = []
    for call in CALLS.values():
        try:
            call(trainer, module)
            texts.append("returned")
        except Exception as error:
            texts.append(f"{type(error).__name__}: {error}")
    Path(hook).write_text("\n---\n".join(texts))


class Sharded(Fails):
    """Has an optimizer whose state each rank has a part of."""

    def configure_optimizers(self) -> Any:
        return sharded_adam(self.parameters())


@pytest.mark.parametrize("is_checked", [False, True])
def test_collectives_are_refused(is_checked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is an error that says why, instead of a wait for ranks that do not come."""
    monkeypatch.chdir(tmp_path)
    strategy = ddp("fork", grace_period_s=20, check_collectives=is_checked)
    hooks = ("on_exception", "teardown")
    calls = LambdaCallback(**{hook: partial(call_all, hook) for hook in hooks})
    fail(1, calls, strategy=strategy, module=Sharded(1))
    for hook in hooks:
        texts = (tmp_path / hook).read_text().split("\n---\n")
        for name, text in zip(CALLS, texts, strict=True):
            assert text.startswith("LifecycleError: ")
            assert name in text
            assert "in a hook after a failure on this rank" in text
    assert not (tmp_path / "sharded").exists()


def test_weights_beside_a_sharded_optimizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The remedy in that error works."""
    monkeypatch.chdir(tmp_path)
    fail(1, Saves(Path("weights"), weights_only=True), module=Sharded(1))
    Regression("adam").load_state_dict(torch.load("weights", weights_only=True)["state_dict"])


class SlowAdam(torch.optim.Adam):
    """Takes long within a step of rank 0."""

    def step(self, closure: Any = None) -> Any:
        value = super().step(closure)
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == 3 and torch.distributed.get_rank() == 0:
            time.sleep(30)
        return value


class SlowSteps(Regression):
    """Has this optimizer, and fails meanwhile; logs nothing, so that no collective follows the step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 1 and batch_idx == 3:
            time.sleep(0.2)
            raise ValueError("the first failure")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return SlowAdam(self.parameters(), lr=0.01)


def test_weights_that_are_partly_updated_are_not_saved(tmp_path: Path) -> None:
    """A rank that is stopped within its optimizer step refuses to save; the one that failed has saved."""

    def save(trainer: Any, module: Any, exception: BaseException) -> None:
        if trainer.strategy.is_in_job:
            trainer.save_checkpoint(tmp_path / f"{trainer.global_rank}-{type(exception).__name__}")

    fail(1, LambdaCallback(on_exception=save), module=SlowSteps())
    assert [path.name for path in tmp_path.iterdir()] == ["1-ValueError"]
