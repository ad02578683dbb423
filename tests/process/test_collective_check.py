"""`check_collectives=True`: ranks that call different collectives all get an error with each rank's call."""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rankwise.errors import WorkerRaisedError, WorkerTimedOutError
from tests.process.check_tasks import (
    buckets,
    come_late,
    every_collective,
    in_sections,
    leave_early,
    mismatches,
    no_mismatches,
    sends_among_collectives,
)
from tests.process.helpers import RENDEZVOUS, ddp
from tests.process.training_tasks import Regression, loader, quiet_trainer


def results_of(function: Any, rendezvous: str = "private", **arguments: Any) -> list[Any]:
    """Return what each of two ranks returned."""
    strategy = ddp("fork", rendezvous, **{"check_collectives": True, "timeout": 30.0, **arguments})
    strategy.launch(function)
    return [strategy.results[rank] for rank in range(2)]


MISTAKES = {
    "kind": (r"broadcast of float32\[4\] \(root 0\)", r"all_reduce of float32\[4\] \(sum\)"),
    "shape": (r"all_reduce of float32\[3\] \(sum\)", r"all_reduce of float32\[4\] \(sum\)"),
    "dtype": (r"all_reduce of float32\[2\] \(sum\)", r"all_reduce of int64\[2\] \(sum\)"),
    "operation": (r"all_reduce of float32\[4\] \(sum\)", r"all_reduce of float32\[4\] \(max\)"),
    "root": (r"broadcast of float32\[4\] \(root 0\)", r"broadcast of float32\[4\] \(root 1\)"),
    "by its own name": (r"all_reduce of float32\[4\] \(sum\)", "barrier"),
    "objects": (r"all_gather_object of (?:2 x int64\[1\]|int64\[2\])", "barrier"),
    "many": (
        r"all_gather of float32\[0\], float32\[1\], float32\[2\], \.\.\. \(6 tensors, 15 elements\)",
        "barrier",
    ),
    "order": (r"all_reduce of float32\[4\] \(sum\)", r"all_reduce of float32\[4\] \(sum\)"),
    "subgroup": (r"all_reduce of float32\[1\] \(sum\)", r"all_reduce of float32\[2\] \(sum\)"),
}


@pytest.mark.parametrize("rendezvous", RENDEZVOUS)
def test_a_mismatch_is_an_error_on_every_rank(rendezvous: str) -> None:
    """Both ranks get one text: what each called, and where; nothing was sent, so a rank can continue."""
    messages, others = results_of(mismatches, rendezvous)
    assert messages == others
    assert messages.pop("afterwards") == "no error: [2.0, 2.0, 2.0, 2.0]"
    assert set(messages) == set(MISTAKES)
    place = r" at check_tasks\.py:(\d+) in <lambda>\n"
    for mistake, (zeros, ones) in MISTAKES.items():
        expected = rf"  Seen: global_rank 0: {zeros}{place} +global_rank 1: {ones}{place}"
        found = re.search(expected, messages[mistake])
        assert found is not None, messages[mistake]
        assert (found[1] != found[2]) == (mistake == "order")


@pytest.mark.parametrize("rendezvous", RENDEZVOUS)
def test_what_is_right_stays_right(rendezvous: str) -> None:
    """Different branches for the root, several groups and asynchronous work give no error."""
    assert results_of(no_mismatches, rendezvous) == [[[1.0, 1.0], [1.0, 1.0]], [[2.0, 2.0], [1.0, 1.0]]]


def test_sends_are_let_alone() -> None:
    """Point-to-point messages arrive; they are not compared and do not count as collectives."""
    mistakes = []
    for rank, (came, mistake) in enumerate(results_of(sends_among_collectives)):
        assert came == [3.0, 3.0, *[2.0 - rank] * 6, 5.0]
        mistakes.append(mistake)
    assert mistakes[0] == mistakes[1]
    assert "collective number 4 of all ranks" in mistakes[0]


def test_gradients_meet_something_else() -> None:
    """DDP's own communication is compared too, in the first, the second and the third step."""
    bucket = r"all_reduce of float32\[8\] \(sum\) in the backward pass"
    for texts in results_of(buckets):
        calls = (bucket, "forward pass of DistributedDataParallel", bucket)
        for text, call in zip(texts, calls, strict=True):
            assert re.search(rf"global_rank 0: {call} at check_tasks.py:\d+ in step\n", text), text
            assert "global_rank 1: all_reduce of float32[8] (sum) at check_tasks.py" in text


@pytest.mark.parametrize("from_subgroup", [False, True])
def test_a_rank_that_has_left(from_subgroup: bool) -> None:
    """A rank in a collective gets an error as soon as another rank has returned."""
    call = r"global_rank 1: all_reduce of float32\[1\] \(sum\) at .* in leave_early"
    with pytest.raises(WorkerRaisedError, match=call) as caught:
        ddp("fork", check_collectives=True).launch(leave_early, from_subgroup=from_subgroup)
    assert caught.value.exception_type == "CollectiveMismatchError"
    assert "global_rank 0: the end of what was launched" in str(caught.value)


def test_a_rank_that_does_not_come() -> None:
    """After the timeout the error names the missing rank and its last call."""
    with pytest.raises(WorkerTimedOutError) as caught:
        results_of(come_late, timeout=3.0)
    assert caught.value.missing == (1,)
    assert "Waited 3 s for global_rank 1 in collective number 2 of all ranks" in str(caught.value)
    assert re.search(
        r"global_rank 0: barrier at check_tasks.py:\d+ in come_late\n"
        r" +global_rank 1 did not come; last seen: all_reduce of float32\[2\] \(sum\) at check_tasks.py:\d+",
        str(caught.value),
    )


def test_training_is_the_same_with_the_check() -> None:
    """A fit with validation and logging gives the same weights, bit for bit."""
    weights = []
    for is_checked in (False, True):
        module = Regression()
        trainer = quiet_trainer(ddp("fork", check_collectives=is_checked), 2, max_epochs=2)
        trainer.fit(module, loader(23, 4, shuffle=True), loader(9, 4))
        weights.append(module.state_dict())
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0)


@pytest.mark.parametrize("is_checked", [False, True])
def test_collectives_in_a_section_of_rank_zero(is_checked: bool) -> None:
    """In a section of rank zero a collective is an error that names the call, torch's own included."""
    found, others = results_of(in_sections, check_collectives=is_checked)
    assert others == {}
    ours = "barrier was called in state 'in the block of rank_zero_first()"
    expected = {"ours in a block": ours, "ours in a node's block": ours}
    expected["torch's in a block"] = "all_reduce of float32[2] (sum) at check_tasks.py"
    if is_checked:
        expected["torch's in a function"] = "was called in state 'in a function that only rank zero runs'"
    assert set(found) == set(expected)
    for name, text in expected.items():
        assert text in found[name]


def test_every_collective_of_torch_is_seen() -> None:
    """Each collective is recorded under the name that the user called."""
    methods = dict(vars(dist.ProcessGroup))
    for found in results_of(every_collective, check_collectives=False):
        for name, calls in found.items():
            assert calls, name
            assert name == "single" or {call.split(" ")[0] for call in calls} == {name}, calls
    assert dict(vars(dist.ProcessGroup)) == methods
