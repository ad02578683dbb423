"""Names of `lightning.pytorch.profilers`."""

from rankwise.lightning._modules import complete_module
from rankwise.profilers import (
    AdvancedProfiler,
    PassThroughProfiler,
    Profiler,
    PyTorchProfiler,
    SimpleProfiler,
)

__all__ = ["AdvancedProfiler", "PassThroughProfiler", "Profiler", "PyTorchProfiler", "SimpleProfiler"]

__getattr__ = complete_module(__name__)
