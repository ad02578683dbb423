"""The private store's table: each operation, waiting, and what is no request."""

from datetime import timedelta
from functools import partial

import pytest
import torch.distributed as dist

from rankwise.failures.classify import is_consequence, is_timeout
from rankwise.stores.private import PrivateStore, StoreTable, pack_fields, unpack_fields
from tests.helpers.raising import raises


def ask(table: StoreTable, *fields: bytes) -> list[bytes]:
    """Return the answers that a request has got so far."""
    answers: list[bytes] = []
    table.handle(pack_fields(fields), answers.append)
    return answers


def answer(table: StoreTable, data: bytes, limit_s: float) -> bytes:
    """Return the table's answer, which is there at once or comes too late."""
    answers: list[bytes] = []
    table.handle(data, answers.append)
    if not answers:
        raise TimeoutError
    return answers[0]


def store_on(table: StoreTable, timeout: timedelta = timedelta(seconds=1)) -> PrivateStore:
    """Return a store that asks the table directly."""
    return PrivateStore(partial(answer, table), timeout)


def test_set_and_get() -> None:
    """A value is bytes of any kind, and the last one set counts."""
    store = store_on(StoreTable())
    store.set("key", b"\x00\xff")
    assert store.get("key") == b"\x00\xff"
    store.set("key", "text")
    assert store.get("key") == b"text"
    store.set("empty", "")
    assert store.get("empty") == b""


def test_add() -> None:
    """A number starts at 0, and goes below it; what is no number of 64 bits is refused, and stays."""
    store = store_on(StoreTable())
    assert [store.add("count", amount) for amount in (2, 3, -10, 0)] == [2, 5, -5, -5]
    assert store.get("count") == b"-5"
    store.set("key", "text")
    raises(ValueError, "cannot add 1 to 'key', whose value is no number", store.add, "key", 1)
    with pytest.raises(TypeError):
        store.add("other", 1.5)  # type: ignore[arg-type]  # wrong on purpose
    assert (store.get("key"), store.check(["other"])) == (b"text", False)
    store.set("key", str(1 << 64))
    for key, amount in (("key", 1), ("other", 1 << 64)):
        raises(ValueError, "cannot add", store.add, key, amount)
    assert (store.get("key"), store.check(["other"])) == (b"%d" % (1 << 64), False)


@pytest.mark.parametrize(
    ("before", "expected", "desired", "result", "after"),
    [
        (None, "", "new", b"new", b"new"),
        (None, "other", "new", b"other", None),
        ("old", "old", "new", b"new", b"new"),
        ("old", "other", "new", b"old", b"old"),
    ],
)
def test_compare_set(
    before: str | None, expected: str, desired: str, result: bytes, after: bytes | None
) -> None:
    """It sets only what is as expected, and returns what is there; as torch's own stores do."""
    stores: list[dist.Store] = [store_on(StoreTable()), dist.HashStore()]
    for store in stores:
        if before is not None:
            store.set("key", before)
        assert store.compare_set("key", expected, desired) == result
        assert store.check(["key"]) is (after is not None)
        if after is not None:
            assert store.get("key") == after


def test_check_count_and_delete() -> None:
    """A check is for all of its keys; deleting says whether there was something to delete."""
    store = store_on(StoreTable())
    store.set("key", "")
    assert (store.check(["key"]), store.check(["key", "two"]), store.check([])) == (True, False, True)
    assert store.num_keys() == 1
    assert [store.delete_key("key") for _ in range(2)] == [True, False]
    assert store.num_keys() == 0


def test_a_wait_is_answered_when_all_is_there() -> None:
    """Once, by the request that sets the last of its keys, or at once; what is deleted is waited for anew."""
    table = StoreTable()
    answers = ask(table, b"wait", b"one", b"two")
    ask(table, b"set", b"one", b"")
    ask(table, b"delete", b"one")
    ask(table, b"add", b"two", b"1")
    assert answers == []
    ask(table, b"set", b"one", b"")
    assert answers == [b""]
    ask(table, b"set", b"two", b"")
    assert answers == [b""]
    assert ask(table, b"wait", b"one", b"two") == ask(table, b"wait") == [b""]


def test_several_wait_for_one_key() -> None:
    """Every waiter is answered."""
    table = StoreTable()
    waiters = [ask(table, b"wait", b"key") for _ in range(3)]
    ask(table, b"compare_set", b"key", b"", b"value")
    assert waiters == [[b""]] * 3


def test_a_wait_in_vain_is_torchs_error() -> None:
    """When no answer comes in time the error is the one that torch's callers expect, naming the keys."""
    store = store_on(StoreTable())
    with pytest.raises(dist.DistStoreError, match=r"wait of key, other had no answer in 0\.25 s"):
        store.wait(["key", "other"], timedelta(seconds=0.25))
    raises(dist.DistStoreError, None, store.get, "key")


def test_a_stopped_job_is_no_timeout() -> None:
    """Where no answer will come, the error does not speak of the time that was not waited."""

    def request(data: bytes, limit_s: float) -> bytes:
        raise ConnectionError

    with pytest.raises(dist.DistStoreError, match="no answer as the job has been stopped") as caught:
        PrivateStore(request, timedelta(seconds=600)).wait(["key"])
    assert is_consequence(caught.value)
    assert not is_timeout(caught.value)


def test_a_wait_that_is_over_is_dropped() -> None:
    """Nothing is kept of it, and no reply is sent."""
    table, answers = StoreTable(), list[bytes]()
    table.handle(pack_fields([b"wait", b"key"]), answers.append, "name")
    table.cancel("name")
    table.cancel("another")
    assert not table._names_by_key
    ask(table, b"set", b"key", b"")
    assert not answers
    assert not table._waiting


@pytest.mark.parametrize(
    "fields",
    [[b"unknown"], [b"set", b"key"], [b"set", b"a", b"b", b"c"], [b"add", b"key", b"x"], [b"get"], [b""], []],
    ids=repr,
)
def test_what_is_no_request_is_a_value_error(fields: list[bytes]) -> None:
    """A damaged request is refused and changes nothing."""
    table = StoreTable()
    raises(ValueError, None, ask, table, *fields)
    assert ask(table, b"count") == [b"0"]


def test_messages_come_back() -> None:
    """What was packed is unpacked; bytes that are no message are a ValueError."""
    messages: list[list[bytes]] = [[], [b""], [b"one"], [b"a" * 100_000, b"", b"\x00\xff"]]
    for fields in messages:
        assert unpack_fields(pack_fields(fields)) == fields
    for data in (b"\x00", b"\x00\x01", b"\x00\x01\x00\x00\x00\x05ab", b"\x00\x00extra"):
        raises(ValueError, "not a message of the store", unpack_fields, data)


def test_torch_takes_it_for_a_store() -> None:
    """The prefix store of torch, in C++, works on top of it."""
    store = store_on(StoreTable(), timedelta(seconds=7))
    inner = dist.PrefixStore("job", store)
    inner.set("key", "value")
    assert inner.get("key") == b"value"
    assert inner.add("count", 2) == 2
    assert store.check(["job/key"])
    assert store.timeout == timedelta(seconds=7)
    assert store.clone() is store
