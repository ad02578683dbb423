"""Seed the random number generators of Python, torch and NumPy; isolate, save and restore their state."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import logging
import operator
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, SupportsIndex, final

import torch

from rankwise import ranks, start
from rankwise.checks import check_is_a, check_value
from rankwise.errors import InvalidArgumentError, InvalidTypeError

_log = logging.getLogger(__name__)
_CPU = torch.device("cpu")
_HIGHEST = 2**32 - 1  # NumPy's
_RANGE = f"a whole number from 0 to {_HIGHEST}"
_VARIABLE = "PL_GLOBAL_SEED"
_NUMPY_WORDS = 624  # in a state of NumPy's MT19937
_given: int | None = None


def seed_everything(seed: int | None = None, workers: bool = True, verbose: bool = True) -> int:
    """Seed Python, torch and, if it is imported, NumPy. Samplers that shuffle use the seed too.

    Models that are built afterwards have the same initial weights on every rank. In `Trainer.fit` each rank
    draws from its own stream (for dropout and augmentation), and so does each worker of its loader. Use the
    same seed on all ranks: a fit raises if seeds differ.

    Runs on: every process that needs the seed. Processes that a strategy starts inherit it.

    Args:
        seed: from 0 to 2**32 - 1. None for the seed that was given before in this process, or else the
            variable `PL_GLOBAL_SEED`, or else 0, with a warning.
        workers: for compatibility with Lightning: loader workers always use the seed.
        verbose: whether to log the seed, at the level INFO.

    Returns:
        The seed.

    Raises:
        InvalidTypeError: if `seed` is not an integer.
        InvalidArgumentError: if `seed`, or `PL_GLOBAL_SEED`, is out of range.
    """
    for name, flag in (("workers", workers), ("verbose", verbose)):
        check_is_a(name, flag, bool, "True or False")
    seed = _checked("seed", _default_seed() if seed is None else seed)
    if verbose:
        _log.info("The seed is %d.", seed)
    global _given
    _given = seed
    torch.manual_seed(seed)  # the devices too
    seed_process(seed)
    return seed


def _default_seed() -> int:
    """Return the seed of a call without one."""
    if _given is not None:
        return _given
    if not (text := os.environ.get(_VARIABLE, "").strip()):
        ranks.rank_zero_warn(f"seed_everything() without a seed, and without {_VARIABLE}, means the seed 0.")
        return 0
    try:
        return _checked(_VARIABLE, int(text))
    except ValueError:
        raise InvalidArgumentError(argument=_VARIABLE, value=text, expected=_RANGE) from None


def _checked(name: str, seed: Any) -> int:
    """Return a seed as an int, also one of NumPy's; `name` says in errors where it comes from."""
    if isinstance(seed, bool) or not isinstance(seed, SupportsIndex):
        raise InvalidTypeError(argument=name, value=seed, expected="a whole number")
    number = operator.index(seed)
    check_value(name, seed, 0 <= number <= _HIGHEST, _RANGE)
    return number


def given_seed() -> int | None:
    """Return the last argument of `seed_everything` in this process, or None."""
    return _given


def restore_seed(torch_seed: int, given: int | None) -> None:
    """Give torch, on all devices, the seed of another process, and make `given` the `given_seed`."""
    global _given
    _given = given
    if torch.initial_seed() != torch_seed:  # a fork has it, and seeding all devices takes milliseconds
        torch.manual_seed(torch_seed)


def drawn_seed() -> int:
    """Draw a seed from torch's CPU generator."""
    return int(torch.randint(2**63 - 1, (), device=_CPU))


def mixed_seed(*numbers: int) -> int:
    """Return a seed from 0 to 2**63 - 1 that depends on all `numbers`."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def seed_process(seed: int, device: torch.device = _CPU) -> None:
    """Seed Python, NumPy (if loaded), torch's CPU generator and `device`'s generator."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


