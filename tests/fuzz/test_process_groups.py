"""Damaged codes, objects and descriptions of tensors, as they come in collectives."""

from random import Random

import pytest
import torch

from rankwise.errors import PeerAuthenticationError
from rankwise.process_group.authentication import GroupKey
from rankwise.process_group.collectives import Description, describe
from rankwise.process_group.objects import _opened, _sealed
from rankwise.stores.sealed import CODE_BYTES
from tests.fuzz.inputs import Fuzzing, damaged


class Unpickled:
    """An object whose unpickling is noticed."""

    count = 0

    def __setstate__(self, state: object) -> None:
        Unpickled.count += 1


def key(rank: int = 0) -> GroupKey:
    return GroupKey(b"secret", rank, 2)


def as_tensor(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


def test_codes(fuzzing: Fuzzing) -> None:
    """Whoever sends another code, or none, is found."""
    sent = b"".join(key(rank).codes_to_peers(1)[CODE_BYTES:] for rank in range(2))
    assert not key(1).impostors(sent, 1)

    def parse(random: Random) -> None:
        received = damaged(random, sent)
        assert key(1).impostors(received, 1) or received.startswith(sent)

    assert fuzzing.run(parse) == fuzzing.count


def test_objects(fuzzing: Fuzzing) -> None:
    """Nothing is unpickled unless it is what the rank has sent."""
    value = Unpickled()
    vars(value)["state"] = 1  # otherwise there is nothing to set
    sent = bytes(_sealed(value, key()).tolist())

    def parse(random: Random) -> None:
        before, message, receiver = Unpickled.count, damaged(random, sent), key(1)
        receiver.begin_collective()
        if message == sent:
            _opened(as_tensor(message), receiver, 0)
            return
        with pytest.raises(PeerAuthenticationError):
            _opened(as_tensor(message), receiver, 0)
        assert Unpickled.count == before

    assert fuzzing.run(parse) == fuzzing.count


def test_descriptions_of_tensors(fuzzing: Fuzzing) -> None:
    """A message of fixed size describes a tensor, or it is our error."""
    plain = [describe(torch.ones(2, 3)), describe(torch.tensor(5)), describe("text"), describe(torch.ones(0))]

    def parse(random: Random) -> None:
        message = random.choice(plain).clone()
        numbers = message.view(torch.int64)
        for _ in range(random.randrange(1, 4)):
            place = random.randrange(5 if random.random() < 0.8 else len(numbers))
            numbers[place] = random.choice((0, 1, -1, 2, 4, 24, 1 << 40, -(1 << 63), (1 << 63) - 1))
        description = Description(message)
        assert isinstance(str(description), str)
        if description.dtype is not None and description.num_bytes <= 4096:
            assert description.tensor().nbytes == description.num_bytes

    assert 0 < fuzzing.run(parse) < fuzzing.count
