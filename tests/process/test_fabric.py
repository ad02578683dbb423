"""`Fabric` on real processes: exact training, failures, checkpoints; scripts without a function."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from rankwise import Fabric
from rankwise.errors import LifecycleError, WorkerRaisedError
from rankwise.loggers import CSVLogger
from tests.helpers.scripts import ScriptRunner
from tests.process.helpers import TORCHRUN, combinations, with_tests
from tests.unit.fabric.helpers import Classifier, data, fabric, largest_difference, train


def trained(one: Fabric, path: Path) -> dict[str, Any]:
    weights = {"plain": train(one), "accumulated": train(one, accumulate=2, clip=0.05)}
    module = one.setup(Classifier())
    one.save(path, {"model": module, "weights": weights["plain"]})
    left = one.load(path, {"model": module})
    one.log("rank", one.global_rank, step=0)
    batches = DataLoader(data(), batch_size=4, num_workers=one.world_size - 1, shuffle=True)
    loader = one.setup_dataloaders(batches)
    orders = [[batch[1] for batch in loader] for _ in range(2)]
    return {
        "weights": weights,
        "gathered": one.all_gather(torch.tensor(one.global_rank)),
        "sum": one.all_reduce(1.0, reduce_op="sum"),
        "from rank 1": one.broadcast(one.global_rank, src=one.world_size - 1),
        "difference": largest_difference(left["weights"], weights["plain"]),
        "have other orders": not all(map(torch.equal, *orders)),
    }


def test_two_processes_give_the_weights_of_one(tmp_path: Path) -> None:
    """A shuffled order, accumulation and clipping: weights are those of one process to 1e-6."""
    two = Fabric(accelerator="cpu", devices=2, strategy="ddp_fork", loggers=CSVLogger(tmp_path))
    torch.manual_seed(5)
    found = two.launch(trained, tmp_path / "two.ckpt")
    torch.manual_seed(5)
    expected = fabric().launch(trained, tmp_path / "one.ckpt")
    for name, weights in expected["weights"].items():
        assert largest_difference(found["weights"][name], weights) < 1e-6, name
    assert found["gathered"].tolist() == [0, 1]
    assert (found["sum"], found["from rank 1"], found["difference"]) == (2.0, 1, 0.0)
    assert found["have other orders"]
    [file] = tmp_path.rglob("metrics.csv")
    assert file.read_text().split() == ["rank,step", "0,0"]


class SavesInFabric:
    def on_exception(self, fabric: Fabric, path: Path) -> None:
        fabric.save(path, {"rank": fabric.global_rank})
        with pytest.raises(LifecycleError, match="after a failure on this rank"):
            fabric.barrier()


def fail_on_rank_one(one: Fabric, path: Path) -> None:
    try:
        if one.global_rank == 1:
            raise ValueError("on one rank")
        one.barrier()
    except ValueError:
        one.call("on_exception", fabric=one, path=path)
        raise


@pytest.mark.quick
def test_a_failing_rank_reaches_the_caller(tmp_path: Path) -> None:
    """With its own traceback; in `on_exception` a save is the rank's own, other collectives are refused."""
    two = Fabric(accelerator="cpu", devices=2, strategy="ddp_fork", callbacks=SavesInFabric())
    with pytest.raises(WorkerRaisedError, match=r"global_rank=1.*ValueError: on one rank") as caught:
        two.launch(fail_on_rank_one, tmp_path / "failed.ckpt")
    assert caught.value.global_rank == 1
    assert "in fail_on_rank_one" in caught.value.traceback_text
    assert torch.load(tmp_path / "failed.ckpt", weights_only=True) == {"rank": 1}


# The rest of this script runs on every rank.
SCRIPT = """
import sys
import torch
from rankwise import Fabric
from tests.unit.fabric.helpers import train

torch.manual_seed(5)
fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
fabric.launch()  # does nothing
weights = train(fabric)
if sys.argv[1:] == ["fail"] and fabric.global_rank == 1:
    raise ValueError("loss is nan")
if sys.argv[1:] == [f"exit {fabric.global_rank}"]:
    sys.exit(3)
if sys.argv[1:] in ([f"raise {fabric.global_rank}"], ["raise all"]):
    raise SystemExit(0 if sys.argv[1:] == ["raise all"] else 3)
try:
    sys.exit(4)
except SystemExit:
    pass  # as programs do that call another one's main function
total = fabric.all_reduce(1.0, reduce_op="sum")
assert fabric.launch(lambda own: own.global_rank) == fabric.global_rank
if fabric.is_global_zero:
    torch.save(weights, "weights.pt")
    print(total)
"""


def check_weights(folder: Path) -> None:
    torch.manual_seed(5)
    found: dict[str, Tensor] = torch.load(folder / "weights.pt")
    assert largest_difference(found, train(fabric())) < 1e-6


def test_the_rest_of_a_script_is_the_job(run_script: ScriptRunner) -> None:
    """`fabric.launch()` without a function: the script's end is the job's."""
    result = run_script(SCRIPT, env=with_tests(), siblings=1)
    assert (result.returncode, result.stdout, result.stderr) == (0, "2.0\n", ""), result
    check_weights(run_script.folder)


def test_a_rank_that_fails_ends_the_script(run_script: ScriptRunner) -> None:
    """The script raises that rank's error, once, with its traceback, and exits with 1."""
    result = run_script(SCRIPT, "fail", env=with_tests(), siblings=1)
    assert (result.returncode, result.stdout) == (1, ""), result
    assert "WorkerRaisedError: Worker global_rank=1" in result.stderr, result
    assert result.stderr.count("Traceback") == 1, result
    assert result.stderr.splitlines()[-1] == "ValueError: loss is nan"


@pytest.mark.parametrize(
    ("how", "rank"), combinations(("exit", "raise"), ("0", "1"), quick=[("exit", "1"), ("raise", "0")])
)
def test_the_exit_status_of_a_rank_is_the_cause(run_script: ScriptRunner, how: str, rank: str) -> None:
    """One that leaves with `sys.exit(3)`, or raises SystemExit, while others wait for it ends the script."""
    result = run_script(SCRIPT, f"{how} {rank}", env=with_tests(), siblings=1)
    # Python drops the code of a SystemExit before exit hooks run.
    code, text = (3, "exited with code 3") if how == "exit" else (1, "it raised SystemExit")
    assert (result.returncode, result.stdout) == (code, ""), result
    assert f"WorkerExitedError: Worker global_rank={rank}" in result.stderr, result
    assert text in result.stderr, result


@pytest.mark.soak
def test_ranks_that_all_raise_system_exit(run_script: ScriptRunner) -> None:
    """`raise SystemExit(main())` is a common last line."""
    result = run_script(SCRIPT, "raise all", env=with_tests())
    assert (result.returncode, result.stderr) == (0, ""), result


@pytest.mark.soak
def test_a_script_under_torchrun(run_script: ScriptRunner) -> None:
    """The same script runs where torchrun has started the processes; so does its failure."""
    command = [sys.executable, *TORCHRUN, str(run_script.write(SCRIPT))]
    result = run_script.command(command, env=with_tests())
    assert (result.returncode, result.stdout) == (0, "2.0\n"), result
    check_weights(run_script.folder)
    for argument, text in (("fail", "ValueError: loss is nan"), ("exit 1", "exitcode  : 3")):
        result = run_script.command([*command, argument], env=with_tests())
        assert result.returncode == 1, result
        assert text in result.stderr, result
