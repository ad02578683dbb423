"""`ModelSummary`: print a table of a module's layers and parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, final

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from rankwise.callbacks.base import Callback
from rankwise.checks import check_minimum

if TYPE_CHECKING:
    from rankwise.trainer import Trainer, TrainingModule

_HEADER = ("name", "type", "parameters", "trainable", "mode")
_BYTES_PER_MB = 1e6


@final
class ModelSummary(Callback):
    """Print a table of layers and parameters on global rank 0 when `fit` starts.

    Args:
        max_depth: how deep the table goes into submodules; -1 for all of them, 0 for the totals only.

    Raises:
        InvalidArgumentError: if `max_depth` is less than -1.
    """

    def __init__(self, max_depth: int = 1) -> None:
        check_minimum("max_depth", max_depth, -1, "-1 (all) or more")
        self.max_depth = max_depth

    def on_fit_start(self, trainer: Trainer, module: TrainingModule) -> None:
        if trainer.is_global_zero:
            print(summary_of(module, self.max_depth), flush=True)  # noqa: T201  the table is what it is for


def summary_of(module: nn.Module, max_depth: int = 1) -> str:
    """Return a table of a module's submodules down to `max_depth`, and the totals.

    A parameter that several submodules share counts in each of their rows, and once in the totals.

    >>> print(summary_of(nn.Sequential(nn.Linear(2, 3), nn.ReLU())))
    name  type    parameters  trainable  mode
    0     Linear           9          9  train
    1     ReLU             0          0  train
    9 parameters (9 trainable, 0 frozen), 0.000 MB
    """
    rows = []
    for name, part in module.named_modules():
        if name and (max_depth == -1 or name.count(".") < max_depth):
            total, trainable, _, has_lazy = _sizes(part)
            mark = " ?" if has_lazy else ""
            mode = "train" if part.training else "eval"
            rows.append((name, type(part).__name__, f"{total:,}{mark}", f"{trainable:,}{mark}", mode))
    total, trainable, num_bytes, has_lazy = _sizes(module)
    totals = (
        f"{total:,} parameters ({trainable:,} trainable, {total - trainable:,} frozen), "
        f"{num_bytes / _BYTES_PER_MB:,.3f} MB"
    )
    lazy = ["? has parameters whose shape the first batch determines"] if has_lazy else []
    return "\n".join([*(_aligned([_HEADER, *rows]) if rows else ()), totals, *lazy])


def _sizes(module: nn.Module) -> tuple[int, int, int, bool]:
    """Return the numbers of all and of trainable parameters, the bytes, and whether some are lazy."""
    parameters = list(module.parameters())
    known: list[Tensor] = [each for each in parameters if not isinstance(each, UninitializedParameter)]
    trainable = sum(each.numel() for each in known if each.requires_grad)
    num_bytes = sum(each.numel() * each.element_size() for each in known)  # sparse ones have no nbytes
    return sum(each.numel() for each in known), trainable, num_bytes, len(known) < len(parameters)


def _aligned(rows: list[tuple[str, ...]]) -> Iterator[str]:
    """Yield the rows as lines; numbers are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if 2 <= place <= 3 else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
