"""The monitor of a rank: messages of other ranks, over a store or over a channel; timers."""

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from rankwise.monitoring.rank_monitor import (
    ChannelMonitor,
    PollingMonitor,
    RankMonitor,
    message_key,
    send_message,
)
from rankwise.stores.private import StoreTable
from rankwise.stores.tcp import job_prefix, store_of_job
from tests.helpers.own_process import wait_until
from tests.unit.stores.test_private import store_on

TIMEOUT_S = 30.0


@contextmanager
def polling() -> Iterator[tuple[RankMonitor, dist.Store]]:
    """Return a monitor of rank 1 that polls, and its store."""
    store = dist.HashStore()
    monitor = PollingMonitor(1, 2, store, lambda: store)
    yield monitor, store
    monitor.close()


@contextmanager
def over_a_channel(table: StoreTable | None = None) -> Iterator[tuple[RankMonitor, dist.Store]]:
    """Return a monitor of rank 1 whose replies come at once, in the sender's thread, and its store."""
    table = StoreTable() if table is None else table
    private = store_on(table, timedelta(seconds=TIMEOUT_S))  # a PrefixStore does not keep it
    store = store_of_job(private, 1)
    monitor = ChannelMonitor(1, store, job_prefix(1), table.handle)
    yield monitor, store
    monitor.close()


@pytest.mark.parametrize("kind_of_monitor", [polling, over_a_channel])
def test_messages_are_delivered_in_order(kind_of_monitor: Any) -> None:
    """Subscribers get those of their kind, earlier ones too, and reply by keys, of which none is replaced."""
    received: list[str] = []
    with kind_of_monitor() as (monitor, store):
        monitor.subscribe("other", received.append)
        send_message(store, [0, 1], "status", "early")
        for text in ("first", "second: with a colon"):
            send_message(store, [1], "other", text)
        wait_until(lambda: len(received) == 2)
        assert received == ["first", "second: with a colon"]
        monitor.subscribe("status", received.append)
        assert received[2:] == ["early"]
        send_message(store, [1], "status", "last")
        wait_until(lambda: len(received) == 4)
        assert received[3:] == ["last"]
    with kind_of_monitor() as (monitor, store):
        store.set("mine", "before")
        monitor.subscribe(
            "status", lambda text: (monitor.set_once("mine", text), monitor.set_once("new", text))
        )
        send_message(store, [1], "status", "now")
        wait_until(lambda: store.check(["new"]))
        assert (store.get("mine"), store.get("new")) == (b"before", b"now")


@pytest.mark.parametrize("kind_of_monitor", [polling, over_a_channel])
def test_a_closed_monitor_keeps_no_subscriber(kind_of_monitor: Any) -> None:
    """Subscribers may refer to the monitor: they end with it, before garbage is collected."""

    class Subscriber:
        def __init__(self, monitor: RankMonitor) -> None:
            self.monitor = monitor
            monitor.subscribe("status", self.receive)

        def receive(self, text: str) -> None:
            """Do nothing."""

    gc.disable()
    try:
        with kind_of_monitor() as (monitor, _):
            gone = weakref.ref(Subscriber(monitor))
            assert gone() is not None
            monitor.close()
            assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("is_counted", [False, True], ids=["before", "after"])
def test_closing_during_a_delivery_leaves_no_request(
    is_counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request for the message after the delivered one is ended too; nothing waits in the table."""
    table = StoreTable()
    with over_a_channel(table) as (monitor, store):
        deliver = monitor._deliver

        def close_and_deliver(message: bytes) -> None:
            if not is_counted:
                monitor.close()
            deliver(message)

        monkeypatch.setattr(monitor, "_deliver", close_and_deliver)
        monitor.subscribe("status", lambda text: monitor.close() if is_counted else None)
        assert len(table._waiting) == 1
        send_message(store, [1], "status", "now")
        assert not table._waiting


def test_the_same_message_is_sent_once() -> None:
    """What is in a mailbox is not put there again, whoever sends it."""
    store = dist.HashStore()
    for text in ("a", "b", "a", "b"):
        send_message(store, [3], "status", text)
    assert [store.check([message_key(3, number)]) for number in (1, 2, 3)] == [True, True, False]


def test_timers_run_between_messages() -> None:
    """At their interval, with the store of the thread, whose connection ends with it; one timer is enough."""
    store, times = dist.HashStore(), list[float]()
    monitor = PollingMonitor(0, 2, store, lambda: dist.PrefixStore("", store))
    monitor.call_every(0.1, lambda given: times.append(time.monotonic()))
    wait_until(lambda: len(times) == 3)
    assert monitor.thread_store is not store
    monitor.close()
    assert monitor.thread_store is store  # not when garbage is collected
    assert times[2] - times[0] >= 0.2
    assert "rankwise-monitor" not in [thread.name for thread in threading.enumerate()]


def test_a_store_that_is_gone_ends_the_thread() -> None:
    """Nobody is left to send messages."""

    def fail() -> dist.Store:
        raise RuntimeError("Connection refused")

    monitor = PollingMonitor(0, 2, dist.HashStore(), fail)
    monitor.subscribe("status", lambda text: None)
    wait_until(lambda: "rankwise-monitor" not in [thread.name for thread in threading.enumerate()])
    monitor.close()
