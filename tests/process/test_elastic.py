"""`ddp_elastic`: after a failure all ranks restart and training continues; after the last one it raises."""

import itertools
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from rankwise.callbacks import Callback
from rankwise.checkpoint import AsyncCheckpointIO, TorchCheckpointIO
from rankwise.errors import WorkerKilledError, WorkerRaisedError
from rankwise.strategies import DDPElasticStrategy, Strategy
from tests.helpers.ports import free_port
from tests.helpers.scripts import ScriptResult, ScriptRunner
from tests.process.helpers import with_tests
from tests.process.killing import PHASES, killing, train_slowly
from tests.process.resume_tasks import everything, train
from tests.process.test_leaving import Slow


def elastic(max_restarts: int = 3, **arguments: Any) -> DDPElasticStrategy:
    """Return such a strategy on two forked processes."""
    arguments = {"start_method": "fork", "devices": 2, **arguments}
    return DDPElasticStrategy(accelerator="cpu", max_restarts=max_restarts, **arguments)


def restart_count() -> int:
    """Return how often the ranks have been started again."""
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def fail_until(strategy: Strategy, restarts: int, how: str) -> tuple[float, set[str]]:
    """Let rank 1 fail until the last start; return a sum, and where the launching process listens.

    Rank 0 does not hear SIGTERM, which torch's agent may send it before it sees the other's end by itself.
    """
    if strategy.global_rank == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    total = float(strategy.all_reduce(torch.ones(1), reduce_op="sum"))
    if strategy.global_rank == 1 and restart_count() < restarts:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("not yet")
    strategy.barrier()
    sockets = psutil.Process(os.getppid()).net_connections(kind="inet")
    return total, {socket.laddr.ip for socket in sockets if socket.status == psutil.CONN_LISTEN}


def test_restarts_until_it_works() -> None:
    """After two failures the third start returns every rank's value; nothing listens beyond loopback."""
    strategy = elastic()
    assert strategy.launch(fail_until, 2, "raised") == (2.0, {"127.0.0.1"})
    assert sorted(strategy.results) == [0, 1]


def test_first_cause_when_restarts_are_used_up() -> None:
    """The exception is the culprit's, with its traceback, though the other rank failed as a consequence."""
    with pytest.raises(WorkerRaisedError, match=r"global_rank=1 .* raised ValueError: not yet") as caught:
        elastic(1).launch(fail_until, 9, "raised")
    assert "fail_until" in caught.value.traceback_text
    assert any("global_rank 0" in line for line in caught.value.consequences)


def fail_in_own_words(strategy: Strategy) -> None:
    """Let rank 1 be killed, and rank 0 make an error of its own of what it sees of that."""
    try:
        fail_until(strategy, 9, "killed")
    except RuntimeError as error:
        raise ValueError("step failed") from error


def test_killed_rank_is_named() -> None:
    """The killed rank is named although it reports nothing; the other rank's error is listed."""
    with pytest.raises(WorkerKilledError, match=r"global_rank=1 .* was killed by SIGKILL") as caught:
        elastic(0).launch(fail_in_own_words)
    assert caught.value.consequences == ("global_rank 0 raised ValueError: step failed",)


def test_a_restart_names_the_rank_that_was_killed(caplog: pytest.LogCaptureFixture) -> None:
    """The restart message names the killed rank, not the one that lost the connection."""
    with caplog.at_level(logging.WARNING, "rankwise.launchers.elastic"):
        elastic(1).launch(fail_until, 1, "killed")
    assert caplog.messages == ["All ranks start again (restart 1): global_rank 1 was killed by SIGKILL"]


class KillAfter(Callback):
    """Kills a rank, or each one, after some steps of each start but the last; prints where a start begins."""

    def __init__(self, *spec: tuple[int | None, int]) -> None:
        self.spec = spec
        self.steps = 0

    def on_train_start(self, trainer: Any, module: Any) -> None:
        print(f"start {restart_count()} begins at {trainer.global_step}", flush=True)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps += 1
        rank, steps = self.spec[restart_count()] if restart_count() < len(self.spec) else (None, 0)
        if rank in (None, trainer.global_rank) and self.steps == steps:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("kills", [2, pytest.param(30, marks=[pytest.mark.soak, pytest.mark.timeout(900)])])
