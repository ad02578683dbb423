"""Callbacks that log what no module logs: learning rates, the use of devices, throughput."""

from rankwise.callbacks.monitors.device_stats_monitor import DeviceStatsMonitor
from rankwise.callbacks.monitors.learning_rate_monitor import LearningRateMonitor
from rankwise.callbacks.monitors.throughput_monitor import ThroughputMonitor

__all__ = ["DeviceStatsMonitor", "LearningRateMonitor", "ThroughputMonitor"]
