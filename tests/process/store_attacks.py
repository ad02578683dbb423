"""A job whose TCP store lies: a stranger may write to it, and decides what each rank reads."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rankwise.stores import tcp
from rankwise.stores.waiting import StoreCounter
from rankwise.strategies import DDPStrategy, Strategy

SECRET = "the secret of rank 0"
KEY = b"a key that each run of the job has"
KEYS = {
    "addresses": r"/0/[01]$",  # gloo's
    "numbers": r"/nonce(s|/\d)$",
    "outcomes": r"/outcome$",
    "identities": r"/(identity/\d|met)$",
    "votes": r"/votes$|/vote \d/\d$|/result$",
}
"""What may be written in place of a rank's value, by the pattern of its key."""

Lie = Callable[["LyingStore", str], bytes]


@dataclass(frozen=True)
class Attack:
    """What a rank reads in place of the values of some keys; `folder` has what earlier runs have read."""

    keys: str
    lie: str
    folder: Path

    def is_for(self, key: str) -> bool:
        return re.search(KEYS[self.keys], key) is not None


def _passed_on(name: str) -> Callable[..., Any]:
    return lambda self, *arguments: getattr(self.store, name)(*arguments)


class LyingStore(dist.Store):
    """A rank's client of the TCP store, as if a stranger had set keys, deleted or delayed them before."""

    def __init__(self, store: dist.Store, attack: Attack, rank: int) -> None:
        super().__init__()
        self.store: Any = store
        self.attack, self.rank = attack, rank

    def get(self, key: str) -> bytes:
        """Return a lie for a key that is attacked; keep each true value for later runs."""
        if not self.attack.is_for(key):
            return bytes(self.store.get(key))
        return LIES[self.attack.lie](self, key)

    def true_value(self, key: str) -> bytes:
        value = bytes(self.store.get(key))
        self.file_of(key).write_bytes(value)
        return value

    def file_of(self, key: str) -> Path:
        """Return the file with what this rank has read last."""
        return self.attack.folder / f"{self.rank} {key.replace('/', '_')}"

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        found = bytes(self.store.compare_set(key, expected, desired))
        return LIES[self.attack.lie](self, key) if self.attack.is_for(key) else found

    def check(self, keys: list[str]) -> bool:
        return bool(self.store.check(self._as_attacked(keys)))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self.store.wait(self._as_attacked(keys), *([timeout] if timeout else []))

    def _as_attacked(self, keys: list[str]) -> list[str]:
        """Return keys that are set as those are with which the stranger interferes."""
        if self.attack.lie == "drop" and any(map(self.attack.is_for, keys)):
            return ["never set"]
        return [key for key in keys if self.attack.lie != "forge" or not self.attack.is_for(key)]

    def add(self, key: str, value: int) -> int:
        if self.attack.lie == "count" and self.attack.is_for(key):
            self.store.add(key, 1 << 32)  # as if one more rank had voted for something
        return int(self.store.add(key, value))

    set: Any = _passed_on("set")
    delete_key: Any = _passed_on("delete_key")
    deleteKey = delete_key  # noqa: N815  the name that torch's PrefixStore calls
    num_keys: Any = _passed_on("num_keys")
    set_timeout: Any = _passed_on("set_timeout")
    timeout: Any = property(lambda self: self.store.timeout)


def _relayed(store: LyingStore, key: str) -> bytes:
    """Put the relay's address in the place of the rank's own."""
    value = store.true_value(key)
    port = int((store.attack.folder / "port").read_text())
    return re.sub(rb"(?s)\x02\x00..(\x7f\x00\x00\x01)", b"\x02\x00" + port.to_bytes(2, "big") + rb"\1", value)


def _of_other_rank(store: LyingStore, key: str) -> bytes:
    """Exchange the values of two ranks."""
    other = re.sub(r"[01]$", lambda found: str(1 - int(found[0])), key)
    return store.true_value(other if other != key and "identity" not in key else key)


def _of_other_group(store: LyingStore, key: str) -> bytes:
    """Return what the same rank had read of the default group in place of a later group."""
    value = store.true_value(key)
    file = store.file_of(re.sub(r"(/\d+//)\d+//", r"\1", key))  # whatever number the first group has
    return file.read_bytes() if file.exists() else value


def _of_earlier_run(store: LyingStore, key: str) -> bytes:
    """Return what the same rank had read in an earlier run; keep it the first time."""
    file = store.file_of(key)
    return file.read_bytes() if file.exists() else store.true_value(key)


def _late(store: LyingStore, key: str) -> bytes:
    time.sleep(0.05)
    return store.true_value(key)


LIES: dict[str, Lie] = {
    "none": LyingStore.true_value,
    "relay": _relayed,
    "forge": lambda store, key: b"fine",
    "flip": lambda store, key: store.true_value(key)[:-1] + b"\xff",
    "swap": _of_other_rank,
    "other group": _of_other_group,
    "earlier run": _of_earlier_run,
    "delay": _late,
    "drop": LyingStore.true_value,
    "count": LyingStore.true_value,
}


class AttackedDDP(DDPStrategy):
    """Its ranks are clients of a store that lies. All runs have the same key."""

    def __init__(self, attack: Attack, seconds: float) -> None:
        limits: dict[str, Any] = {"timeout": seconds, "init_timeout": seconds}
        super().__init__(start_method="fork", rendezvous="tcp", accelerator="cpu", devices=2, **limits)
        self.attack = attack

    def setup_environment(self) -> None:
        module: Any = tcp
        plain, attack, rank = module.open_another, self.attack, self.global_rank
        module.open_another = lambda *arguments: LyingStore(plain(*arguments), attack, rank)
        self.job.worker.key = KEY
        super().setup_environment()


def share(strategy: Strategy) -> tuple[object, ...]:
    """Share an object and a tensor, in the default group and in another one, by torch's functions too."""
    found: list[object] = [strategy.broadcast(SECRET if strategy.is_global_zero else None)]
    group = dist.new_group([0, 1])
    for each in (dist.group.WORLD, group):
        total = torch.ones(1)
        dist.all_reduce(total, group=each)
        box = [SECRET if strategy.is_global_zero else None]
        dist.broadcast_object_list(box, src=0, group=each)
        found += [float(total), *box]
    votes = StoreCounter(None, strategy.timeout)
    return *found, *(votes.count(number, is_for=strategy.is_global_zero) for number in range(2))


RIGHT = (SECRET, 2.0, SECRET, 2.0, SECRET, 1, 1)
