"""Stores whose values only processes with the key can write."""

from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from rankwise.errors import PeerAuthenticationError
from rankwise.stores.private import PrivateStore
from rankwise.stores.sealed import CODE_BYTES, NamedPrefixStore, SealedStore, part_of, seal, unsealed
from tests.helpers.raising import raises

KEY, ANOTHER = b"the key of the job", b"a key of another job"


def stores() -> tuple[Any, SealedStore]:
    """Return a store that everybody can write to, and what a rank makes of it."""
    base = dist.HashStore()
    return base, SealedStore(NamedPrefixStore("job", base), KEY)


def test_values_of_ranks() -> None:
    """What one rank writes, the others read."""
    base, store = stores()
    store.set("text", "value")
    store.multi_set(["bytes", "empty"], [b"\xff\x00", b""])
    assert SealedStore(NamedPrefixStore("job", base), KEY).get("text") == b"value"
    assert store.multi_get(["bytes", "empty"]) == [b"\xff\x00", b""]
    assert store.compare_set("new", "", "first") == b"first"
    assert store.compare_set("new", "", "second") == b"first"
    assert store.compare_set("new", "first", b"second") == b"second"
    assert store.clone().get("new") == b"second"


@pytest.mark.parametrize("value", [b"", b"value", bytes(CODE_BYTES), bytes(CODE_BYTES) + b"value"])
def test_a_value_that_no_rank_has_written(value: bytes) -> None:
    """It is an error that names the key, whichever way it is read."""
    base, store = stores()
    base.set("job/key", value)
    problem = "No rank of the job has written the value of 'job/key' in the job's store"
    raises(PeerAuthenticationError, problem, store.get, "key")
    assert problem in store.problem
    if value:  # for torch an empty one is as good as none
        raises(PeerAuthenticationError, problem, store.compare_set, "key", "", "own")


def test_a_value_in_another_place() -> None:
    """A code is for one key, one prefix and one value, and for the ranks with one key."""
    base, store = stores()
    store.set("key", "value")
    sealed = base.get("job/key")
    base.set("job/another", sealed)
    base.set("another/key", sealed)
    base.set("job/part/key", sealed)
    others = [
        (store, "another"),
        (SealedStore(NamedPrefixStore("another", base), KEY), "key"),
        (store.part("part"), "key"),
        (SealedStore(NamedPrefixStore("job", base), ANOTHER), "key"),
    ]
    for other, key in others:
        raises(PeerAuthenticationError, None, other.get, key)


def test_parts() -> None:
    """A part has keys of its own, and says so in its codes, by whatever steps it was made."""
    base, store = stores()
    part_of(store.part("a"), "b").set("key", "value")
    assert (
        SealedStore(NamedPrefixStore("b", NamedPrefixStore("a", unsealed(store))), KEY).get("key") == b"value"
    )
    assert base.check(["job/a/b/key"])


def test_what_is_passed_on() -> None:
    """Counts, waits and deletions are the lower store's."""
    base, store = stores()
    assert (store.add("count", 2), store.add("count", 3)) == (2, 5)
    store.set("key", "value")
    store.wait(["key", "count"])
    store.wait(["key"], timedelta(seconds=1))
    assert store.check(["key"])
    assert not store.check(["key", "missing"])
    store.set_timeout(timedelta(milliseconds=10))
    assert store.timeout == timedelta(milliseconds=10)
    raises(dist.DistStoreError, None, store.wait, ["missing"])
    assert store.num_keys() == base.num_keys()
    assert store.delete_key("key")
    assert not store.check(["key"])


def test_below_a_prefix_of_torch() -> None:
    """Torch's C++ code, such as gloo's, reads and writes sealed values, and gets the error."""
    base, store = stores()
    outer: Any = dist.PrefixStore("gloo", store)
    outer.set("address", b"value")
    assert store.get("gloo/address") == outer.get("address") == b"value"
    base.set("job/gloo/address", b"forged")
    raises(PeerAuthenticationError, None, outer.get, "address")


def test_stores_that_need_no_codes() -> None:
    """Nobody else can reach them; what is sealed is not sealed twice."""
    private = PrivateStore(lambda request, limit_s: b"", timedelta(seconds=1))
    for store in (private, dist.PrefixStore("job", private), dist.HashStore(), stores()[1]):
        assert seal(store, KEY) is store
