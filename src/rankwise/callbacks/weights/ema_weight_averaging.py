"""`EMAWeightAveraging`: the exponential moving average of the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from rankwise.callbacks.weights.weight_averaging import WeightAveraging
from rankwise.checks import check_keywords, check_value

if TYPE_CHECKING:
    import torch

_REMEDIES = dict.fromkeys(("avg_fn", "multi_avg_fn"), "WeightAveraging, which takes it.")
_ARGUMENTS = (
    "device",
    "use_buffers",
    "decay",
    "update_every_n_steps",
    "update_starting_at_step",
    "update_starting_at_epoch",
)


@final
class EMAWeightAveraging(WeightAveraging):
    """Average weights exponentially: `average = decay * average + (1 - decay) * weights`.

    Args:
        device: where the average is; by default where the module is.
        use_buffers: average the buffers too.
        decay: from 0 to 1; how much of the average an update keeps.
        update_every_n_steps: update after every n-th optimizer step; 0 for never.
        update_starting_at_step: the first step that is averaged, counted from 0; None for all.
        update_starting_at_epoch: update after each epoch from this one on, too; None for never.

    Raises:
        InvalidArgumentError: for a `decay` outside of 0 to 1, or a negative number.
        UnknownArgumentError: for other keywords.
    """

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
        decay: float = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None,
        update_starting_at_epoch: int | None = None,
        **kwargs: Any,
    ) -> None:
        check_value("decay", decay, 0.0 <= decay <= 1.0, "a number from 0 to 1")
        for name, number in (
            ("update_every_n_steps", update_every_n_steps),
            ("update_starting_at_step", update_starting_at_step),
            ("update_starting_at_epoch", update_starting_at_epoch),
        ):
            check_value(name, number, number is None or number >= 0, "0 or more")
        check_keywords("EMAWeightAveraging", kwargs, _ARGUMENTS, _REMEDIES)
        super().__init__(device=device, use_buffers=use_buffers)
        self.decay = decay
        self.update_every_n_steps = update_every_n_steps
        self.update_starting_at_step = update_starting_at_step
        self.update_starting_at_epoch = update_starting_at_epoch

    def _arguments(self) -> dict[str, Any]:
        from torch.optim.swa_utils import get_ema_multi_avg_fn

        return {"multi_avg_fn": get_ema_multi_avg_fn(self.decay)}

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        if step_idx is not None:
            is_in_time = step_idx >= (self.update_starting_at_step or 0)
            return is_in_time and self.update_every_n_steps > 0 and step_idx % self.update_every_n_steps == 0
        first = self.update_starting_at_epoch
        return first is not None and epoch_idx is not None and epoch_idx >= first
