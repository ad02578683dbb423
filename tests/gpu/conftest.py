"""Every test in this folder is marked `gpu`, and skipped where there is no CUDA device."""

from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark and skip; counting devices leaves CUDA uninitialised, so that other tests may fork."""
    has_device = torch.cuda.device_count() > 0
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not has_device:
                item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device, or -m gpu was not given"))
