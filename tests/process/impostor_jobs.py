"""Jobs that an impostor attacks: one rank connects late in each process group.

Run as `LATE=RANK python impostor_jobs.py JOB START_METHOD FOLDER [NODES]`. With `LATE=-1` nobody attacks.
With `STRANGER=UID` the impostor is that user; the job has to be alone in its network namespace.
"""

import os
import shutil
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from rankwise.process_group import authentication
from rankwise.strategies import DDPElasticStrategy, DDPStrategy, Strategy
from tests.helpers.load import slowdown
from tests.process.training_tasks import Regression, loader, quiet_trainer

SECRET = "the secret of the job"
LONGEST_WAIT_S = 3.0
GROUPS = 16  # the impostor can take a place in about every second one


def connect_late_if_told(global_rank: int) -> None:
    """Connect to the other ranks of each group when the impostor has connected to two new ports."""
    if global_rank != int(os.environ.get("LATE", "1")):
        return
    folder, module = Path(sys.argv[3]), cast("Any", authentication)
    plain = module._devices

    def listen() -> Any:
        before, devices, deadline = _lines(folder), plain(), time.monotonic() + LONGEST_WAIT_S
        while _lines(folder) < before + 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        return devices

    module._devices = listen


def _lines(folder: Path) -> int:
    file = folder / "connected"
    return len(file.read_text().splitlines()) if file.exists() else 0


def forge_outcomes(address: tuple[str, int]) -> None:
    """Write to the store, as a stranger can, that the ranks of each group have found nothing wrong."""
    store = dist.TCPStore(*address, None, False, timedelta(seconds=30))
    for group in ["0/", *(f"0//{number}/" for number in range(GROUPS + 1))]:
        store.set(f"start0/job1/{group}/cpu//rankwise/0/outcome", "fine")


class Prepared(DDPStrategy):
    def setup_environment(self) -> None:
        if self.rendezvous == "tcp" and self.job.worker.address is not None:
            forge_outcomes(self.job.worker.address)
        connect_late_if_told(self.global_rank)
        super().setup_environment()


class PreparedElastic(DDPElasticStrategy):
    def setup_environment(self) -> None:
        connect_late_if_told(self.global_rank)
        super().setup_environment()


def share(strategy: Strategy) -> str:
    secret = strategy.broadcast(SECRET if strategy.is_global_zero else None)
    total = strategy.all_reduce(torch.full((3,), 3.0), reduce_op="mean")
    return f"{secret} {float(total[0])}"


def share_by_torch(group: dist.ProcessGroup | None) -> str:
    box = [SECRET if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0, group=group)
    return f"{box[0]} 3.0"


def share_in_new_groups(strategy: Strategy) -> str:
    """Share an object by torch's own function, in groups that the function creates."""
    shared = {share_by_torch(dist.new_group(list(range(strategy.world_size)))) for _ in range(GROUPS)}
    assert len(shared) == 1, shared
    return shared.pop()


def share_in_own_group(strategy: Strategy) -> str:
    """Share an object by torch's own function, in a default group that the function creates."""
    dist.init_process_group("gloo", init_method="env://")
    shared = share_by_torch(None)
    dist.destroy_process_group()
    return shared


def main(job: str, start_method: str, num_nodes: int = 1) -> None:
    options: dict[str, Any] = {"accelerator": "cpu", "devices": 2, "num_nodes": num_nodes}
    options |= {"timeout": 10 * slowdown(), "init_timeout": 15 * slowdown()}
    if start_method == "elastic":
        strategy: DDPStrategy = PreparedElastic(max_restarts=0, **options)
    else:
        rendezvous = "tcp" if job == "forged_outcomes" else "auto"
        strategy = Prepared(start_method=start_method, rendezvous=rendezvous, **options)
    if job == "fit":
        quiet_trainer(strategy, 2, max_epochs=1).fit(Regression(), loader(8, 2))
        shared = f"{SECRET} 3.0"
    elif job == "own_group":
        shared = strategy.launch(share_in_own_group, init_process_group=False)
    else:
        shared = strategy.launch(share if job == "broadcast" else share_in_new_groups)
    print("ENDED", shared, flush=True)


def start_impostor(folder: Path) -> subprocess.Popen[bytes]:
    """Start it as this user, with this interpreter, or as another one, who may not even see that."""
    script = Path(__file__).with_name("impostor.py")
    if (user := os.environ.get("STRANGER")) is None:
        return subprocess.Popen([sys.executable, str(script), str(os.getpid()), str(folder)])
    copy = shutil.copy(script, folder)
    Path(copy).chmod(0o644)
    command = ["/usr/bin/python3", str(copy), str(os.getpid()), str(folder)]
    variables = {"ALL_PORTS": "1", **{name: value for name, value in os.environ.items() if name == "SILENT"}}
    return subprocess.Popen(command, user=int(user), group=int(user), extra_groups=[], env=variables, cwd="/")


if __name__ == "__main__":
    folder = Path(sys.argv[3])
    impostor = None
    is_attacked = os.environ.get("LATE", "1") != "-1"
    if is_attacked and "RANK" not in os.environ:  # not a rank that runs this script again
        impostor = start_impostor(folder)
        while not (folder / "ready").exists() and impostor.poll() is None:
            time.sleep(0.01)
    try:
        main(sys.argv[1], sys.argv[2], *map(int, sys.argv[4:]))
    except Exception as error:
        print("RAISED", type(error).__name__, error, flush=True)
    finally:
        if impostor is not None:
            impostor.kill()
            impostor.wait()
