"""Values of other processes have the type that is asked for, or the error says where they were."""

import dataclasses
import json
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from rankwise.errors import ProcessGroupError
from rankwise.ranks import RankInfo
from rankwise.stores.rendezvous import RankIdentity, run_rendezvous
from rankwise.stores.values import decoded, read_value


@dataclasses.dataclass
class Outer:
    ranks: RankInfo
    seconds: float
    names: tuple[str, ...] = ()
    address: tuple[str, int] | None = None


OUTER = Outer(RankInfo(1, 1, 0, 2, 2, 1), 0.5, ("a", "b"), ("host", 29400))


def test_a_dataclass_comes_back() -> None:
    """With dataclasses, tuples and None in it; a whole number is a float where one is needed."""
    text = json.dumps(dataclasses.asdict(OUTER))
    assert decoded(Outer, text, "x") == OUTER
    assert decoded(Outer, '{"ranks": {}, "seconds": 1}', "x") == Outer(RankInfo(), 1.0)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        *((int, "true"), (int, "1.5"), (int, "9" * 5000), (float, "1" + "0" * 400), (str, "null")),
        *((str, "[" * 100_000), (list[int], '[1, "2"]'), (tuple[int, str], '[1, "2", 3]')),
        *((dict[str, str], '{"a": 1}'), (Outer, "{}")),
        (Outer, '{"ranks": {"global_rank": 5}, "seconds": 1}'),
        *((Outer, '{"ranks": {}, "seconds": 1, "future": 1}'), (int, b"\xff"), (int, "")),
    ],
    ids=lambda value: str(value)[:20],
)
def test_other_values_are_refused(kind: Any, text: str | bytes) -> None:
    """The error has the place and the start of the value."""
    with pytest.raises(ProcessGroupError, match=r"read as the value of 'key' in the job's store") as caught:
        store: Any = dist.HashStore()
        store.set("key", text)
        read_value(store, "key", kind)
    assert len(str(caught.value)) < 1000


def test_identities_of_other_ranks_are_refused() -> None:
    """What the last rank publishes has to have every rank of the job once."""
    own = RankIdentity(0, 0, 0, 2, "host", 7)
    for ranks in ((0,), (0, 0), (0, 2), (0, 1, 2)):
        identities = [dataclasses.asdict(dataclasses.replace(own, global_rank=rank)) for rank in ranks]
        store = dist.HashStore()
        store.set("met", json.dumps(["", identities]))
        with pytest.raises(ProcessGroupError, match="not the 2 ranks of this job"):
            run_rendezvous(store, own, timedelta(seconds=1))
