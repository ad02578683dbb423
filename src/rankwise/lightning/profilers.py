"""Names of `lightning.pytorch.profilers`."""

from rankwise.lightning._modules import add_other_names, refuse_missing_names
from rankwise.profilers import (
    AdvancedProfiler,
    PassThroughProfiler,
    Profiler,
    PyTorchProfiler,
    SimpleProfiler,
)

__all__ = ["AdvancedProfiler", "PassThroughProfiler", "Profiler", "PyTorchProfiler", "SimpleProfiler"]

__getattr__ = refuse_missing_names(__name__)
add_other_names(__name__, "advanced", "profiler", "pytorch", "simple")
