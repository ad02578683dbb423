"""What does not change within a stage is decided when it begins; what a program may change counts at once."""

import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from torch import Tensor
from typing_extensions import override

from rankwise.callbacks import LambdaCallback
from rankwise.strategies import SingleDeviceStrategy
from tests.unit.trainer.helpers import Line, fitted, loader, trainer

CALLS = 86  # of rankwise's functions, for a step of one process that logs nothing


class Silent(Line):
    """Logs nothing."""

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)


def test_calls_of_a_step(tmp_path: Path) -> None:
    """A step takes few calls; their number does not depend on the load of the machine."""
    calls: list[str] = []
    before = sys.getprofile()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_globals.get("__name__", "").startswith("rankwise."):
            calls.append(frame.f_code.co_name)

    class Counted(Silent):
        @override
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            sys.setprofile(note if batch_idx == 5 else before)  # until the same place of the next step
            return super().training_step(batch, batch_idx)

    try:
        trainer(tmp_path).fit(Counted(), loader(16))
    finally:
        sys.setprofile(before)
    assert 20 < len(calls) <= CALLS, sorted(calls)


def test_a_callback_added_within_a_step(tmp_path: Path) -> None:
    """A callback that is appended to the list counts from the next hook on."""
    seen: list[str] = []
    added = LambdaCallback(on_after_backward=lambda _, module: seen.append(f"after {module.seen[-1]}"))

    class Adding(Silent):
        @override
        def on_before_backward(self, loss: Tensor) -> None:
            self.seen.append(f"backward {self.global_step}")
            if self.global_step == 1:
                self.trainer.callbacks.append(added)

    trainer(tmp_path).fit(Adding(), loader(6))
    assert seen == ["after backward 1", "after backward 2"]


def test_a_step_assigned_within_an_epoch(tmp_path: Path) -> None:
    """A `training_step` that is assigned to the module runs from the next batch on."""

    class Changing(Silent):
        @override
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.training_step = self.other_step  # type: ignore[method-assign]

        def other_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen.append(f"other {batch_idx}")
            return self.loss(batch)

    model = Changing()
    trainer(tmp_path).fit(model, loader(6))
    assert model.seen == ["other 1", "other 2"]


@pytest.mark.parametrize("size", [1, 2])
def test_windows_changed_within_an_epoch(tmp_path: Path, size: int) -> None:
    """Another length of accumulation windows counts from the next batch on, with its weights."""
    seen: list[int] = []

    class Changing(Silent):
        @override
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                self.trainer.accumulate_grad_batches = 3 - size
            seen.append(self.global_step)

        @override
        def on_before_backward(self, loss: Tensor) -> None:
            self.seen.append(f"{float(loss.detach() / self.last):g}")

        @override
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.last = self.loss(batch).detach() + 1
            return self.loss(batch) + 1

    model = Changing()
    trainer(tmp_path, accumulate_grad_batches=size).fit(model, loader(8))
    whole, half = ["1"] * 2, ["0.5"] * 2
    assert model.seen == (whole + half if size == 1 else half + whole)
    assert seen == ([1, 2, 2, 3] if size == 1 else [0, 1, 2, 3])


class OwnBlock(SingleDeviceStrategy):  # type: ignore[misc]  # one that differs from the real one in this alone
    """One process, with its own block for a batch."""

    entered = 0

    @override
    def gradient_sync_context(self, *args: Any, **options: Any) -> AbstractContextManager[None]:
        self.entered += 1
        return nullcontext()


def test_a_strategy_with_its_own_block(tmp_path: Path) -> None:
    """A strategy's own `gradient_sync_context` is entered for each batch, also on one rank."""
    train = fitted(tmp_path, Silent(), loader(6), strategy=OwnBlock(accelerator="cpu", devices=1))
    assert isinstance(train.strategy, OwnBlock)
    assert train.strategy.entered == 3
