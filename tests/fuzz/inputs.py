"""Draw damaged inputs, and run a parser on many of them within limits of memory and processor time."""

import copy
import json
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

from rankwise.errors import RankwiseError
from rankwise.testing.contracts import NO_NUMBERS

MEMORY_BYTES = 1 << 30  # that a test may use more than before, far below what inputs claim
CPU_S = 10.0  # of one input, in this thread
LONGEST_TEXT = 1 << 20
NO_MEMORY = ("MemoryError", "allocate memory", "bad_alloc")

ODD_TEXTS = (
    *NO_NUMBERS,
    *("", " ", "0", "1", "2", "007", "true", "\n", "1\n"),
    *("\ud800", "\ud83d\ude00", "9" * 40, "18446744073709551616", "x" * 100_000),
    *("2(x3),1", "1(x999999999)", "n[1-", "n[1-2]", "n[1-999999999]", "n" + "[1]" * 3000),
    *("y" * 9000 + "[1-99999]", "/", "/dev/null", "/dev/zero", "../x", "%s%n", "{}", "[]", "a=b", "=lo"),
    *("^lo", "lo,eth0", "::1", "127.0.0.1"),
)
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 63, 1 << 31, -(1 << 63), 1 << 63, 10**30, 0.5, -1.0, 1e308),
    *(float("nan"), float("inf"), "", "x", "1", "\ud800", "9" * 5000),
    *([], {}, [1], ["x"], {"x": 1}, [[]], [None]),
)
EXTREMES = (
    *(b"", b"\x00", b"\xff" * 4, b"\x7f\xff\xff\xff", b"\x00" * 4, b"\x80", b"\xff" * 8),
    *(b"9" * 4999, b"[" * 5000),
)


@dataclass(frozen=True)
class Fuzzing:
    """How many inputs to draw, from which seed."""

    count: int
    seed: int

    def run(self, parse: Callable[[Random], object], *expected: type[BaseException]) -> int:
        """Call `parse`, which draws an input; return how many inputs it has accepted.

        Raises:
            AssertionError: when it raises anything but our errors and `expected`, or needs too much.
        """
        accepted = 0
        with _memory_limited():
            for number in range(self.count):
                began_s = time.thread_time()
                error = _error_of(parse, Random(f"{self.seed} {number}"))
                used_s = time.thread_time() - began_s
                if used_s > CPU_S or not (error is None or _is_allowed(error, expected)):
                    message = f"input {number} of seed {self.seed}: {error!r} after {used_s:.1f} s"
                    raise AssertionError(message) from error
                accepted += error is None
        return accepted


def _error_of(parse: Callable[[Random], object], random: Random) -> BaseException | None:
    try:
        parse(random)
    except BaseException as error:
        return error
    return None


def _is_allowed(error: BaseException, expected: tuple[type[BaseException], ...]) -> bool:
    text = f"{error}{error!r}"
    is_bounded = len(text) < LONGEST_TEXT and not any(word in text for word in NO_MEMORY)
    return isinstance(error, (RankwiseError, *expected)) and is_bounded


@contextmanager
def _memory_limited() -> Iterator[None]:
    """Let this process have that much memory more, by the kernel's limit for writable memory."""
    status = Path("/proc/self/status").read_text()
    used = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmData"))
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = used + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard < 0 else min(limit, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def damaged(random: Random, data: bytes) -> bytes:
    """Return bytes with some changes: bits, cuts, repetitions, extreme numbers; now and then only noise."""
    if random.random() < 0.1:
        return random.randbytes(random.randrange(200))
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 5))):
        place = random.randrange(len(changed) + 1)
        end = min(len(changed), place + random.choice((1, 2, 4, 8, 100)))
        match random.randrange(6):
            case 0 if place < len(changed):
                changed[place] ^= 1 << random.randrange(8)
            case 1:
                changed[place:end] = random.choice(EXTREMES)
            case 2:
                changed[place:place] = random.choice(EXTREMES)
            case 3:
                del changed[place:end]
            case 4:
                changed[place:place] = changed[end : end + random.randrange(100)]
            case _:
                del changed[place if random.random() < 0.3 else len(changed) :]
    return bytes(changed)


def text_from(random: Random, texts: Sequence[str]) -> str:
    """Return a text that is odd, or made of parts of some texts."""
    if random.random() < 0.5:
        return random.choice(ODD_TEXTS)
    if random.random() < 0.2:
        pairs = ((random.randrange(128), random.randrange(0xD800)) for _ in range(12))
        return "".join(chr(random.choice(pair)) for pair in pairs)
    parts = [random.choice(texts) for _ in range(random.randrange(1, 4))]
    cut = [part[random.randrange(len(part) + 1) :] if random.random() < 0.3 else part for part in parts]
    return random.choice(("", ",", "-", " ")).join(cut)


def changed(random: Random, value: Any, odd: Sequence[Any] = ODD_VALUES) -> Any:
    """Return a copy of a nested value with one to three parts replaced, removed, added or exchanged."""
    value = copy.deepcopy(value)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        places = list(_places(value))
        if not places:
            return copy.deepcopy(random.choice(odd))
        owner, key = random.choice(places)
        match random.randrange(8):
            case 0 | 1:
                del owner[key]
            case 2 if isinstance(owner, dict):
                owner[random.choice(("x", "future", 0, ""))] = owner.pop(key)
            case 3:
                other_owner, other_key = random.choice(places)
                owner[key] = copy.deepcopy(other_owner[other_key])
            case 4 if isinstance(owner, list):
                owner.extend(copy.deepcopy(owner))
            case _:
                owner[key] = copy.deepcopy(random.choice(odd))
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each list or dictionary in a nested value, with each of its keys."""
    if isinstance(value, dict):
        keys: list[Any] = list(value)
    elif isinstance(value, list):
        keys = list(range(len(value)))
    else:
        return
    for key in keys:
        yield value, key
        yield from _places(value[key])


def damaged_json(random: Random, value: Any) -> bytes:
    """Return JSON of a value with changes, or changed bytes of it, or the bytes of another value."""
    if random.random() < 0.6:
        return json.dumps(changed(random, value)).encode()
    if random.random() < 0.1:
        return random.choice((b"[" * 100_000, b'{"":' * 50_000, b"1e999", b"NaN", b'"\\ud800"', b"9" * 5000))
    return damaged(random, json.dumps(value).encode())


ODD_PARTS = (
    *ODD_VALUES,
    *(torch.zeros(0), torch.ones(3), torch.ones(2, 2), torch.tensor(float("nan")), torch.tensor(1)),
    *(torch.ones(2, dtype=torch.complex64), torch.ones(2, dtype=torch.bool), torch.ones(2).to_sparse()),
    *(torch.zeros(5000, dtype=torch.uint8), (1, 2), ()),
)
"""Odd values for the parts of a checkpoint, tensors too."""
