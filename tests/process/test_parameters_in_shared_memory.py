"""A module whose parameters are in shared memory, which forked ranks would train all at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.process.helpers import ddp
from tests.process.training_tasks import Regression, loader, quiet_trainer


class Tied(Regression):
    """Has a parameter, and a buffer that is a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("part", self.get_parameter("net.0.bias").detach()[2:])


def trained(strategy: object, ranks: int, *, is_shared: bool) -> list[Tensor]:
    """Train a module; return its parameters."""
    module = Tied()
    if is_shared:
        module.share_memory()
    quiet_trainer(strategy, ranks, max_epochs=1).fit(module, loader(24, 12 // ranks))
    whole = module.get_parameter("net.0.bias")
    assert whole.is_shared() == is_shared
    torch.testing.assert_close(module.get_buffer("part"), whole.detach()[2:])
    return [parameter.detach().clone() for parameter in module.parameters()]


@pytest.mark.quick
@pytest.mark.parametrize(("start_method", "ranks"), [("fork", 2), ("fork", 3), ("forkserver", 2)])
def test_each_rank_trains_its_own_parameters(start_method: str, ranks: int) -> None:
    """The result is that of one process, and it comes back into the caller's shared memory."""
    found = trained(ddp(start_method, devices=ranks), ranks, is_shared=True)
    expected = trained("single_device", 1, is_shared=False)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
