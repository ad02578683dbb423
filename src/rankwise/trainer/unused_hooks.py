"""Hooks of Lightning that this package does not call: a module or callback that defines one is refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from rankwise.errors import ConfigurationError

if TYPE_CHECKING:
    from rankwise.callbacks import Callback
    from rankwise.trainer.module import TrainingModule

_BY_HAND = "self.automatic_optimization = False, and step by hand in training_step."
_SCHEDULER = f'a scheduler with interval="step" in configure_optimizers, or {_BY_HAND}'
_BATCH = "change the batch in training_step, or override batch_to_device(batch) of the strategy."
_MODES = "call eval() and train() in other hooks: the Trainer keeps the modes of modules that are frozen."
_REPLACEMENTS: Mapping[str, str] = {
    "optimizer_step": _SCHEDULER,
    "optimizer_zero_grad": _BY_HAND,
    "lr_scheduler_step": _SCHEDULER,
    "backward": _BY_HAND,
    "configure_gradient_clipping": "Trainer(gradient_clip_val=...), or clip in on_before_optimizer_step.",
    "on_before_batch_transfer": _BATCH,
    "transfer_batch_to_device": _BATCH,
    "on_after_batch_transfer": _BATCH,
    "configure_callbacks": "Trainer(callbacks=[...]).",
    "configure_model": "setup(stage).",
    "configure_sharded_model": "setup(stage).",
    "get_progress_bar_dict": "self.log(name, value, prog_bar=True).",
    "tbptt_split_batch": _BY_HAND,
    **{
        f"{kind}_step_end": f"the end of {kind}_step: each process has one device."
        for kind in ("training", "validation", "test")
    },
    "training_epoch_end": "on_train_epoch_end(); collect what it needs in training_step.",
    "validation_epoch_end": "on_validation_epoch_end(); collect what it needs in validation_step.",
    "test_epoch_end": "on_test_epoch_end(); collect what it needs in test_step.",
    "on_epoch_start": "on_train_epoch_start.",
    "on_epoch_end": "on_train_epoch_end.",
    "on_batch_start": "on_train_batch_start.",
    "on_batch_end": "on_train_batch_end.",
    "on_pretrain_routine_start": "on_fit_start.",
    "on_pretrain_routine_end": "on_fit_start.",
    "on_hpc_save": "on_save_checkpoint.",
    "on_hpc_load": "on_load_checkpoint.",
    **{
        f"on_{kind}_model_{mode}": _MODES
        for kind in ("validation", "test", "predict")
        for mode in ("eval", "train", "zero_grad")
    },
}
_IN_THE_MODULE = "define it in the module; callbacks have on_train_batch_start and on_train_batch_end."
_REPLACEMENTS_IN_CALLBACKS: Mapping[str, str] = {
    **{name: remedy for name, remedy in _REPLACEMENTS.items() if name.startswith("on_")},
    "on_before_zero_grad": _IN_THE_MODULE,
    "on_before_backward": _IN_THE_MODULE,
    "on_after_backward": _IN_THE_MODULE,
    "on_before_optimizer_step": _IN_THE_MODULE,
    "on_sanity_check_start": "leave it out: no validation runs before training.",
    "on_sanity_check_end": "leave it out: no validation runs before training.",
    "on_init_start": "setup(trainer, module, stage).",
    "on_init_end": "setup(trainer, module, stage).",
    "on_keyboard_interrupt": "on_exception.",
}


def check_hooks(module: TrainingModule, callbacks: Iterable[Callback]) -> None:
    """Raise ConfigurationError for a hook that would never be called."""
    _check(module, _REPLACEMENTS)
    for callback in callbacks:
        _check(callback, _REPLACEMENTS_IN_CALLBACKS)


def check_no_skipping(module: TrainingModule, returned: object) -> None:
    """Refuse -1 from the module's `on_train_batch_start`, which ends the epoch in Lightning."""
    if isinstance(returned, int) and returned == -1:
        raise ConfigurationError(
            message=f"{type(module).__name__}.on_train_batch_start() has returned -1, which ends no epoch.",
            remedy="return None; limit_train_batches, or a shorter sampler, makes epochs shorter.",
        )


def _check(owner: object, replacements: Mapping[str, str]) -> None:
    for name, remedy in replacements.items():
        if callable(getattr(type(owner), name, None)) or callable(vars(owner).get(name)):
            raise ConfigurationError(
                message=f"{type(owner).__name__}.{name}() would never be called.",
                facts="it has the name of a hook that rankwise does not have.",
                remedy=f"{remedy} A method that is no hook needs another name.",
            )