def test_training_goes_on(kills: int, tmp_path: Path) -> None:
    """Killed from outside at random moments, again and again, a fit ends bit for bit as if it never was.

    A start that saves nothing comes no step further: each is killed some time after its first checkpoint.
    """
    seed = int(os.environ.get("RANKWISE_SOAK_SEED", kills))
    whole = train_slowly(elastic(0), tmp_path / "whole", epochs=2 * kills)
    with killing(kills, seed) as killer:
        killed = train_slowly(elastic(kills), tmp_path / "killed", epochs=2 * kills)
    print(f"seed {seed}:", *(f"rank {rank} {phase};" for rank, phase in killer.died))
    assert (len(killer.died), killer.problem) == (kills, "")
    begun_at = killer.begun_at()
    assert all(before < after for before, after in itertools.pairwise(begun_at)), begun_at
    assert everything(killed) == everything(whole)
    if kills == 30:
        assert {phase for _, phase in killer.died} == set(PHASES)


def test_what_a_thread_writes_outlives_the_agents_signal(tmp_path: Path) -> None:
    """When one rank is killed, torch's agent signals the other one while its thread still writes."""
    strategy = elastic(0, checkpoint_io=AsyncCheckpointIO(Slow(1.5)))
    with pytest.raises(WorkerKilledError, match="global_rank=1"):
        train(strategy, tmp_path, seed=3, max_epochs=1, kill=KillAfter((1, 2)), ckpt_path=None)
    newest = max(tmp_path.rglob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    assert TorchCheckpointIO().load_checkpoint(newest)["global_step"] == 1


def save_and_work(strategy: Strategy, path: str) -> None:
    """Let a thread of rank 0 begin to write, and rank 1 be killed."""
    strategy.save_checkpoint({"step": 7}, path)
    strategy.barrier()
    if strategy.global_rank == 1:
        Path(path).with_suffix(".killed").write_text(repr(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def test_so_does_what_no_trainer_has_saved(tmp_path: Path) -> None:
    """A rank that gets the signal while it works ends as soon as its thread has written."""
    with pytest.raises(WorkerKilledError, match="global_rank=1"):
        strategy = elastic(0, checkpoint_io=AsyncCheckpointIO(Slow(1.5)))
        strategy.launch(save_and_work, str(tmp_path / "x.ckpt"))
    assert TorchCheckpointIO().load_checkpoint(tmp_path / "x.ckpt") == {"step": 7}
    killed_s = float((tmp_path / "x.killed").read_text())
    assert time.monotonic() - killed_s < 20  # and not after 30 s, the limit of torch's agent


@pytest.mark.soak
def test_checkpoint_of_an_earlier_run_is_none_of_ours(tmp_path: Path) -> None:
    """A restart before this run has saved anything begins at the beginning, whatever lies in the folder.

    That the earlier run had the same id makes no difference.
    """
    whole = train(elastic(0), tmp_path / "whole", seed=3, max_epochs=1)
    train(elastic(0, run_id="both"), tmp_path / "used", seed=4, max_epochs=1)
    kill = KillAfter((0, 1))
    strategy = elastic(1, run_id="both")
    again = train(strategy, tmp_path / "used", seed=3, max_epochs=1, kill=kill, ckpt_path=None)
    assert everything(again) == everything(whole)


class Damage(KillAfter):
    """Before the kill, cuts the last checkpoint in two."""

    def __init__(self, path: Path, *spec: tuple[int | None, int]) -> None:
        super().__init__(*spec)
        self.path = path

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if restart_count() == 0 and trainer.is_global_zero and self.path.exists():
            content = self.path.read_bytes()
            self.path.write_bytes(content[: len(content) // 2])
        super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    """Return the file to which ranks, too, log when they look for a checkpoint."""
    handler = logging.FileHandler(tmp_path / "log")
    logger = logging.getLogger("rankwise.trainer.checkpointing")
    logger.addHandler(handler)
    yield tmp_path / "log"
    logger.removeHandler(handler)
    handler.close()


@pytest.mark.soak
def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path, log: Path) -> None:
    """A restart ignores a damaged checkpoint, and logs why."""
    whole = train(elastic(0), tmp_path / "whole", seed=3, max_epochs=1)
    damage = Damage(tmp_path / "used" / "last.ckpt", (0, 2))
    again = train(elastic(1), tmp_path / "used", seed=3, max_epochs=1, kill=damage, ckpt_path=None)
    assert everything(again) == everything(whole)
    assert re.search(r"last\.ckpt is passed over, as it does not load: ", log.read_text())


AGENT = """
    import os, sys, time
    from rankwise.strategies import DDPElasticStrategy

    def wait(strategy):
        print("up", flush=True)
        time.sleep(60)

    if __name__ == "__main__":
        DDPElasticStrategy(accelerator="cpu", devices=2, start_method=sys.argv[1]).launch(wait)
"""


@pytest.mark.parametrize(
    ("how", "code"),
    [
        (signal.SIGKILL, -signal.SIGKILL),
        pytest.param(signal.SIGTERM, 128 + signal.SIGTERM, marks=pytest.mark.soak),
        pytest.param(signal.SIGINT, -signal.SIGINT, marks=pytest.mark.soak),
    ],
)
def test_nobody_outlives_the_agent(how: signal.Signals, code: int, run_script: ScriptRunner) -> None:
    """The workers end with the agent's process, however that ends."""
    running = run_script.start(AGENT, "fork", fresh=True)  # torch 2.6 makes a folder where it forks later
    running.wait_for("up", count=2)
    running.send_signal(how)
    assert running.finish(timeout=30, leftover_grace_s=2.0).returncode == code


AFTER_DDP = """
    from rankwise.strategies import DDPElasticStrategy, DDPStrategy

    def work(strategy):
        print("at work", flush=True)

    if __name__ == "__main__":
        DDPStrategy(accelerator="cpu", devices=2).launch(work)
        DDPElasticStrategy(accelerator="cpu", devices=2).launch(work)
"""


def test_not_in_every_process_of_a_script(run_script: ScriptRunner) -> None:
    """After a job of "ddp" each process of the script would be an agent of its own: refused."""
    result = run_script(AFTER_DDP, siblings=1)
    assert result.returncode == 1, result
    assert result.stdout.count("at work") == 2, result
    assert "ddp_elastic cannot start processes" in result.stderr, result  # two ranks print, in pieces
    assert "LaunchRefusedError" in result.stderr, result


TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
TRAIN = """
    import json, sys
    from pathlib import Path
    from rankwise.strategies import DDPStrategy
    from tests.process.resume_tasks import everything, train
    from tests.process.test_elastic import KillAfter

    folder, seed, kill = sys.argv[1:]
    strategy = DDPStrategy(accelerator="cpu", timeout=20)
    trainer = train(strategy, folder, seed=int(seed), kill=KillAfter(*json.loads(kill)), ckpt_path=None)
    if trainer.is_global_zero:
        Path(folder, "out").write_text(repr(everything(trainer)))
"""


def torchrun(run_script: ScriptRunner, source: str, *options: str, args: Sequence[object]) -> ScriptResult:
    """Run a script under torchrun, which succeeds."""
    command = [*TORCHRUN, *options, str(run_script.write(source)), *map(str, args)]
    result = run_script.command(command, env=with_tests())
    assert result.returncode == 0, result
    return result


@pytest.mark.soak
def test_script_under_torchrun(run_script: ScriptRunner, tmp_path: Path) -> None:
    """Torchrun's restarts are picked up too, by strategy "ddp"."""
    whole = train(elastic(0), tmp_path / "whole", seed=3)
    options = ["--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    torchrun(run_script, TRAIN, *options, args=(tmp_path, 3, "[[1, 2]]"))
    assert (tmp_path / "out").read_text() == repr(everything(whole))


@pytest.mark.soak
def test_one_of_two_nodes_fails_under_torchrun(run_script: ScriptRunner, tmp_path: Path) -> None:
    """Only the agent whose rank died counts a restart; the ranks of both go on together, bit for bit."""
    whole = train(elastic(0), tmp_path / "whole", seed=3)
    endpoint = f"127.0.0.1:{free_port()}"
    options = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=two nodes"]
    options += [f"--rdzv-endpoint={endpoint}", "--local-addr=127.0.0.1", "--max-restarts=2"]
    command = [*TORCHRUN, *options, str(run_script.write(TRAIN)), str(tmp_path), "3"]
    alike = {**with_tests(), "OMP_NUM_THREADS": "1"}
    nodes = [run_script.start_command([*command, kill], env=alike) for kill in ("[[null, 2]]", "[]")]
    results = [node.finish(timeout=120) for node in nodes]
    assert [result.returncode for result in results] == [0, 0], results
    begun = [re.findall(r"start (\d) begins at (\d+)", result.stdout) for result in results]
    assert [steps for _, steps in begun[0]] == [steps for _, steps in begun[1]], results
    assert begun[0][0] == ("0", "0"), results
    assert int(begun[0][-1][1]) > 0, results
    assert (tmp_path / "out").read_text() == repr(everything(whole))


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [1, 2])
def test_two_runs_without_an_id_under_torchrun(ranks: int, run_script: ScriptRunner, tmp_path: Path) -> None:
    """Torchrun calls each "none"; a restart of the second begins anew, and not where the first one ended."""
    options = [f"--nproc-per-node={ranks}", f"--master-port={free_port()}", "--max-restarts=1"]
    for seed, kill, starts in ((4, "[]", 1), (3, "[[null, 1]]", 2)):
        result = torchrun(run_script, TRAIN, *options, args=(tmp_path, seed, kill))
        begun_at = re.findall(r"begins at (\d+\n)", result.stdout)
        assert begun_at == ["0\n"] * ranks * starts, result


SWEEP = """
    import multiprocessing, os, sys
    import torch._dynamo  # for all: each would import it
    from tests.process.resume_tasks import train

    def trial(folder, seed):
        trainer = train("ddp", f"{sys.argv[1]}/{folder}", seed=seed, max_epochs=1, ckpt_path=None)
        print(seed, "begins" if trainer.ckpt_path is None else "goes on", flush=True)

    if __name__ == "__main__":
        fork = multiprocessing.get_context("fork")
        for seed in (1, 2):
            child = fork.Process(target=trial, args=("children", seed))
            child.start()
            child.join()
        trial("itself", 3)
        sys.exit(3 if os.environ["TORCHELASTIC_RESTART_COUNT"] < sys.argv[2] else 0)
"""


@pytest.mark.soak
@pytest.mark.parametrize("restarts", [0, 1])
def test_a_sweep_under_torchrun(restarts: int, run_script: ScriptRunner, tmp_path: Path) -> None:
    """No child of a rank goes on from another's checkpoint, also after a restart; the rank itself does."""
    options = ["--standalone", "--nproc-per-node=1", f"--max-restarts={restarts}"]
    result = torchrun(run_script, SWEEP, *options, args=(tmp_path, restarts))
    lines = ["1 begins", "2 begins", "3 begins", "1 begins", "2 begins", "3 goes on"][: 3 + 3 * restarts]
    assert [line for line in result.stdout.splitlines() if line] == lines, result
    assert result.stderr.count("Training begins anew after a restart") == 2 * restarts, result


OWN_LOOP = """
    import os
    import torch.distributed as dist
    from rankwise.environments import detect_environment
    from rankwise.process_group import init_process_group

    ranks = init_process_group(detect_environment().environment)
    dist.barrier()
    if ranks.global_rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os._exit(3)
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.mark.soak
def test_own_loop_under_torchrun(run_script: ScriptRunner) -> None:
    """`init_process_group` meets again in the store that has the first start's keys."""
    options = ["--nproc-per-node=2", f"--master-port={free_port()}", "--max-restarts=1"]
    torchrun(run_script, OWN_LOOP, *options, args=())
