"""What `DeviceStatsMonitor` and `ThroughputMonitor` log."""

from pathlib import Path
from threading import Event

import pytest

from rankwise.callbacks import Callback, DeviceStatsMonitor, ThroughputMonitor
from rankwise.errors import ConfigurationError, InvalidArgumentError, InvalidTypeError, MissingExtraError
from tests.helpers.raising import raises
from tests.unit.trainer.helpers import Line, Recording, fitted, loader, without_package


def logged(folder: Path, callback: Callback, module: Line) -> list[tuple[int | None, dict[str, float]]]:
    """Return what a callback logs in a fit, with the steps."""
    logger = Recording()
    fitted(folder, module, loader(), loader(), callbacks=callback, logger=logger, log_every_n_steps=2)
    return [(step, metrics) for step, metrics in logger.metrics if "epoch" not in metrics]


def test_device_stats(tmp_path: Path) -> None:
    """The CPU's are logged around the steps that are logged."""
    pytest.importorskip("psutil")
    found = logged(tmp_path, DeviceStatsMonitor(), Line())
    assert [step for step, _ in found] == [1, 1, 3, 3]
    assert set(found[0][1]) == {
        f"DeviceStatsMonitor.on_train_batch_start/{name}"
        for name in ("cpu_percent", "cpu_vm_percent", "cpu_swap_percent")
    }
    assert all(0 <= value <= 100 for _, values in found for value in values.values())
    assert logged(tmp_path, DeviceStatsMonitor(cpu_stats=False), Line()) == []


def test_device_stats_need_psutil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it they are refused before training, and the error names the extra."""
    without_package(monkeypatch, "psutil")
    raises(MissingExtraError, r"rankwise\[stats\]", logged, tmp_path, DeviceStatsMonitor(), Line())


class WithFlops(Line):
    flops_per_batch = 10


def test_throughput(tmp_path: Path) -> None:
    """Rates and totals of training and of validation are logged; the time includes that of `length_fn`."""
    monitor = ThroughputMonitor(lambda x: len(x[0]), lambda x: Event().wait(0.05) or 3, available_flops=1e9)
    found = logged(tmp_path, monitor, WithFlops())
    assert [step for step, _ in found] == [1, 3, 3]
    [_, (_, train), (_, validation)] = found
    assert (train["train/batches"], train["train/samples"], train["train/lengths"]) == (4, 8, 12)
    rate = train["train/device/batches_per_sec"]
    rates = [train[f"train/device/{name}_per_sec"] for name in ("samples", "items", "flops")]
    assert rates == pytest.approx([2 * rate, 3 * rate, 10 * rate])
    assert train["train/device/mfu"] == pytest.approx(10 * rate / 1e9)
    assert 0.19 < train["train/time"] == pytest.approx(4 / rate)
    assert validation["validate/samples"] == 8


@pytest.mark.parametrize("callback", [DeviceStatsMonitor(), ThroughputMonitor(len)])
def test_no_logger(tmp_path: Path, callback: Callback) -> None:
    """Without a logger they are refused before training."""
    raises(ConfigurationError, "has no logger", fitted, tmp_path, callbacks=callback)


def test_wrong_values() -> None:
    """What cannot be called, and a window without two times, are refused."""
    raises(InvalidTypeError, "batch_size_fn", ThroughputMonitor, 8)
    raises(InvalidTypeError, "length_fn", ThroughputMonitor, len, 8)
    raises(InvalidArgumentError, "window_size", ThroughputMonitor, len, window_size=1)
