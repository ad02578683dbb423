"""Many ranks of a job in one process: store clients that count, and monitors without threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from rankwise.failures.exchange import FailureExchange, StatusReport, own_status, publish_failure, reply_key
from rankwise.monitoring.heartbeat import NO_FILE, heartbeat_written_to, report_phase
from rankwise.monitoring.rank_monitor import RankMonitor
from rankwise.process_group.step_agreement import StopAgreement
from rankwise.ranks import RankInfo
from rankwise.stores.rendezvous import RankIdentity, run_rendezvous, write_identity

TIMEOUT = timedelta(minutes=10)
_PER_NODE = 8
_LAST = 16  # ranks that are observed where those before them only answer


@dataclass
class Traffic:
    """What a client has asked the store for; a check whether a key is set is repeated while a rank waits."""

    requests: int = 0
    checks: int = 0
    received: int = 0  # bytes


class CountingStore(dist.Store):
    """A rank's client of a table that all ranks of this process share."""

    def __init__(self, table: dist.HashStore) -> None:
        super().__init__()
        self._table: Any = table
        self.traffic = Traffic()

    def set(self, key: str, value: str) -> None:
        self.traffic.requests += 1
        self._table.set(key, value)

    def get(self, key: str) -> bytes:
        return self._received(self._table.get(key))

    def add(self, key: str, value: int) -> int:
        self.traffic.requests += 1
        total: int = self._table.add(key, value)
        return total

    def check(self, keys: list[str]) -> bool:
        self.traffic.checks += 1
        is_set: bool = self._table.check(keys)
        return is_set

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        return self._received(self._table.compare_set(key, expected_value, desired_value))

    def wait(self, keys: list[str], timeout: timedelta = TIMEOUT) -> None:
        self.traffic.requests += 1
        self._table.wait(keys, timeout)

    def _received(self, value: Any) -> bytes:
        self.traffic.requests += 1
        self.traffic.received += len(value)
        return bytes(value)


class SimulatedMonitor(RankMonitor):
    """A rank's monitor, which reads its mailbox when it is told to."""

    def set_once(self, key: str, value: str) -> None:
        self.store.compare_set(key, "", value)

    @property
    def thread_store(self) -> dist.Store:
        """The client for subscribers, as a monitor with a thread has."""
        return self.store

    def deliver(self) -> bool:
        """Deliver the next message; return whether there was one."""
        if not self.store.check([self._next_key]):
            return False
        self._deliver(self.store.get(self._next_key))
        return True

    def _start(self) -> None:
        pass

    def _close(self) -> None:
        pass


