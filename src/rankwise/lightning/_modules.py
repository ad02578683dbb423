"""Modules of Lightning's: further names of those here, and names and modules that do not exist here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from rankwise.errors import MissingNameError

_NO_LIGHTNING_CLI = "build the Trainer in code; jsonargparse's CLI, Hydra and argparse can call it."
_MODEL_SHARDING = 'Trainer(strategy="ddp"): models that are split over devices are out of scope.'
_DEVICES = 'rankwise trains on CPUs and CUDA devices: Trainer(accelerator="cpu") or "cuda".'
_SHORT_FITS = "try batch sizes in short fits: Trainer(max_steps=3)."
_TUNER = f"LearningRateFinder().lr_find(trainer, model, loader); {_SHORT_FITS}"
_NOT_PUBLIC = "use the hooks of the module, its callbacks and the strategy, which are public."

_MISSING_MODULES: Mapping[str, str] = {
    "accelerators": _DEVICES,
    "cli": _NO_LIGHTNING_CLI,
    **dict.fromkeys(("demos", "demos.boring_classes"), "write the module in your script."),
    **dict.fromkeys(("loops", "overrides"), _NOT_PUBLIC),
    **dict.fromkeys(("tuner", "tuner.tuning"), _TUNER),
    "serve": "serve the module with a server of your choice; it is a torch.nn.Module.",
}
"""Modules of Lightning's without a counterpart, and what to do."""

_MISSING_NAMES: Mapping[str, str] = {
    **_MISSING_MODULES,
    "LightningCLI": _NO_LIGHTNING_CLI,
    "Tuner": _TUNER,
    "BatchSizeFinder": _SHORT_FITS,
    **dict.fromkeys(("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy"), _MODEL_SHARDING),
    **dict.fromkeys(("FSDPPrecision", "DeepSpeedPrecision"), _MODEL_SHARDING),
    **dict.fromkeys(("XLAPrecision", "XLAEnvironment", "XLACheckpointIO", "XLAProfiler"), _DEVICES),
    **dict.fromkeys(("LayerSync", "TorchSyncBatchNorm"), "Trainer(sync_batchnorm=True)."),
    **dict.fromkeys(("CometLogger", "LitLogger"), "derive from Logger, or use another logger."),
    "DataParallelStrategy": 'Trainer(strategy="ddp").',
    "ParallelStrategy": "derive from Strategy, or from DDPStrategy.",
    "BitsandbytesPrecision": "quantise the layers in configure_model().",
    "TransformerEnginePrecision": 'Trainer(precision="bf16-mixed").',
    "Checkpoint": "derive from Callback, or use ModelCheckpoint.",
    "ModelPruning": "torch.nn.utils.prune in a hook of the module.",
    "OnExceptionCheckpoint": "trainer.save_checkpoint(path) in Callback.on_exception.",
    "SpikeDetection": 'Trainer(on_nonfinite="skip"), or a callback of your own.',
    "RichModelSummary": "ModelSummary.",
    "MisconfigurationException": "rankwise.errors.ConfigurationError.",
    "SIGTERMException": "except SystemExit.",
    "measure_flops": "torch.utils.flop_counter.FlopCounterMode.",
    "GradClipAlgorithmType": 'the strings "norm" and "value".',
    "LightningEnum": "enum.Enum.",
    "is_picklable": "pickle.dumps(value), which raises.",
    "set_shared_parameters": "assign one parameter to both layers in configure_model().",
    "is_shared_filesystem": "leave it out, or ask the file system.",
    "find_shared_parameters": "torch.nn.Module.named_parameters(remove_duplicate=False).",
    "suggested_max_num_workers": "give num_workers yourself, for example 4.",
    "disable_possible_user_warnings": "warnings.filterwarnings of Python.",
}
"""Names of Lightning's without a counterpart, and what to do."""

_ELSE = "docs/from_lightning.md lists the names that exist."


def missing_name(module: str, name: str) -> Exception:
    """Return the error for a name that a module here lacks.

    Special names and private ones, and what pytest looks for, are an ordinary `AttributeError`, so that
    `hasattr` and the import system work. Other errors than that reach the user from `from module import name`
    with their text.
    """
    if name.startswith(("_", "pytest")):
        return AttributeError(f"module {module!r} has no attribute {name!r}")
    return MissingNameError(module=module, name=name, remedy=_MISSING_NAMES.get(name, _ELSE))


def refuse_missing_names(module: str) -> Callable[[str], Any]:
    """Return a module's `__getattr__`, which raises `missing_name`."""

    def refuse(name: str) -> Any:
        raise missing_name(module, name)

    return refuse


def add_other_names(module: str, *names: str) -> None:
    """Make a module importable as submodules of itself, as which Lightning has parts of it."""
    this = sys.modules[module]
    for name in names:
        sys.modules[f"{module}.{name}"] = this
        setattr(this, name, this)


def add_submodules(module: str, *parts: ModuleType) -> None:
    """Make modules, and their other names, importable as submodules of another, too."""
    for part in parts:
        own = part.__name__
        here = f"{module}.{own.rpartition('.')[2]}"
        names = [name for name in sys.modules if name == own or name.startswith(f"{own}.")]
        for name in names:
            sys.modules[here + name.removeprefix(own)] = sys.modules[name]


def add_missing_modules(package: str) -> None:
    """Make Lightning's modules that do not exist here importable; all of their names are refused."""
    for prefix in (package, f"{package}.pytorch"):
        for name, remedy in _MISSING_MODULES.items():
            sys.modules[f"{prefix}.{name}"] = _MissingModule(f"{prefix}.{name}", remedy)


class _MissingModule(ModuleType):
    """A module of Lightning's that does not exist here."""

    def __init__(self, name: str, remedy: str) -> None:
        super().__init__(name, remedy)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise MissingNameError(module=self.__name__, name=name, remedy=self.__doc__ or "")
