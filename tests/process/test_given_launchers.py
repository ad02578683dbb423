"""A launcher that the user gives to the strategy: here the processes are multiprocessing's own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest
import torch

from rankwise import DDPStrategy, Launcher
from rankwise.launchers import WorkerContext
from rankwise.launchers.context import Entry
from rankwise.stores.tcp import host_store
from tests.process.test_parameters_in_shared_memory import trained


class PlainLauncher(Launcher):
    """Starts ranks by multiprocessing, whose pickler shares the memory of tensors."""

    def __init__(self, start_method: str) -> None:
        self.start_method = start_method

    def launch(self, entry: Entry, described: Mapping[str, object], rendezvous: str) -> dict[int, Any]:
        store, address = host_store(timedelta(seconds=60))
        context: Any = multiprocessing.get_context(self.start_method)
        values = context.Queue()
        workers = [WorkerContext(ranks, address=address) for ranks in self.all_ranks]
        processes = [context.Process(target=work, args=(entry, worker, values)) for worker in workers]
        for process in processes:
            process.start()
        returned = dict(values.get(timeout=90) for _ in processes)
        for process in processes:
            process.join()
        del store  # which has listened until here
        return returned


def work(entry: Entry, worker: WorkerContext, values: Any) -> None:
    values.put((worker.ranks.global_rank, entry(worker)))


@pytest.mark.parametrize(
    "start_method",
    [pytest.param("fork", marks=pytest.mark.quick), pytest.param("spawn", marks=pytest.mark.soak)],
)
def test_each_rank_trains_its_own_parameters(start_method: str) -> None:
    """The processes do not train one copy, although they could share it; the result comes back."""
    strategy = DDPStrategy(launcher=PlainLauncher(start_method), accelerator="cpu", devices=2)
    found = trained(strategy, 2, is_shared=True)
    expected = trained("single_device", 1, is_shared=False)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