@contextlib.contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Restore this process's random state, with that of a device, after the block."""
    before = get_random_state(device)
    try:
        yield
    finally:
        set_random_state(before, device)


@contextlib.contextmanager
def isolated_random_state(seed: int, *generators: Any) -> Iterator[None]:
    """Seed Python, NumPy (if loaded), torch's CPU generator and `generators`; restore all after it."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(random_state_kept(_CPU))
        seed_process(seed)
        for generator in generators:
            stack.callback(_reseeded(generator, seed))
        yield


def random_generators_in(values: Iterable[object]) -> list[Any]:
    """Return the random generators of torch, Python and NumPy among values, once each, that can be seeded."""
    kinds: tuple[type, ...] = (torch.Generator, random.Random)
    if numpy := sys.modules.get("numpy"):
        kinds += (numpy.random.Generator, numpy.random.RandomState)
    found = [value for value in values if isinstance(value, kinds)]
    return list({id(each): each for each in found if not isinstance(each, random.SystemRandom)}.values())


def seed_of(generator: Any) -> int:
    """Return a number that depends on a generator's seed or, except for torch's, on its state."""
    if isinstance(generator, torch.Generator):
        return generator.initial_seed()
    copied = copy.deepcopy(generator)
    is_python = isinstance(copied, random.Random)
    return copied.getrandbits(63) if is_python else int.from_bytes(copied.bytes(7), "big")


def _reseeded(generator: Any, seed: int) -> Callable[[], object]:
    """Seed a generator; return a function that restores its state."""
    restore: Callable[[], object]
    if isinstance(generator, torch.Generator):
        with start.collections_paused():  # as in get_random_state
            restore = partial(generator.set_state, generator.get_state())
        generator.manual_seed(seed)
    elif isinstance(generator, random.Random):
        restore = partial(generator.setstate, generator.getstate())
        generator.seed(seed)
    elif isinstance(generator, sys.modules["numpy"].random.RandomState):
        restore = partial(generator.set_state, generator.get_state())
        generator.seed(seed % 2**32)
    else:
        bits = generator.bit_generator
        restore = partial(setattr, bits, "state", bits.state)
        bits.state = type(bits)(seed).state
    return restore


def get_random_state(device: torch.device) -> dict[str, Any]:
    """Return the state of Python's, NumPy's (if loaded), torch's and the device's generator.

    It consists of plain types and CPU tensors, so that `torch.load(weights_only=True)` loads it.
    """
    state = _state_without_numpy(device)
    if numpy := sys.modules.get("numpy"):
        state["numpy"] = _plain_state(numpy.random)
    return state


def _state_without_numpy(device: torch.device) -> dict[str, Any]:
    state: dict[str, Any] = {"python": random.getstate()}
    # torch locks a generator while it makes the tensor. A collection then may wait for another thread of the
    # program, which waits for the generator: torch.manual_seed does not let other threads run meanwhile.
    with start.collections_paused():
        state["torch"] = torch.default_generator.get_state()
        if device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _plain_state(generator: Any) -> tuple[Any, ...]:
    """Return the legacy state of a `RandomState`, or of `numpy.random`."""
    kind, keys, *rest = generator.get_state()
    return (kind, keys.tolist(), *rest)


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore what `get_random_state` returned; NumPy's state only if NumPy is loaded."""
    torch.default_generator.set_state(state["torch"])
    random.setstate(state["python"])
    if "numpy" in state and (numpy := sys.modules.get("numpy")):
        set_numpy_state(numpy.random, state["numpy"])
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


def set_numpy_state(generator: Any, state: Any) -> None:
    """Set a legacy state of NumPy, from a file.

    Raise ValueError or TypeError for an invalid position; NumPy itself would read memory at any position.
    """
    kind, keys, position, *rest = state
    if not 0 <= operator.index(position) <= _NUMPY_WORDS:
        raise ValueError(f"position {position} is outside of the state")
    generator.set_state((kind, keys, position, *rest))


