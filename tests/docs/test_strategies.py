"""docs/strategies.md: its program is an example's, and its methods are called in the order of its table."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rankwise import Strategy
from tests.process.training_tasks import Regression, loader, quiet_trainer

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs" / "strategies.md").read_text()
METHODS = re.findall(r"^\| `(\w+)` \| ", PAGE.partition("\n## What is called when\n")[2], re.MULTILINE)


def noting(name: str, path: Path) -> Callable[..., Any]:
    """Return an override that notes its call on rank 0, and what it is called for."""

    def method(self: Strategy, *args: Any, **kwargs: Any) -> Any:
        if not self.is_bound or self.is_global_zero:
            with path.open("a") as file:
                file.write(f"{name}\n")
        return getattr(super(self.noting_class, self), name)(*args, **kwargs)

    return method


def test_the_program_is_an_examples() -> None:
    """The page's class stands in examples/model_averaging.py, which tests/docs/test_examples.py runs."""
    [program] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert program in (REPOSITORY / "examples" / "model_averaging.py").read_text()


def test_methods_are_called_in_the_order_of_the_table(tmp_path: Path) -> None:
    """A fit of one window of two batches calls each method; the first calls are in the table's order."""
    path = tmp_path / "calls"
    noting_class: Any = type("Noting", (Strategy,), {name: noting(name, path) for name in METHODS})
    noting_class.noting_class = noting_class
    trainer = quiet_trainer(noting_class(start_method="fork"), 2, max_epochs=1, accumulate_grad_batches=2)
    trainer.fit(Regression(), loader(8, 2))
    calls = path.read_text().split()
    assert [*dict.fromkeys(calls)] == METHODS
    assert (calls.count("no_backward_sync"), calls.count("sync_gradients")) == (2, 1)