@dataclass
class Simulation:
    """The ranks of a job, and what each has asked the store for.

    Attributes:
        seconds: the processor time of all ranks together, in this process.
        observed: the number of ranks that did everything; those that come last.
    """

    world_size: int
    stores: list[CountingStore] = field(init=False)
    seconds: float = 0.0
    observed: int = 0

    def __post_init__(self) -> None:
        table = dist.HashStore()
        table.set_timeout(TIMEOUT)
        self.stores = [CountingStore(table) for _ in range(self.world_size)]
        self.observed = self.observed or self.world_size

    @property
    def traffic(self) -> list[Traffic]:
        """What each rank that is observed has asked for."""
        return [store.traffic for store in self.stores[-self.observed :]]

    def ranks_of(self, rank: int) -> RankInfo:
        """Return where a rank is, on nodes of eight."""
        nodes = self.world_size // _PER_NODE
        return RankInfo(rank, rank % _PER_NODE, rank // _PER_NODE, self.world_size, _PER_NODE, nodes)

    def identities(self) -> tuple[RankIdentity, ...]:
        """Return the identities of all ranks."""
        return tuple(self._identity(rank) for rank in range(self.world_size))

    def _identity(self, rank: int) -> RankIdentity:
        place = self.ranks_of(rank)
        host = f"node{place.node_rank:05}"
        return RankIdentity(rank, place.local_rank, place.node_rank, self.world_size, host, 1000 + rank)

    def timed(self, function: Callable[[], object]) -> None:
        """Call a function, and remember the processor time that it took."""
        begun = time.process_time()
        function()
        self.seconds = time.process_time() - begun


def in_threads(function: Callable[..., object], calls: Sequence[tuple[Any, ...]]) -> None:
    """Call a function with several arguments at once, and wait."""
    threads = [threading.Thread(target=function, args=arguments) for arguments in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def rendezvous(world_size: int) -> Simulation:
    """Let all ranks meet; the last ones are observed, in threads of their own."""
    job = Simulation(world_size, observed=_LAST)
    identities = job.identities()
    for number, identity in enumerate(identities[:-_LAST], start=1):  # they would wait then
        job.stores[number].add("arrived", 1)
        write_identity(job.stores[number], number, identity)

    def meet() -> None:
        last = range(world_size - _LAST, world_size)
        in_threads(run_rendezvous, [(job.stores[rank], identities[rank], TIMEOUT) for rank in last])

    job.timed(meet)
    return job


def stop_agreement(world_size: int, asking: Sequence[int]) -> Simulation:
    """Let some ranks ask all to stop, and all agree on the step."""
    job = Simulation(world_size)
    monitors = [SimulatedMonitor(rank, job.stores[rank]) for rank in range(world_size)]
    parts = [StopAgreement(job.ranks_of(rank), monitors[rank], TIMEOUT) for rank in range(world_size)]
    for part in parts:
        part.start()
        part.begin_step()
    for rank in asking:
        parts[rank].request("enough")

    def agree() -> None:
        first = threading.Thread(target=parts[asking[0]].begin_step)  # waits for the others' answers
        first.start()
        for rank, monitor in enumerate(monitors):
            while rank != asking[0] and not monitor.deliver():
                time.sleep(0.001)
        first.join()
        for part in parts:
            part.begin_step()

    job.timed(agree)
    if any(part.reason != "enough" for part in parts):
        raise RuntimeError("the ranks of the simulation did not agree to stop")
    return job


def failure_exchange(world_size: int) -> Simulation:
    """Let the last rank publish its failure, and all others read it."""
    job = Simulation(world_size)
    identities = job.identities()
    received: list[bytes] = []
    monitors: list[Any] = [SimulatedMonitor(rank, job.stores[rank]) for rank in range(world_size)]
    for own, store, monitor in zip(identities, job.stores, monitors, strict=True):
        FailureExchange(store, identities, own).subscribe(monitor, received.append)

    def exchange() -> None:
        publish_failure(job.stores[-1], b"the record of a failure", world_size)
        for monitor in monitors:
            monitor.deliver()

    job.timed(exchange)
    if len(received) != world_size:
        raise RuntimeError(f"{len(received)} of {world_size} ranks of the simulation got the failure")
    return job


def status_report(world_size: int) -> Simulation:
    """Let the last ranks time out in a collective, one of them first; all have told where they are."""
    job = Simulation(world_size, observed=_LAST)
    identities = job.identities()
    reports: list[object] = []

    def time_out(rank: int) -> None:
        exchange = FailureExchange(job.stores[rank], identities, identities[rank])
        reports.append(exchange.find_cause(TimeoutError(), is_timeout=True))

    def time_out_together() -> None:
        first = world_size - _LAST
        time_out(first)
        in_threads(time_out, [(rank,) for rank in range(first + 1, world_size)])

    with heartbeat_written_to(NO_FILE):
        report_phase("barrier", step=1, waits=True)
        for each in identities:
            job.stores[0].set(reply_key(each.global_rank), own_status(each))
        job.timed(time_out_together)
    if any(not isinstance(each, StatusReport) or each.missing for each in reports):
        raise RuntimeError("ranks of the simulation did not tell where they are")
    return job