@final
class _Stream:
    """The state of all generators, to continue with later.

    NumPy's bit generator is exchanged: to read and write its state takes 0.2 ms.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._state = _state_without_numpy(device)
        self._numpy = None
        if numpy := sys.modules.get("numpy"):
            self._numpy = numpy.random.get_bit_generator()

    def resume(self) -> None:
        """Draw from this stream."""
        set_random_state(self._state, self._device)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_bit_generator(self._numpy)

    def saved(self) -> dict[str, Any]:
        """Return the state as `get_random_state` does."""
        if self._numpy is None:
            return self._state
        return {**self._state, "numpy": _plain_state(sys.modules["numpy"].random.RandomState(self._numpy))}


@final
class RandomStreams:
    """Let all ranks draw the same random numbers in some blocks, although each has a stream of its own.

    The numbers of a block depend on the seed, its name, the position in training, and how often a block of
    that name has begun there. So they are the same on ranks that have drawn other numbers before, and in a
    run that resumes. Before `part`, blocks have no effect.
    """

    def __init__(self) -> None:
        self._seed = 0
        self._device = _CPU
        self._position: Callable[[], Sequence[int]] | None = None  # before `part`
        self._own: _Stream | None = None  # this rank's, in a block of `shared`
        self._spare: list[Any] = []  # NumPy's bit generators
        self._counted: Sequence[int] = ()
        self._counts: dict[str, int] = {}

    def part(self, seed: int, device: torch.device, position: Callable[[], Sequence[int]]) -> None:
        """Note that ranks draw from streams of their own from now on, also for the generator of `device`.

        `seed` is the same on all ranks, and so is what `position` returns: other numbers after each batch.
        """
        self._seed, self._device, self._position = seed, device, position

    @contextlib.contextmanager
    def shared(self, name: str) -> Iterator[None]:
        """Draw the numbers of all ranks in the block; one within another draws from the outer one's."""
        if self._position is None or self._own is not None:
            yield
            return
        seed = self._seed_of(name, self._position())
        self._own = _Stream(self._device)
        try:
            with self._numpy_apart():
                seed_process(seed, self._device)
                yield
        finally:
            own, self._own = self._own, None
            own.resume()

    @contextlib.contextmanager
    def own(self) -> Iterator[None]:
        """Draw this rank's numbers in the block, also within one of `shared`."""
        if self._own is None:
            yield
            return
        shared, own = _Stream(self._device), self._own
        self._own = None
        own.resume()
        try:
            yield
        finally:
            self._own = _Stream(self._device)
            shared.resume()

    def own_state(self, device: torch.device) -> dict[str, Any]:
        """Return the state of this rank's stream, as `get_random_state` does."""
        return get_random_state(device) if self._own is None else self._own.saved()

    @contextlib.contextmanager
    def _numpy_apart(self) -> Iterator[None]:
        """Give NumPy, if it is loaded, a bit generator for the block; to make one takes 0.1 ms."""
        if (numpy := sys.modules.get("numpy")) is None:
            yield
            return
        spare = self._spare.pop() if self._spare else numpy.random.MT19937(0)
        numpy.random.set_bit_generator(spare)
        try:
            yield
        finally:
            self._spare.append(spare)

    def _seed_of(self, name: str, position: Sequence[int]) -> int:
        """Return the seed of the next block of a name."""
        if position != self._counted:
            self._counted, self._counts = position, {}
        number = self._counts[name] = self._counts.get(name, 0) + 1
        text = int.from_bytes(name.encode(), "big")
        return mixed_seed(self._seed, *position, text, number)


def _begin() -> dict[str, Any]:
    """Return the random state with which the program begins to use rankwise."""
    # a script that is run again takes the main process's state, so that both split their data alike
    if start.main_random_state is not None:
        set_random_state(start.main_random_state(), _CPU)
    return get_random_state(_CPU)


AT_IMPORT = _begin()
"""The random state of this program when it imported this module."""
