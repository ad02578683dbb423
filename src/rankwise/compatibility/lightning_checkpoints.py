"""Read the state of a fit from a checkpoint that Lightning has written, in any version since 2.0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from rankwise.checkpoint.base import restored_from
from rankwise.errors import CheckpointError

LIGHTNING_VERSION = "2.6.0"
"""Checkpoints of this library have what `load_from_checkpoint` of this version of Lightning needs."""

# Under one of these keys Lightning saves the state of its loss scaling: since 2.1, and in 2.0.
_SCALERS = ("MixedPrecision", "MixedPrecisionPlugin")


def is_lightning_checkpoint(checkpoint: Mapping[str, Any]) -> bool:
    """Return whether Lightning's Trainer has written a checkpoint, during or after a fit."""
    loops = checkpoint.get("loops")
    return isinstance(loops, Mapping) and "fit_loop" in loops


@final
class LightningState:
    """The state with which a fit continues; `left_out` describes what cannot be restored.

    `counted_steps`, the step number for loggers, is the number of batches that have ended with a step;
    `epoch` is the epoch to begin next, and `total_batches` the number of batches in the epochs before it.
    """

    def __init__(self, checkpoint: Mapping[str, Any], path: str) -> None:
        if missing := [name for name in ("optimizer_states", "lr_schedulers") if name not in checkpoint]:
            raise CheckpointError(
                path=path,
                problem=f"holds no {missing}, without which training cannot continue",
                remedy=f"load_from_checkpoint({path!r}) loads its weights; then fit without ckpt_path.",
            )
        self.path = path
        self.optimizers: list[Any] = checkpoint["optimizer_states"]
        self.schedulers: list[Any] = checkpoint["lr_schedulers"]
        self.scaler: dict[str, Any] = next((checkpoint[key] for key in _SCALERS if key in checkpoint), {})
        with restored_from(path, "counters"):
            self.global_step = _count(checkpoint["global_step"])
            fit_loop = checkpoint["loops"]["fit_loop"]
            counted = fit_loop.get("epoch_loop.state_dict", {}).get("_batches_that_stepped", self.global_step)
            self.counted_steps = _count(counted)
            epochs = fit_loop["epoch_progress"]["current"]
            begun, ended = _count(epochs["ready"]), _count(epochs["processed"])
            batches = fit_loop["epoch_loop.batch_progress"]
            is_within_epoch = ended < begun and not batches["is_last_batch"]
            self.epoch = begun - is_within_epoch
            done = _count(batches["current"]["ready"])
            self.total_batches = _count(batches["total"]["ready"]) - done * is_within_epoch
        self.left_out = [f"the state of {name}" for name in map(str, checkpoint.get("callbacks", {}))]
        if is_within_epoch:
            self.left_out.append(f"the position after batch {done} of epoch {self.epoch}, which begins again")


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a number of steps or epochs")
    return value
