"""The table that `validate` and `test` print."""

from __future__ import annotations

from collections.abc import Sequence


def metrics_table(stage: str, metrics: Sequence[dict[str, float]]) -> str:
    """Return a table of what `stage` has returned: a line for each metric, a column for each loader.

    >>> print(metrics_table("test", [{"loss/dataloader_idx_0": 0.5}, {"loss/dataloader_idx_1": 0.25}]))
    Test metric | DataLoader 0 | DataLoader 1
    ------------+--------------+-------------
    loss        | 0.5          | 0.25
    """
    columns = [
        {name.removesuffix(f"/dataloader_idx_{place}"): f"{value:.10g}" for name, value in found.items()}
        for place, found in enumerate(metrics)
    ]
    names = sorted({name for column in columns for name in column})
    titles = [f"{stage.capitalize()} metric", *(f"DataLoader {place}" for place in range(len(columns)))]
    lines = [titles, *([name, *(column.get(name, "") for column in columns)] for name in names)]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    rows = [" | ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
    return "\n".join([rows[0], "-+-".join("-" * width for width in widths), *rows[1:]])
