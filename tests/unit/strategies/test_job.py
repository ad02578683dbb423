"""What a job changes in its process, and what it leaves as it is."""

import signal
from contextlib import ExitStack

import pytest
import torch
import torch.distributed as dist

from rankwise.checkpoint import AsyncCheckpointIO
from rankwise.errors import InvalidArgumentError, InvalidTypeError
from rankwise.process_group.interception import intercepted
from rankwise.strategies import AutoStrategy, DDPStrategy
from rankwise.strategies.job import sigterm_deferred
from tests.helpers.own_process import signal_handled


@pytest.mark.parametrize(
    ("given", "variable", "expected"),
    [(None, "", False), (None, "1", True), (None, "0", False), (False, "1", False), (True, "0", True)],
)
def test_the_argument_beats_the_variable(
    monkeypatch: pytest.MonkeyPatch, given: bool | None, variable: str, expected: bool
) -> None:
    """Without the argument RANKWISE_CHECK_COLLECTIVES decides; a wrong value of either is said at once."""
    monkeypatch.setenv("RANKWISE_CHECK_COLLECTIVES", variable)
    assert DDPStrategy(check_collectives=given).check_collectives is expected
    with pytest.raises(InvalidTypeError, match="check_collectives='yes' is of type str"):
        DDPStrategy(check_collectives="yes")  # type: ignore[arg-type]  # what the test is about
    monkeypatch.setenv("RANKWISE_CHECK_COLLECTIVES", "yes")
    with pytest.raises(InvalidArgumentError, match="RANKWISE_CHECK_COLLECTIVES='yes' is not possible"):
        DDPStrategy()


def methods_are(strategy: DDPStrategy, methods: dict[str, object]) -> bool:
    """Return whether torch's methods in the job are these."""
    return dict(vars(dist.ProcessGroup)) == methods


def test_off_touches_nothing() -> None:
    """In a job without the check torch's own methods are in place, and after blocks with it again."""
    methods = dict(vars(dist.ProcessGroup))
    strategy = AutoStrategy(accelerator="cpu", devices=1)
    assert strategy.launch(methods_are, methods)
    with intercepted(lambda call: None):
        assert vars(dist.ProcessGroup)["allreduce"] is not methods["allreduce"]
    assert dict(vars(dist.ProcessGroup)) == methods
    first, second = ExitStack(), ExitStack()  # as those of two threads: after the last all is put back
    first.enter_context(intercepted(lambda call: None))
    second.enter_context(intercepted(lambda call: None))
    first.close()
    assert dict(vars(dist.ProcessGroup)) != methods
    second.close()
    assert dict(vars(dist.ProcessGroup)) == methods


def test_threads_are_as_before() -> None:
    """The caller has its number of torch's threads back, whatever the function has set."""
    before = torch.get_num_threads()
    AutoStrategy(accelerator="cpu", devices=1).launch(lambda _: torch.set_num_threads(before + 1))
    assert torch.get_num_threads() == before


def test_a_handler_of_sigterm_stays() -> None:
    """A checkpoint that is being written defers SIGTERM only where it would end the process."""

    def handler(number: int, frame: object) -> None:
        pass

    with signal_handled(signal.SIGTERM, handler), sigterm_deferred(AsyncCheckpointIO()):
        assert signal.getsignal(signal.SIGTERM) is handler
